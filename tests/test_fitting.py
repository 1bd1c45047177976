"""Factors fitted to what a layer is fed: never worse than projection where it counts."""

import pytest
import torch
from support import LAYOUTS, by_shape, make_shape

from monarch_rocm import MonarchShape, monarch_weight, project
from monarch_rocm.fitting import errors, fit_to, power
from monarch_rocm.projection import change

pytestmark = pytest.mark.filterwarnings("ignore:a Monarch layer")


def inputs(features, seed=0):
    """Rows with a spectrum, and features that hang together."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(features, features, generator=generator, dtype=torch.float64)
    mix *= 0.7 ** torch.arange(features)
    return torch.randn(4 * features, features, generator=generator, dtype=torch.float64) @ mix.T


def error(weight, factors, shape, x):
    monarch = monarch_weight(*factors, layout=shape.layout)[: shape.out_features, : shape.in_features]
    return float(torch.linalg.norm(x @ (weight - monarch).T) / torch.linalg.norm(x @ weight.T))


@by_shape
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_are_nearer_than_those_of_the_nearest_weight(sizes, layout):
    shape = make_shape(sizes, layout)
    x = inputs(shape.in_features)
    weight = torch.randn(shape.out_features, shape.in_features, dtype=torch.float64)
    factors = fit_to(weight, x.T @ x / len(x), shape)
    nearest = project(weight, shape.nblocks, layout=layout, rank=sizes[3])
    assert [factor.shape for factor in factors] == [shape.factor1, shape.factor2]
    assert error(weight, factors, shape, x) <= error(weight, nearest, shape, x) + 1e-6


@by_shape
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weighed_outputs_are_nearer_where_they_matter(sizes, layout):
    """In all of some layers, since turns of the factors end in a local minimum."""
    shape = make_shape(sizes, layout)
    x = inputs(shape.in_features)
    second = x.T @ x / len(x)
    plain = found = 0.0
    for _ in range(5):
        weight = torch.randn(shape.out_features, shape.in_features, dtype=torch.float64)
        matters = torch.logspace(-3, 0, len(weight), dtype=torch.float64)[torch.randperm(len(weight))].diag()
        for outputs in (None, matters):
            left = change(weight, fit_to(weight, second, shape, outputs), shape)
            error = power(left, second, matters) / power(weight, second, matters)
            plain, found = (plain + error, found) if outputs is None else (plain, found + error)
    assert found <= plain + 1e-6
    if shape.nblocks == (1, 1):
        assert found < 0.9 * plain


def test_with_one_block_no_low_rank_matrix_is_better_and_all_ranks_are_predicted():
    weight, x, y = (torch.randn(24, 16, dtype=torch.float64) for _ in range(3))
    second, matters = x.T @ x, y @ y.T / 16 + torch.eye(24)
    predicted = errors(weight, second, (1, 1), "interleaved", matters)
    for rank in (1, 3, 7):
        shape = MonarchShape(16, 24, 1, rank)
        best = power(change(weight, fit_to(weight, second, shape, matters), shape), second, matters)
        assert best == pytest.approx(float(predicted[rank]), rel=5e-3)
        for seed in range(20):
            torch.manual_seed(seed)
            near = [
                factor + 0.02 * torch.randn_like(factor) for factor in fit_to(weight, second, shape, matters)
            ]
            assert power(change(weight, near, shape), second, matters) > best


def test_descent_has_come_to_rest():
    """No step in either factor would gain much more: the gradient is small beside that at the start."""
    shape = make_shape((24, 36, (2, 3), 4), "interleaved")
    x = inputs(24)
    weight = torch.randn(36, 24, dtype=torch.float64)

    def gradient(factors):
        factors = [factor.detach().requires_grad_() for factor in factors]
        monarch = monarch_weight(*factors, layout=shape.layout)
        (x @ (weight - monarch).T).square().sum().backward()
        return max(float(factor.grad.abs().max()) for factor in factors)

    factors = fit_to(weight, x.T @ x / len(x), shape)
    assert gradient(factors) < 0.1 * gradient(project(weight, (2, 3), 4))


def test_white_inputs_give_the_projection():
    shape = make_shape((20, 28, 4, 2), "blocked")
    weight = torch.randn(28, 20, dtype=torch.float64)
    factors = fit_to(weight, torch.eye(20, dtype=torch.float64), shape)
    nearest = monarch_weight(*project(weight, 4, 2, layout="blocked"), layout="blocked")
    torch.testing.assert_close(monarch_weight(*factors, layout="blocked"), nearest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_a_monarch_matrix_is_found_again(dtype):
    shape = make_shape((16, 16, 4, None), "interleaved")
    x = inputs(16)
    true = monarch_weight(*(torch.randn(size) for size in (shape.factor1, shape.factor2)))
    one, two = fit_to(true.to(dtype), x.T @ x / len(x), shape)
    assert one.dtype == two.dtype == dtype
    # Of the weight, which bfloat16 has rounded, and of the inputs' damped directions.
    found = error(true.double(), (one.double(), two.double()), shape, x)
    assert found < (1e-3 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("features", [[], [3]], ids=["all", "one"])
def test_inputs_that_never_vary_leave_finite_factors(features):
    shape = make_shape((12, 12, 3, None), "interleaved")
    x = inputs(12)
    x[:, features or slice(None)] = 0
    weight = torch.randn(12, 12)
    factors = fit_to(weight, x.T @ x / len(x), shape)
    assert all(factor.isfinite().all() for factor in factors)
    second = x.T @ x / len(x)
    assert power(change(weight, factors, shape), second) <= 1.0001 * power(weight, second)
