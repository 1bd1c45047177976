"""Factors fitted to what a layer is fed: never worse than projection where it counts."""

import pytest
import torch
from support import LAYOUTS, by_shape, make_shape

from monarch_rocm import monarch_weight, project
from monarch_rocm.fitting import fit_to

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
    *factors, found = fit_to(weight, x.T @ x / len(x), shape)
    nearest = project(weight, shape.nblocks, layout=layout, rank=sizes[3])
    assert [factor.shape for factor in factors] == [shape.factor1, shape.factor2]
    reached = error(weight, factors, shape, x)
    assert reached <= error(weight, nearest, shape, x) + 1e-6
    assert found == pytest.approx(reached, abs=2e-3)


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

    *factors, _ = fit_to(weight, x.T @ x / len(x), shape)
    assert gradient(factors) < 0.1 * gradient(project(weight, (2, 3), 4))


def test_white_inputs_give_the_projection():
    shape = make_shape((20, 28, 4, 2), "blocked")
    weight = torch.randn(28, 20, dtype=torch.float64)
    *factors, found = fit_to(weight, torch.eye(20, dtype=torch.float64), shape)
    nearest = monarch_weight(*project(weight, 4, 2, layout="blocked"), layout="blocked")
    torch.testing.assert_close(monarch_weight(*factors, layout="blocked"), nearest)
    assert found == pytest.approx(float((weight - nearest).norm() / weight.norm()), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_a_monarch_matrix_is_found_again(dtype):
    shape = make_shape((16, 16, 4, None), "interleaved")
    x = inputs(16)
    true = monarch_weight(*(torch.randn(size) for size in (shape.factor1, shape.factor2)))
    one, two, found = fit_to(true.to(dtype), x.T @ x / len(x), shape)
    assert one.dtype == two.dtype == dtype
    # Of the weight, which bfloat16 has rounded, and of the inputs' damped directions.
    assert found < (1e-3 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("features", [[], [3]], ids=["all", "one"])
def test_inputs_that_never_vary_leave_finite_factors(features):
    shape = make_shape((12, 12, 3, None), "interleaved")
    x = inputs(12)
    x[:, features or slice(None)] = 0
    *factors, found = fit_to(torch.randn(12, 12), x.T @ x / len(x), shape)
    assert all(factor.isfinite().all() for factor in factors)
    assert 0 <= found < 1.0001
