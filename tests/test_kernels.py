"""The Triton path: every shape, dtype and layout, forward and all gradients, judged against float64.

On a machine without a GPU the kernels run in Triton's interpreter.
"""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from support import (
    DEVICE,
    assert_within_budget,
    by_dtype,
    by_layout,
    by_shape,
    force,
    make_operands,
    make_shape,
    run,
    run_dense,
)

triton = pytest.importorskip("triton", minversion="3.4")
bdmm_wgrad = pytest.importorskip("monarch_rocm.kernels.bdmm_wgrad")
from monarch_rocm import batched, dispatch, monarch_linear  # noqa: E402
from monarch_rocm.kernels import launch, tuning  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:a Monarch layer")]
PATHS = ["staged", "batched", "fused", "few"]
NAMES = ("y", "dx", "dblkdiag1", "dblkdiag2", "dbias")


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """Force one family of kernels, whatever the tables say that is fastest."""
    force(request.param, monkeypatch)
    yield request.param
    tuning.refresh()


def check(shape, operands, grad, backend="triton"):
    got = run(shape, operands, backend, grad)
    plain = run(shape, operands, "torch", grad)
    exact = run_dense(shape, operands, grad)
    tokens = grad.numel() // max(1, grad.shape[-1])
    for name, *values in zip(NAMES, got, plain, exact, strict=True):
        assert_within_budget(name, *values, depth=max(shape.P, shape.R, tokens))


@by_shape
@by_layout
@by_dtype
def test_forward_and_gradients_are_within_the_budget(sizes, layout, dtype, path, poison):
    shape = make_shape(sizes, layout)
    tokens = 3 if path == "few" else 37
    operands = make_operands(shape, dtype, (tokens,))
    check(shape, operands, torch.randn(tokens, shape.out_features, device=DEVICE).to(dtype))


@by_shape
@by_layout
@by_dtype
def test_both_stages_in_one_launch_without_gradients(sizes, layout, dtype, monkeypatch, poison):
    """More tiles of tokens than programs, so that each uses its buffer of hidden features again."""
    force("chained", monkeypatch)
    shape = make_shape(sizes, layout)
    operands = [each.detach() for each in make_operands(shape, dtype, (101,))]
    operands[0] = torch.stack([operands[0]] * 2, -1)[..., 0]
    launched = []
    real = dispatch.kernels().chained.launch
    monkeypatch.setattr(dispatch.kernels().chained, "launch", lambda *a: launched.append(a[1]) or real(*a))
    grad = torch.zeros(101, shape.out_features, device=DEVICE).to(dtype)
    got, plain = (
        monarch_linear(
            *operands,
            in_features=shape.in_features,
            out_features=shape.out_features,
            layout=layout,
            backend=backend,
        )
        for backend in ("triton", "torch")
    )
    exact = run_dense(shape, [each.requires_grad_() for each in operands], grad)[0]
    assert launched == [3]
    assert_within_budget("y", got, plain, exact.detach(), depth=max(shape.P, shape.R))
    tuning.refresh()


@pytest.mark.parametrize("tokens", [1, 2, 3, 16, 17, 128, 300])
@by_dtype
def test_any_number_of_tokens(tokens, dtype, path, poison):
    shape = make_shape((40, 56, (4, 7), 3))
    operands = make_operands(shape, dtype, (tokens,))
    check(shape, operands, torch.randn(tokens, 56, device=DEVICE).to(dtype))


def test_no_tokens(path, poison):
    shape = make_shape((40, 56, (4, 7), 3))
    x, *factors = make_operands(shape, torch.float32, (0,))
    y, *grads = run(shape, (x, *factors), "triton")
    assert y.shape == (0, 56)
    assert [g.shape for g in grads] == [t.shape for t in (x, *factors)]
    assert all(not g.any() for g in grads)


@pytest.mark.parametrize(
    ("sizes", "tokens"),
    [((256, 256, 1, 130), 150), ((300, 520, 2, 70), 140), ((520, 300, (2, 1), 100), 129)],
    ids=str,
)
@by_layout
def test_blocks_larger_than_a_tile(sizes, tokens, layout, path, poison):
    shape = make_shape(sizes, layout)
    operands = make_operands(shape, torch.float32, (tokens,))
    check(shape, operands, torch.randn(tokens, shape.out_features, device=DEVICE))


STRIDES = {
    "transposed": lambda x: x.detach().t().contiguous().t(),
    "every second": lambda x: torch.stack([x.detach()] * 2, -1).flatten(-2)[..., ::2],
    "expanded": lambda x: x.detach()[:1].expand_as(x),
    "one value": lambda x: x.detach()[:1, :1].expand_as(x),
    "offset rows": lambda x: torch.cat([x.detach()] * 2, -1)[:, x.shape[-1] :],
    "flipped blocks": lambda x: x.detach().unflatten(0, (-1, 3)).transpose(0, 1).flatten(0, 1),
}


@pytest.mark.parametrize("how", STRIDES)
@pytest.mark.parametrize("what", ["input", "gradient", "factors"])
def test_any_strides(how, what, path, poison):
    shape = make_shape((33, 10, 4, None))
    x, w1, w2, bias = make_operands(shape, torch.float32, (21,))
    grad = torch.randn(21, 10, device=DEVICE)
    if what == "input":
        x = STRIDES[how](x).requires_grad_()
    elif what == "gradient":
        grad = STRIDES[how](grad)
    elif how == "transposed":
        w1, w2 = (w.detach().mT.contiguous().mT.requires_grad_() for w in (w1, w2))
    else:
        w1, w2 = (torch.stack([w.detach()] * 2, -1)[..., 0].requires_grad_() for w in (w1, w2))
    check(shape, (x, w1, w2, bias), grad)


@pytest.mark.parametrize("how", ["every second", "one value"])
def test_bias_of_any_stride(how, path):
    shape = make_shape((60, 60, 4, 4))
    x, w1, w2, bias = make_operands(shape, torch.float32)
    bias = bias.detach()
    bias = torch.stack([bias, bias], -1)[:, 0] if how == "every second" else bias[:1].expand(60)
    check(shape, (x, w1, w2, bias.requires_grad_()), torch.randn(9, 60, device=DEVICE))


@by_dtype
def test_two_runs_are_equal_to_the_bit(dtype, path):
    shape = make_shape((48, 36, (2, 3), 4))
    operands = make_operands(shape, dtype, (700,))
    one, two = (run(shape, operands, "triton") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_weight_gradient_is_split_and_still_right():
    """Many tokens and few tiles: partial sums, which must cover each token once."""
    generator = torch.Generator().manual_seed(0)
    g, a = (torch.randn(2000, n, generator=generator).to(DEVICE) for n in (6, 4))
    exact = torch.einsum("tbo,tbi->boi", g.double().view(-1, 2, 3), a.double().view(-1, 2, 2))
    config = tuning._lookup("bdmm_wgrad", "default", 4, 3, 2, 2048)["config"]
    got = bdmm_wgrad.bdmm_wgrad(g, a, 2, 3, 2, 1, 1, config)
    plain = batched.stage_wgrad(g, a, 2, 3, 2, 1, 1)
    assert_within_budget("dw", got, plain, exact, depth=2000)


def test_wide_offsets_change_nothing(path, monkeypatch):
    shape = make_shape((60, 60, 4, 4))
    operands = make_operands(shape, torch.float32, (37,))
    narrow = run(shape, operands, "triton")
    monkeypatch.setattr(tuning, "is_wide", lambda *tensors: True)
    assert all(torch.equal(a, b) for a, b in zip(narrow, run(shape, operands, "triton"), strict=True))


def test_offsets_widen_only_past_31_bits():
    narrow = torch.empty(2**16, 2**15, device="meta")
    assert not tuning.is_wide(narrow)
    assert tuning.is_wide(narrow, torch.empty(2**16 + 1, 2**15, device="meta"))
    assert not tuning.is_wide(torch.empty(1, 8, device="meta").expand(2**40, 8))


@pytest.mark.parametrize("along", ["tokens", "features"])
@pytest.mark.parametrize("path", [*PATHS, "chained"])
def test_strides_past_31_bits(along, path, monkeypatch):
    """A view whose numbers lie further apart than 32-bit offsets reach; untouched pages cost nothing."""
    force(path, monkeypatch)
    if DEVICE == "cuda" and torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    shape = make_shape((16, 16, 1, 16))
    x, w1, w2, bias = (t.detach() for t in make_operands(shape, torch.float16, (16,)))
    far = torch.empty(15 * 2**28 + 2**10, dtype=torch.float16, device=DEVICE)
    size = (2**28, 1) if along == "tokens" else (1, 2**28)
    spread = far.as_strided((16, 16), size).copy_(x)
    got = monarch_linear(spread, w1, w2, bias, backend="triton")
    assert torch.equal(got, monarch_linear(x, w1, w2, bias, backend="triton"))
    tuning.refresh()


class Recorder:
    """Stands in for a compiled kernel, and for the function that compiles it."""

    arg_names = ("x", "tokens", "stride", "BT", "BO")
    function = packed_metadata = None

    def __init__(self):
        self.compilations = 0

    def __getitem__(self, grid):
        def compile_and_run(*args, **constants):
            self.compilations += 1
            return self

        return compile_and_run

    def run(self, *grid_stream_and_arguments):
        pass


def test_a_kernel_compiles_anew_for_new_constants_strides_or_alignment_and_never_else(monkeypatch):
    stream = SimpleNamespace(get_current_stream=lambda device: 0)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=stream))
    kernel, x = Recorder(), torch.zeros(64)
    one, other = launch.Constants(BT=16, BO=32), launch.Constants(BO=16, BT=32)

    def go(constants, stride, x=x):
        launch.launch(kernel, 1, (x,), (5,), (stride,), constants)
        return kernel.compilations

    assert [go(one, stride) for stride in (48, 48, 1, 48, 7, 2**32, 7)] == [1, 1, 2, 2, 3, 4, 4]
    assert [go(other, 48), go(other, 48), go(one, 48)] == [5, 5, 5]
    assert [go(one, 48, x[1:]), go(one, 48, x[4:]), go(one, 48, x.half())] == [6, 6, 7]


@pytest.mark.parametrize(
    ("version", "kernel", "arch", "copies"),
    [
        ((3, 8), "chained_kernel", "gfx950", False),
        ((3, 9), "chained_kernel", "gfx950", True),
        ((3, 8), "bdmm_kernel", "gfx950", True),
        ((3, 8), "chained_kernel", "sm90", True),
    ],
)
def test_no_copies_into_local_memory_where_triton_lets_them_race(version, kernel, arch, copies, monkeypatch):
    """Triton before 3.9, kernels that come to a loop again; even where the user asks for copies."""
    monkeypatch.setenv("TRITON_HIP_USE_ASYNC_COPY", "1")
    monkeypatch.setattr(launch, "TRITON", version)
    with launch.compiling(SimpleNamespace(__name__=kernel), arch, 2):
        assert triton.knobs.amd.use_async_copy is copies
    assert triton.knobs.amd.use_async_copy is True


@pytest.mark.gpu
def test_more_than_31_bits_of_elements():
    """600,000 rows of 4,096: the last rows lie past 2**31 elements."""
    shape = make_shape((4096, 4096, 64, None))
    operands = [t.detach() for t in make_operands(shape, torch.bfloat16, (8,), bias=False)[:3]]
    x, w1, w2 = operands
    x = x.repeat(75_000, 1)
    y = monarch_linear(x, w1, w2, backend="triton")
    last = monarch_linear(x[-8:].clone(), w1, w2, backend="triton")
    assert torch.equal(y[-8:], last)
    assert torch.equal(y[:8], last)
    for factor in (w1, w2):
        factor.requires_grad_()
    grads = torch.autograd.grad(monarch_linear(x, w1, w2, backend="triton"), (w1, w2), y)
    few = torch.autograd.grad(monarch_linear(x[:8], w1, w2, backend="triton"), (w1, w2), y[:8])
    for many, one in zip(grads, few, strict=True):
        ratio = torch.linalg.vector_norm(many.double()) / torch.linalg.vector_norm(one.double())
        assert abs(float(ratio) / 75_000 - 1) < 0.01


@pytest.mark.gpu
def test_current_stream_and_graph_capture_without_warm_up():
    shape = make_shape((256, 256, 4, None))
    x, w1, w2, bias = (t.detach() for t in make_operands(shape, torch.bfloat16, (64,)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = monarch_linear(x, w1, w2, bias, backend="triton")
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, monarch_linear(x, w1, w2, bias, backend="triton"))


@by_layout
@pytest.mark.parametrize("tokens", [1, 5, 16])
@pytest.mark.parametrize("rows", [8, 32])
@pytest.mark.parametrize("keep", [False, True])
def test_few_tokens_with_hidden_features_dealt_or_not(layout, tokens, rows, keep):
    """Dealt to their blocks where a program's rows hold as many of a block as there are tokens, and nobody
    else reads them.
    """
    shape = make_shape((60, 52, (3, 4), 5), layout)
    x, w1, w2, bias = (t.detach() for t in make_operands(shape, torch.float32, (tokens,)))
    config = {"BT": 16, "BO": rows, "BI": 16, "num_warps": 1, "num_stages": 1}
    bdmv = dispatch.kernels().bdmv
    with mock.patch.object(bdmv, "launch", wraps=bdmv.launch) as launched:
        kind = (shape.out_features, layout == "interleaved", keep)
        y, h = bdmv.bdmv_layer(x, w1, w2, bias, *kind, config, config)
    dealt = not keep and rows >= tokens * 4
    assert [call.args[-1]["DEAL"] for call in launched.call_args_list] == [4 if dealt else 1, 1]
    exact = run_dense(shape, (x, w1, w2, bias), torch.ones_like(y))[0]
    plain = monarch_linear(x, w1, w2, bias, out_features=52, layout=layout, backend="torch")
    assert_within_budget("y", y, plain, exact, depth=16)
    if keep:
        torch.testing.assert_close(h, batched.stage(x, w1, 60, 1, 1, True))


@pytest.mark.gpu
@by_layout
def test_remembered_launches_serve_new_tensors_and_only_their_own_kind(layout):
    """Calls for few tokens are repeated from memory: other tokens, strides, biases, streams, alignment."""
    shape = make_shape((256, 256, 4, None), layout)
    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw(*size):
        return torch.randn(*size, device=DEVICE, generator=generator).half()

    for _ in range(3):
        w1, w2, bias = draw(*shape.factor1), draw(*shape.factor2), draw(256)
        wide = draw(16, 512)
        inputs = [draw(tokens, 256) for tokens in (1, 2, 3, 16)]
        inputs += [wide[:, :256], wide[:, 1:257], wide[:, ::2], draw(256, 5).t()]
        torch.cuda.synchronize()  # what was drawn on this stream is read on others
        for x in inputs:
            for each in (bias, None):
                with torch.cuda.stream(torch.cuda.Stream()):
                    got = monarch_linear(x, w1, w2, each, layout=layout, backend="triton")
                    torch.cuda.current_stream().synchronize()
                plain = monarch_linear(x, w1, w2, each, layout=layout, backend="torch")
                operands = [None if t is None else t.double() for t in (x, w1, w2, each)]
                exact = monarch_linear(*operands, layout=layout, backend="torch")
                assert_within_budget("y", got, plain, exact, depth=64)
