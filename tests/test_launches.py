"""What `tune` measures is what a layer launches, and each kernel computes what it is compared with."""

import pytest
import torch
from support import DEVICE

from monarch_rocm import MonarchShape, dispatch, launches, monarch_linear
from monarch_rocm.kernels import space, tuning

SHAPES = [(64, 96, 4, None), (60, 50, (2, 3), 4), (256, 256, 16, None)]


@pytest.fixture
def asked(monkeypatch):
    """The rows that `dispatch` looks up while no kernel wins."""
    rows = set()

    def config_for(kernel, path, dtype, device, n_out, n_in, tokens):
        rows.add((kernel, n_out, n_in, tuning.bucket_of(tokens)))

    monkeypatch.setattr(dispatch, "config_for", config_for)
    tuning.refresh()  # routes of other tests are remembered
    return rows


def rows_of(*operations):
    return {(t.kernel, t.n_out, t.n_in, t.tokens) for t in launches.tasks(operations)}


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("layout", ["interleaved", "blocked"])
@pytest.mark.parametrize("tokens", [5, 40])
def test_tasks_are_the_rows_that_a_layer_looks_up(sizes, layout, tokens, asked, monkeypatch):
    pytest.importorskip("triton", minversion="3.4")
    monkeypatch.setattr(dispatch, "_choose", lambda *args: ("auto", "for this test"))
    shape, bucket = MonarchShape(*sizes, layout=layout), tuning.bucket_of(tokens)
    factors = [torch.randn(size, requires_grad=True) for size in (shape.factor1, shape.factor2)]
    x = torch.randn(tokens, shape.in_features, requires_grad=True)
    y = monarch_linear(
        x,
        *factors,
        in_features=shape.in_features,
        out_features=shape.out_features,
        layout=layout,
        backend="auto",
    )
    forward = launches.forward(shape, bucket, True)
    assert rows_of(*forward) == asked
    y.sum().backward()
    assert rows_of(*forward, *launches.backward(shape, bucket)) == asked


@pytest.mark.parametrize("sizes", SHAPES[:2], ids=str)
@pytest.mark.parametrize("layout", ["interleaved", "blocked"])
def test_operations_lie_in_memory_as_a_layers_do(sizes, layout, monkeypatch):
    """Shapes and strides of every call of `dispatch`, forward and backward, in their order."""
    shape, seen = MonarchShape(*sizes, layout=layout), []

    def spy(name):
        real = getattr(dispatch, name)

        def call(*args, **options):
            seen.append((name, [(a.shape, a.stride()) for a in args if isinstance(a, torch.Tensor)]))
            return real(*args, **options)

        return call

    for name in ("stage", "stage_wgrad", "interleave"):
        monkeypatch.setattr(dispatch, name, spy(name))
    factors = [torch.randn(size, requires_grad=True) for size in (shape.factor1, shape.factor2)]
    x = torch.randn(40, shape.in_features, requires_grad=True)
    sizes = {"in_features": shape.in_features, "out_features": shape.out_features}
    y = monarch_linear(x, *factors, **sizes, layout=layout, backend="torch")
    seen.clear()  # inside the layer, the first stage may lie as suits a product
    y.backward(torch.randn_like(y))
    names = {launches.Stage: "stage", launches.Wgrad: "stage_wgrad", launches.Interleave: "interleave"}
    draw = launches.draw(torch.float32, torch.device("cpu"))
    expected = [
        (names[type(each)], [(t.shape, t.stride()) for t in each.operands(draw)])
        for each in launches.backward(shape, 40)
    ]
    assert sorted(map(str, seen)) == sorted(map(str, expected))


@pytest.mark.skipif(dispatch.why_not_triton(torch.float32, DEVICE) is not None, reason="no Triton")
@pytest.mark.parametrize("sizes", [(60, 50, (2, 3), 4), (64, 64, 4, None)], ids=str)
@pytest.mark.parametrize("layout", ["interleaved", "blocked"])
def test_kernels_compute_what_they_are_compared_with(sizes, layout):
    shape, device = MonarchShape(*sizes, layout=layout), torch.device(DEVICE)
    operations = (*launches.forward(shape, 8, True), *launches.backward(shape, 8))
    operations += launches.forward(shape, 8, False)
    kernels = set()
    for task in launches.tasks(operations):
        kernels.add(task.kernel)
        sizes = (task.n_out, task.n_in, task.tokens)
        config = tuning.lookup(task.kernel, device, torch.float32, *sizes)["config"]
        for operation in task.operations:
            operands = operation.operands(launches.draw(torch.float32, device))
            got = launches.KERNELS[task.kernel].launch(operation, operands, config)
            for path in ("torch", "auto"):
                wanted = operation.run(operands, path)
                assert len(got) == len(wanted)
                for one, two in zip(got, wanted, strict=True):
                    torch.testing.assert_close(one, two)
    assert {"bdmm", "bdmv", "bdmm_wgrad", "chained"} <= kernels
    assert ("interleave" in kernels) == (layout == "interleaved")
    assert ("fused" in kernels) == (shape.K == 4)


def test_launches_that_share_a_row_are_one_task():
    """A square layer's stages have blocks of one size, and two equal layers launch the same."""
    shape = MonarchShape(64, 64, 4, layout="blocked")
    once = list(launches.tasks(launches.forward(shape, 32, False)))
    twice = list(launches.tasks(launches.forward(shape, 32, False) * 2))
    assert once == twice
    assert [(task.kernel, len(task.operations)) for task in once] == [
        ("bdmm", 2),
        ("fused", 1),
        ("chained", 1),
    ]
    assert str(once[0]) == "bdmm 16x16, 32 tokens"


def test_operands_are_the_same_every_time_and_no_one_elses():
    state = torch.get_rng_state()
    one, two = (launches.draw(torch.bfloat16, torch.device("cpu"))(3, 4) for _ in range(2))
    assert torch.equal(one, two)
    assert one.dtype == torch.bfloat16
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kernel", launches.KERNELS)
@pytest.mark.parametrize(("n_out", "n_in", "tokens"), [(1024, 1024, 8192), (64, 64, 1), (8, 500, 16)])
def test_some_of_the_search_space_fits_any_shape(kernel, n_out, n_in, tokens):
    fits = launches.KERNELS[kernel].fits
    for rocm in (False, True):
        found = [c for c in space.candidates(kernel, rocm) if fits(c, n_out, n_in, tokens)]
        assert found or (kernel == "bdmv" and tokens > dispatch.FEW)
        assert len(found) <= 300
        for config in found:
            assert config["BT"] <= max(16, tokens)
            assert config.get("BO", 1) <= max(16, 2 * n_out)
