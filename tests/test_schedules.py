"""Conversions in the course of a training keep the function, and what the optimizer knows."""

import pytest
import torch
from torch import nn

from monarch_rocm import MonarchConfig, MonarchLinear
from monarch_rocm.optim import param_groups
from monarch_rocm.schedules import (
    SelfGuidedLinear,
    finish_guidance,
    guidance,
    self_guide,
    set_guidance,
    to_dense,
    to_monarch,
)


def make_model(monarch):
    torch.manual_seed(0)
    linear = (lambda a, b: MonarchLinear(a, b, nblocks=4)) if monarch else nn.Linear
    return nn.Sequential(linear(16, 32), nn.GELU(), linear(32, 16), nn.LayerNorm(16))


def step(model, optimizer, seed=0):
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(seed))
    loss = (model(x) - x.roll(1, 1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def held(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def same(a, b):
    return sorted(map(id, a)) == sorted(map(id, b))


MAKERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_to_monarch_puts_the_factors_in_the_weights_place(kind):
    """The optimizer holds exactly the model's parameters, at the factors' rates, and trains on."""
    model = make_model(monarch=False)
    optimizer = MAKERS[kind](param_groups(model, 1e-2, 0.1))
    for seed in range(5):
        step(model, optimizer, seed)
    biases = [model[0].bias, model[2].bias]
    kept = [optimizer.state[bias] for bias in biases]
    to_monarch(model, MonarchConfig(nblocks=4), optimizer=optimizer)
    assert same(held(optimizer), model.parameters())
    rates = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    wanted = {
        id(p): (g["lr"], g["weight_decay"]) for g in param_groups(model, 1e-2, 0.1) for p in g["params"]
    }
    if kind != "adagrad":
        assert rates == wanted
    assert all(optimizer.state[bias] is state for bias, state in zip(biases, kept, strict=True))
    losses = [step(model, optimizer, seed) for seed in range(50)]
    assert losses[-1] < losses[0]


def test_means_of_gradients_become_those_of_the_factors():
    """With momentum's state taken over, it is what backward passes of the factors would have given."""
    model = make_model(monarch=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    weight = model[0].weight
    step(model, optimizer)
    dense = optimizer.state[weight]["exp_avg"].clone()
    to_monarch(model, MonarchConfig(nblocks=4), optimizer=optimizer)
    layer = model[0]
    for factor in (layer.blkdiag1, layer.blkdiag2):
        (wanted,) = torch.autograd.grad(layer.weight, factor, dense, retain_graph=True)
        torch.testing.assert_close(optimizer.state[factor]["exp_avg"], wanted)
        assert float(optimizer.state[factor]["step"]) == 1
        assert (optimizer.state[factor]["exp_avg_sq"] > 0).all()


def test_squares_of_gradients_are_right_where_entries_are_independent():
    """exp_avg_sq after many steps on independent gradients, against the factors' own average."""
    torch.manual_seed(0)
    linear = nn.Linear(16, 16, bias=False)
    holder = nn.Sequential(linear)
    optimizer = torch.optim.AdamW(holder.parameters(), lr=0.0, betas=(0.9, 0.999), weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    layer = MonarchLinear.from_linear(linear, nblocks=4)
    totals = [torch.zeros_like(factor) for factor in (layer.blkdiag1, layer.blkdiag2)]
    scales = torch.rand(16, 16, generator=generator)
    for _ in range(2000):
        linear.weight.grad = torch.randn(16, 16, generator=generator) * scales
        optimizer.step()
        found = torch.autograd.grad(layer.weight, (layer.blkdiag1, layer.blkdiag2), linear.weight.grad)
        for total, grad in zip(totals, found, strict=True):
            total.mul_(0.999).add_(grad.square(), alpha=0.001)
    to_monarch(holder, MonarchConfig(nblocks=4), optimizer=optimizer)
    for factor, total in zip((holder[0].blkdiag1, holder[0].blkdiag2), totals, strict=True):
        ratio = optimizer.state[factor]["exp_avg_sq"] / total
        assert 0.8 < float(ratio.mean()) < 1.2
        assert 0.6 < float(ratio.min()) < float(ratio.max()) < 1.6


def test_first_steps_after_a_conversion_are_no_larger_than_others():
    """Gradients that always agree are far from independent; Adam must not take that for a small spread."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    x, grad = torch.randn(1, 64), torch.randn(1, 64)
    for _ in range(100):
        model(x).backward(grad)
        optimizer.step()
        optimizer.zero_grad()
    to_monarch(model, MonarchConfig(nblocks=4), optimizer=optimizer)
    before = [factor.detach().clone() for factor in model.parameters()]
    model(x).backward(grad)
    optimizer.step()
    for factor, old in zip(model.parameters(), before, strict=True):
        assert float((factor.detach() - old).abs().max()) < 1.2 * 2e-3  # the factors' rate


def test_tied_weights_are_exchanged_once():
    one, two = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
    two.weight = one.weight
    model = nn.Sequential(one, two)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    to_monarch(model, MonarchConfig(nblocks=4), optimizer=optimizer)
    assert same(held(optimizer), model.parameters())


def test_to_dense_keeps_the_function_and_the_rate():
    model = make_model(monarch=True)
    optimizer = torch.optim.AdamW(param_groups(model, 1e-2, 0.1))
    for seed in range(5):
        step(model, optimizer, seed)
    x = torch.randn(3, 16)
    before, bias = model(x), model[0].bias
    state = optimizer.state[bias]
    assert to_dense(model, optimizer=optimizer) is model
    torch.testing.assert_close(model(x), before)
    assert not any(isinstance(module, MonarchLinear) for module in model.modules())
    assert same(held(optimizer), model.parameters())
    rates = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    assert rates[id(model[0].weight)] == pytest.approx(1e-2)
    assert model[0].bias is bias
    assert optimizer.state[bias] is state
    losses = [step(model, optimizer, seed) for seed in range(50)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("share", [1.0, 0.3, 0.0])
@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (10, 33)])
@pytest.mark.filterwarnings("ignore:a Monarch layer")
def test_a_guide_equals_its_layer_at_the_start(share, sizes):
    """Outputs, gradients of inputs, bias and factors, and the guide's gradient, at any share."""
    torch.manual_seed(0)
    layer = MonarchLinear(*sizes, nblocks=4)
    guided = SelfGuidedLinear(layer)
    set_guidance(guided, share)
    x = torch.randn(5, sizes[0], requires_grad=True)
    parameters = [x, layer.bias, layer.blkdiag1, layer.blkdiag2]
    y, z = layer(x), guided(x)
    grad = torch.randn_like(y)
    torch.testing.assert_close(z, y)
    wanted = torch.autograd.grad(y, parameters, grad)
    found = torch.autograd.grad(z, [*parameters, guided.guide], grad)
    for one, two in zip(found[:2], wanted[:2], strict=True):
        torch.testing.assert_close(one, two)
    for one, two in zip(found[2:4], wanted[2:], strict=True):  # the rest goes into the guide
        torch.testing.assert_close(one, (1 - share) * two)
    torch.testing.assert_close(found[4], share * grad.T @ x.detach())


def test_a_guided_layer_compiles_once_for_all_shares():
    guided = SelfGuidedLinear(MonarchLinear(16, 32, nblocks=4))
    run = torch.compile(guided, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 16)
    with torch.compiler.set_stance("default"):
        run(x)
    with torch.compiler.set_stance("fail_on_recompile"):
        for share in (0.5, 0.0):
            set_guidance(guided, share)
            torch.testing.assert_close(run(x), guided(x))


def test_guidance_from_start_to_finish():
    """A guided training ends with the bare layers, and an optimizer that holds just the model."""
    model = self_guide(make_model(monarch=True))
    optimizer = torch.optim.AdamW(param_groups(model, 1e-2))
    assert self_guide(model) is model
    assert sum(isinstance(module, SelfGuidedLinear) for module in model.modules()) == 2
    losses = []
    for i in range(60):
        set_guidance(model, guidance(i, 40))
        losses.append(step(model, optimizer, i))
        if i == 10:
            with pytest.raises(ValueError, match="still have a share"):
                finish_guidance(model)
            with pytest.raises(ValueError, match="finish_guidance before to_dense"):
                to_dense(model)
    before = model(torch.ones(1, 16))
    finish_guidance(model, optimizer=optimizer)
    torch.testing.assert_close(model(torch.ones(1, 16)), before)
    assert same(held(optimizer), model.parameters())
    assert {type(module).__name__ for module in model} == {"MonarchLinear", "GELU", "LayerNorm"}
    assert losses[-1] < losses[0]


def test_a_bare_layer_is_a_model_too():
    layer = MonarchLinear(16, 16)
    guided = self_guide(layer)
    assert isinstance(guided, SelfGuidedLinear)
    set_guidance(guided, 0.0)
    assert finish_guidance(guided) is layer
    assert isinstance(to_dense(layer), nn.Linear)
    assert isinstance(to_monarch(nn.Linear(16, 16))[0], MonarchLinear)
