"""`MonarchLinear` where `nn.Linear` stood."""

import copy
import inspect
import pickle

import pytest
import torch
from support import DEVICE, by_layout, dense_weight, svd_budget
from torch import nn

from monarch_rocm import MonarchLinear


def test_positional_arguments_are_those_of_nn_linear():
    ours = list(inspect.signature(MonarchLinear).parameters)
    dense = list(inspect.signature(nn.Linear).parameters)
    assert ours[: len(dense)] == dense
    layer = MonarchLinear(8, 12, False, "cpu", torch.float64)
    assert layer.bias is None
    assert layer.blkdiag1.dtype == torch.float64


def test_device_and_dtype_reach_every_parameter():
    layer = MonarchLinear(8, 12, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.bfloat16)}
    assert layer(torch.empty(3, 8, device="meta", dtype=torch.bfloat16)).shape == (3, 12)
    with torch.device("meta"):
        assert MonarchLinear(8, 12).blkdiag2.is_meta
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert layer(torch.ones(8, dtype=torch.bfloat16)).isfinite().all()
    assert nn.utils.skip_init(MonarchLinear, 8, 12).blkdiag1.shape == (4, 2, 2)


def test_state_dict_of_fly_loads_strictly():
    """fly names its parameters so, with these shapes; values keep their meaning."""
    for sizes, one, two in (((10, 33), (4, 3, 3), (4, 9, 3)), ((33, 10), (4, 3, 9), (4, 3, 3))):
        state = {"blkdiag1": torch.randn(one), "blkdiag2": torch.randn(two), "bias": torch.randn(sizes[1])}
        with pytest.warns(UserWarning, match="structural zeros"):
            layer = MonarchLinear(*sizes, nblocks=4)
        layer.load_state_dict(state, strict=True)
        x = torch.randn(5, sizes[0])
        weight = dense_weight(state["blkdiag1"], state["blkdiag2"], "interleaved")[: sizes[1], : sizes[0]]
        torch.testing.assert_close(layer(x), nn.functional.linear(x, weight, state["bias"]))
        assert list(layer.state_dict()) == ["bias", "blkdiag1", "blkdiag2"] or set(layer.state_dict()) == set(
            state
        )


def test_state_dict_of_another_shape_is_refused():
    with pytest.raises(RuntimeError, match="size mismatch for blkdiag1"):
        MonarchLinear(64, 64, nblocks=4).load_state_dict(MonarchLinear(64, 64, nblocks=2).state_dict())


@by_layout
def test_copies_and_pickles(layout):
    layer = MonarchLinear(16, 24, nblocks=(2, 4), rank=2, layout=layout).eval()
    x = torch.randn(3, 16)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))
        assert repr(other) == repr(layer)
        assert other.blkdiag1 is not layer.blkdiag1


def test_repr_tells_the_structure():
    assert repr(MonarchLinear(64, 32, bias=False, nblocks=(4, 2), rank=3, layout="blocked")) == (
        "MonarchLinear(in_features=64, out_features=32, bias=False, nblocks=(4, 2), rank=3, layout=blocked)"
    )
    assert "nblocks=4, rank=4, layout=interleaved" in repr(MonarchLinear(64, 64))


@by_layout
def test_weight_is_dense_and_differentiable(layout):
    layer = MonarchLinear(10, 33, nblocks=3, layout=layout, dtype=torch.float64)
    x = torch.randn(5, 10, dtype=torch.float64)
    y = nn.functional.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(y, layer(x))
    through_weight = torch.autograd.grad(y.pow(2).sum(), layer.parameters())
    through_layer = torch.autograd.grad(layer(x).pow(2).sum(), layer.parameters())
    for one, two in zip(through_weight, through_layer, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("value", [torch.zeros(8, 8), nn.Parameter(torch.zeros(8, 8)), None])
def test_weight_cannot_be_set(value):
    layer = MonarchLinear(8, 8)
    with pytest.raises(AttributeError, match="from_linear"):
        layer.weight = value
    assert set(dict(layer.named_parameters())) == {"blkdiag1", "blkdiag2", "bias"}


@by_layout
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_from_linear_at_full_rank_and_back(layout, dtype):
    linear = nn.Linear(24, 40, dtype=dtype, device=DEVICE).eval()
    linear.bias.requires_grad_(False)
    with pytest.warns(UserWarning, match="more than the"):
        layer = MonarchLinear.from_linear(linear, nblocks=4, rank=6, layout=layout, backend="torch")
    assert (layer.blkdiag1.dtype, layer.training, layer.backend) == (dtype, False, "torch")
    assert layer.blkdiag1.requires_grad
    assert not layer.bias.requires_grad
    assert layer.bias is not linear.bias
    back = layer.to_linear()
    assert type(back) is nn.Linear
    error = torch.linalg.vector_norm((back.weight - linear.weight).double())
    assert error <= svd_budget(linear.weight)
    assert torch.equal(back.bias, linear.bias)
    x = torch.randn(3, 24, dtype=torch.float64, device=DEVICE)
    torch.testing.assert_close(layer.double()(x), back.double()(x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_leaves_conversions_alone(dtype):
    layer = MonarchLinear(16, 16, nblocks=2)
    exact = layer.to_linear()
    with torch.autocast("cpu", dtype):
        assert torch.equal(layer.to_linear().weight, exact.weight)
        assert layer.weight.dtype == torch.float32


def test_from_linear_takes_linears_only():
    with pytest.raises(TypeError, match="ReLU"):
        MonarchLinear.from_linear(nn.ReLU())


def test_from_linear_on_meta():
    layer = MonarchLinear.from_linear(nn.Linear(8, 8, device="meta").requires_grad_(False))
    assert all(p.is_meta and not p.requires_grad for p in layer.parameters())


def test_modules_that_share_a_layer():
    layer = MonarchLinear(8, 8)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    assert len(list(model.parameters())) == 3
    model(torch.randn(2, 8)).sum().backward()
    assert layer.blkdiag1.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"nblocks": 0}, ValueError),
        ({"rank": -1}, ValueError),
        ({"layout": "x"}, ValueError),
        ({"backend": "x"}, ValueError),
        ({"nblocks": 1.5}, TypeError),
    ],
)
def test_bad_arguments_are_refused(kwargs, error):
    with pytest.raises(error):
        MonarchLinear(8, 8, **kwargs)


def test_replaced_factor_of_another_shape_is_refused():
    layer = MonarchLinear(64, 64, nblocks=4)
    layer.blkdiag1 = nn.Parameter(torch.zeros(4, 8, 16))
    with pytest.raises(RuntimeError, match=r"\(4, 8, 16\)"):
        layer(torch.zeros(1, 64))


def test_training_lowers_the_loss():
    torch.manual_seed(0)
    model = nn.Sequential(MonarchLinear(32, 64), nn.GELU(), MonarchLinear(64, 8, rank=1))
    x, target = torch.randn(256, 32), torch.randn(256, 8)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(60):
        loss = nn.functional.mse_loss(model(x), target)
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]
