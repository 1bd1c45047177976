"""`monarch_linear` as a drop-in for F.linear: what it takes, what it refuses, autocast."""

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, dense_weight, make_operands, make_shape

from monarch_rocm import MonarchLinear, monarch_linear

SHAPE = make_shape((10, 33, 4, None))
BACKENDS = ["torch", "reference"]
by_backend = pytest.mark.parametrize("backend", BACKENDS)


def operands(dtype=torch.float64, lead=(6,)):
    return make_operands(SHAPE, dtype, lead)


def call(x, w1, w2, bias, backend="torch", **kwargs):
    return monarch_linear(
        x, w1, w2, bias, **({"in_features": 10, "out_features": 33, "backend": backend} | kwargs)
    )


INPUTS = {
    "1-D": lambda x: x[0],
    "4-D": lambda x: x.view(1, 2, 3, 10),
    "0 rows": lambda x: x[:0],
    "0 rows, 3-D": lambda x: x[:0].unsqueeze(0),
    "transposed": lambda x: x.t().contiguous().t(),
    "swapped batch": lambda x: x.view(2, 3, 10).transpose(0, 1),
    "expanded": lambda x: x[:1].expand(6, 10),
    "every second": lambda x: x.repeat_interleave(2, -1)[:, ::2],
}


@by_backend
@pytest.mark.parametrize("how", INPUTS)
def test_inputs_of_any_rank_and_stride(backend, how):
    x, w1, w2, bias = operands()
    weight = dense_weight(w1, w2, "interleaved")[:33, :10]
    given = INPUTS[how](x)
    y, exact = call(given, w1, w2, bias, backend), F.linear(given, weight, bias)
    assert y.is_contiguous()
    torch.testing.assert_close(y, exact)
    wanted = (x, w1, w2, bias)
    for got, dense in zip(
        torch.autograd.grad(y.pow(2).sum(), wanted),
        torch.autograd.grad(exact.pow(2).sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(got, dense)


GRADIENTS = {
    "stride 0": lambda y: y.sum(),
    "one column": lambda y: y[:, 5].sum(),
    "sliced": lambda y: torch.cat([y, torch.ones_like(y)], 1).pow(2).sum(),
    "expanded": lambda y: (y.sum(0) * torch.arange(33.0, device=y.device)).sum(),
    "transposed": lambda y: (y.t().contiguous() ** 2).sum(),
}


@by_backend
@pytest.mark.parametrize("how", GRADIENTS)
def test_gradients_of_any_stride(backend, how):
    x, w1, w2, bias = operands()
    weight = dense_weight(w1, w2, "interleaved")[:33, :10]
    wanted = (x, w1, w2, bias)
    got = torch.autograd.grad(GRADIENTS[how](call(*wanted, backend)), wanted)
    exact = torch.autograd.grad(GRADIENTS[how](F.linear(x, weight, bias)), wanted)
    for one, dense in zip(got, exact, strict=True):
        torch.testing.assert_close(one, dense)


@by_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("parameters", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cast", [True, False])
def test_autocast_gives_the_dtypes_of_nn_linear(backend, dtype, parameters, cast):
    """The active dtype decides, float64 stays, and gradients come in the parameters' dtype."""
    ours = MonarchLinear(10, 33, dtype=parameters, device=DEVICE, backend=backend)
    dense = torch.nn.Linear(10, 33, dtype=parameters, device=DEVICE)
    found = []
    for module in (ours, dense):
        x = torch.randn(4, 10, device=DEVICE, dtype=parameters, requires_grad=True)
        with torch.autocast(DEVICE, dtype, enabled=cast):
            y = module(x)
        y.float().sum().backward()
        found.append((y.dtype, x.grad.dtype, module.bias.grad.dtype))
    assert found[0] == found[1]
    assert ours.blkdiag1.grad.dtype == ours.blkdiag2.grad.dtype == parameters


def test_autocast_in_the_backward_changes_no_dtype():
    x, w1, w2, bias = operands(torch.float32)
    y = call(x, w1, w2, bias)
    exact = torch.autograd.grad(y.sum(), (x, w1, w2, bias), retain_graph=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        got = torch.autograd.grad(y.sum(), (x, w1, w2, bias))
    for one, plain in zip(got, exact, strict=True):
        assert torch.equal(one, plain)


@by_backend
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x, *f: (x[:, :9], *f), r"in_features=10, but x is \(6, 9\)"),
        (lambda x, *f: (torch.cat([x, x], 1), *f), r"in_features=10, but x is \(6, 20\)"),
        (lambda x, *f: (x[0, 0], *f), r"but x is \(\)"),
        (lambda x, *f: (x.float(), *f), "x torch.float32, blkdiag1 torch.float64"),
        (lambda x, w1, w2, b: (x, w1, w2.float(), b), "blkdiag2 torch.float32"),
        (lambda x, w1, w2, b: (x, w1, w2, b.float()), "bias torch.float32"),
        (lambda x, w1, w2, b: (x, w1, w2, b[:3]), r"bias must be \(33,\).* it is \(3,\)"),
        (lambda x, w1, w2, b: (x, w1.to("meta"), w2, b), "blkdiag1 meta"),
        (lambda *all: [t.int() for t in all], "floating-point .* torch.int32"),
    ],
)
def test_operands_that_do_not_fit_raise_with_both_sides(backend, change, said):
    given = [t.detach() for t in operands()]
    with pytest.raises(RuntimeError, match=said):
        call(*change(*given), backend)


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"backend": "cuda"}, "backend='cuda'"),
        ({"layout": "fly"}, "layout='fly'"),
        ({"in_features": 8}, "in_features=8 .* from 9 to 12"),
        ({"out_features": 99}, "out_features=99 .* from 33 to 36"),
    ],
)
def test_arguments_that_do_not_fit_raise(kwargs, said):
    with pytest.raises(ValueError, match=said):
        call(*operands(), **kwargs)


@pytest.mark.parametrize(
    ("position", "said"), [(0, "x must be a torch.Tensor, but it is a list"), (3, "bias .* it is a list")]
)
def test_what_is_no_tensor_is_named(position, said):
    given = list(operands())
    given[position] = [1.0]
    with pytest.raises(TypeError, match=said):
        call(*given)


@pytest.mark.parametrize("size", ["10", 10.0])
def test_sizes_must_be_ints(size):
    with pytest.raises(TypeError, match="in_features="):
        call(*operands(), in_features=size)


@pytest.mark.parametrize("lead", [(6,), (2, 3), ()])
@pytest.mark.parametrize("layout", ["interleaved", "blocked"])
def test_output_can_be_changed_in_place(lead, layout):
    """As that of nn.Linear can: nn.ReLU(inplace=True), residual additions."""
    shape = make_shape((10, 33, 4, None), layout)
    x, w1, w2, bias = make_operands(shape, torch.float64, lead)
    found = []
    for relu in (F.relu_, F.relu):
        y = relu(call(x, w1, w2, bias, layout=layout))
        found.append((y, *torch.autograd.grad(y.sum(), (x, w1, w2, bias))))
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9])
@pytest.mark.parametrize("keep", [True, False])
def test_hidden_features_are_padded_inside_and_kept_dense(tokens, keep):
    x, w1, w2, bias = (t.detach() for t in operands(lead=(tokens,)))
    y, h = torch.ops.monarch_rocm.linear(x, w1, w2, bias, 33, "interleaved", keep, "torch")
    torch.testing.assert_close(y, F.linear(x, dense_weight(w1, w2, "interleaved")[:33, :10], bias))
    assert h.shape == (tokens, 12 if keep else 0)
    assert not keep or h.t().is_contiguous()
