"""The einops oracle against an independent dense formula, and the relations that fly publishes."""

import math

import pytest
import torch
from support import by_layout, by_shape, dense_weight, make_operands, make_shape, run, run_dense

from monarch_rocm import monarch_linear, monarch_weight, project

pytestmark = pytest.mark.filterwarnings("ignore:a Monarch layer")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.complex64: 1e-5}


@by_shape
@by_layout
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("lead", [(9,), (), (2, 0, 3), (130,)], ids=str)
def test_forward_and_gradients_equal_the_dense_formula(sizes, layout, backend, lead):
    shape = make_shape(sizes, layout)
    operands = make_operands(shape, torch.float64, lead, device="cpu")
    grad = torch.randn(*lead, shape.out_features, dtype=torch.float64)
    for got, exact in zip(run(shape, operands, backend, grad), run_dense(shape, operands, grad), strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-11, atol=1e-11)


@by_layout
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_dtypes_keep_to_the_dense_formula(layout, backend, dtype):
    shape = make_shape((33, 50, (4, 5), 3), layout)
    x, w1, w2, bias = (t.detach().to(dtype) for t in make_operands(shape, torch.float64, device="cpu"))
    if dtype.is_complex:
        x, w1, w2, bias = (t * torch.exp(1j * torch.rand_like(t.real)) for t in (x, w1, w2, bias))
    x, w1, w2, bias = (t.requires_grad_() for t in (x, w1, w2, bias))
    got = run(shape, (x, w1, w2, bias), backend)
    y = x @ dense_weight(w1, w2, layout)[:50, :33].T + bias
    wanted = [y, *torch.autograd.grad(y, (x, w1, w2, bias), torch.ones_like(y))]
    for value, exact in zip(got, wanted, strict=True):
        error = (value - exact).abs().max() / exact.abs().max()
        assert error < TOLERANCE[dtype]


@by_shape
@by_layout
def test_monarch_weight_equals_the_dense_formula(sizes, layout):
    shape = make_shape(sizes, layout)
    _, w1, w2, _ = make_operands(shape, torch.float64, device="cpu")
    torch.testing.assert_close(monarch_weight(w1, w2, layout=layout), dense_weight(w1, w2, layout))


def test_identity_factors_are_the_identity():
    x = torch.randn(3, 12)
    w1, w2 = torch.eye(3).repeat(4, 1, 1), torch.eye(4).repeat(3, 1, 1)
    assert torch.equal(monarch_linear(x, w1, w2, backend="reference"), x)


def test_layouts_differ_by_a_relabelling_of_outputs():
    shape = make_shape((20, 28, (4, 7), 2))
    x, w1, w2, _ = make_operands(shape, torch.float64, device="cpu")
    interleaved = monarch_linear(x, w1, w2)
    blocked = monarch_linear(x, w1, w2, layout="blocked")
    assert torch.equal(interleaved, blocked.unflatten(-1, (7, 4)).transpose(-1, -2).flatten(-2))


@pytest.mark.parametrize("size", [16, 64])
def test_fourier_matrix_is_monarch(size):
    """A DFT of a product of sizes is exactly Monarch: fly's own test, here by projection."""
    root = math.isqrt(size)
    dft = torch.fft.fft(torch.eye(size, dtype=torch.complex128), norm="ortho")
    permuted = dft[:, torch.arange(size).view(root, root).T.reshape(-1)]
    w1, w2 = project(permuted, nblocks=root, rank=1)
    torch.testing.assert_close(monarch_weight(w1, w2), permuted)
    x = torch.randn(2, size, dtype=torch.complex128)
    torch.testing.assert_close(monarch_linear(x, w1, w2, backend="reference"), x @ permuted.T)


def test_forward_mode_of_the_reference_is_right():
    shape = make_shape((10, 33, 4, None))
    x, w1, w2, _ = (
        None if t is None else t.detach()
        for t in make_operands(shape, torch.float64, bias=False, device="cpu")
    )
    _, tangent = torch.func.jvp(
        lambda x: monarch_linear(x, w1, w2, in_features=10, out_features=33, backend="reference"), (x,), (x,)
    )
    torch.testing.assert_close(tangent, x @ dense_weight(w1, w2, "interleaved")[:33, :10].T)


@by_layout
def test_outputs_that_are_cut_are_contiguous(layout):
    shape = make_shape((10, 33, 4, None), layout)
    x, w1, w2, _ = make_operands(shape, torch.float64, bias=False, device="cpu")
    for backend in ("reference", "torch"):
        y = monarch_linear(x, w1, w2, out_features=33, in_features=10, layout=layout, backend=backend)
        assert y.is_contiguous()
