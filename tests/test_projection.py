"""`project` is the best approximation there is, for every shape and dtype."""

import pytest
import torch
from sub_blocks import sub_blocks
from support import DEVICE, by_layout, by_shape, make_operands, make_shape, svd_budget

from monarch_rocm import monarch_weight, project

pytestmark = pytest.mark.filterwarnings("ignore:a Monarch layer")


def rebuilt(weight, nblocks, rank=None, layout="interleaved"):
    w1, w2 = project(weight, nblocks, rank, layout=layout)
    return monarch_weight(w1, w2, layout=layout)[: weight.shape[0], : weight.shape[1]]


@by_shape
@by_layout
def test_squared_error_is_the_sum_of_the_discarded_singular_values(sizes, layout):
    """Also where L does not divide Q and the sub-blocks' ranks differ."""
    shape = make_shape(sizes, layout)
    weight = torch.randn(shape.out_features, shape.in_features, dtype=torch.float64)
    exact = sum(
        float(torch.linalg.svdvals(block)[rank:].square().sum()) for block, rank in sub_blocks(weight, shape)
    )
    got = float((rebuilt(weight, shape.nblocks, sizes[3], layout) - weight).square().sum())
    if sizes[3] is None and shape.K != shape.L:
        assert shape.Q % shape.L == 0
    assert got == pytest.approx(exact, rel=1e-9, abs=1e-18)


@by_shape
@by_layout
def test_monarch_matrices_are_reproduced(sizes, layout):
    shape = make_shape(sizes, layout)
    _, w1, w2, _ = make_operands(shape, torch.float64, device="cpu")
    weight = monarch_weight(w1, w2, layout=layout).detach()
    torch.testing.assert_close(rebuilt(weight, shape.nblocks, sizes[3], layout), weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_dtype_and_device_are_kept(dtype):
    weight = torch.randn(24, 32, device=DEVICE).to(dtype).requires_grad_()
    w1, w2 = project(weight, 4, 6)
    assert {(w.dtype, w.device, w.requires_grad, w.grad_fn) for w in (w1, w2)} == {
        (dtype, weight.device, False, None)
    }
    error = torch.linalg.vector_norm(monarch_weight(w1.double(), w2.double()) - weight.double())
    assert error <= svd_budget(weight)


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_complex_weights(dtype):
    weight = torch.randn(12, 8, dtype=torch.complex128).to(dtype)
    w1, w2 = project(weight, 2, 4)
    assert w1.dtype == w2.dtype == dtype
    error = monarch_weight(w1.to(torch.complex128), w2.to(torch.complex128)) - weight.to(torch.complex128)
    assert torch.linalg.vector_norm(error) <= svd_budget(weight)


@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_autocast_changes_nothing():
    weight = torch.randn(16, 16)
    exact = rebuilt(weight, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rebuilt(weight, 4, 4), exact)


def test_factors_of_two_dtypes_are_refused():
    w1, w2 = project(torch.randn(8, 8), 2)
    with pytest.raises(RuntimeError, match=r"blkdiag1 has torch\.float32 and blkdiag2 has torch\.float64"):
        monarch_weight(w1, w2.double())


def test_large_half_precision_weights_do_not_overflow():
    weight = torch.full((1024, 1024), 6e4, dtype=torch.float16)
    w1, w2 = project(weight, 2, 1)
    assert w1.isfinite().all()
    assert w2.isfinite().all()
    ratio = monarch_weight(w1.double(), w2.double()) / weight.double()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=2e-3, atol=0)


def test_rank_above_the_sub_blocks_own_is_filled_with_zeros():
    weight = torch.randn(8, 12, dtype=torch.float64)
    torch.testing.assert_close(rebuilt(weight, 4, 7), weight)


def test_zero_and_tiny_weights():
    assert not rebuilt(torch.zeros(8, 8), 2).any()
    weight = torch.randn(8, 8) * 1e-30
    torch.testing.assert_close(rebuilt(weight, 2, 4) / 1e-30, weight / 1e-30)


@pytest.mark.parametrize(
    ("weight", "nblocks", "error", "said"),
    [
        (
            torch.tensor([[1.0, float("nan")], [float("inf"), 0]]),
            1,
            ValueError,
            "2 entries that are not finite, of 4",
        ),
        (torch.ones(2, 2, 2), 1, ValueError, r"\(2, 2, 2\)"),
        (torch.ones(2, 2, device="meta"), 1, ValueError, "meta"),
        ([[1.0]], 1, TypeError, "list"),
        (torch.ones(2, 2, dtype=torch.int64), 1, TypeError, "torch.int64"),
        (torch.ones(2, 2), 0, ValueError, "nblocks=0"),
    ],
)
def test_weights_that_cannot_be_projected_are_refused(weight, nblocks, error, said):
    with pytest.raises(error, match=said):
        project(weight, nblocks)


def test_blocks_of_equal_complex_numbers():
    """LAPACK's SVD fails on some of these in complex64; they are of rank 1, and so reproduced by any rank."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        value = torch.randn((), generator=generator, dtype=torch.complex64)
        weight = value.expand(32, 16)
        w1, w2 = project(weight, nblocks=2, rank=1)
        assert w1.dtype == torch.complex64
        torch.testing.assert_close(monarch_weight(w1, w2), weight.clone())
