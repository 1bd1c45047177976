"""Learning rates of factors come from shapes; Muon makes each block's update orthogonal."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from monarch_rocm import MonarchLinear, MonarchShape
from monarch_rocm.optim import Muon, StepCaps, factor_rates, orthogonal, param_groups


@pytest.mark.parametrize("sizes", [(512, 512), (512, 2048), (2048, 512)])
@pytest.mark.parametrize("nblocks", [2, 4, 16])
def test_muons_rates_change_factors_by_the_share_that_a_dense_weight_would(sizes, nblocks):
    """The derivation of `factor_rates`: a step with entries of one size, relative to what is there."""

    def share(layer):
        before = {name: p.detach().clone() for name, p in layer.named_parameters()}
        optimizer = torch.optim.Adam(param_groups(layer, 1e-4, matrices=True))
        layer(torch.randn(8, sizes[0])).square().mean().backward()
        optimizer.step()
        return {name: _rms(p - before[name]) / _rms(before[name]) for name, p in layer.named_parameters()}

    torch.manual_seed(0)
    dense = share(nn.Linear(*sizes, bias=False))["weight"]
    for found in share(MonarchLinear(*sizes, bias=False, nblocks=nblocks)).values():
        assert found / dense == pytest.approx(3**-0.25, rel=0.05)  # new factors are 3**0.25 times as large


@pytest.mark.parametrize("nblocks", [1, 2, 4, 16])
def test_adams_rates_change_outputs_of_square_layers_as_much_as_a_dense_layers(nblocks):
    """The derivation of `factor_rates`: how far one step takes an output that all changes agree on."""
    torch.manual_seed(0)
    x, g = torch.randn(512), torch.randn(512)

    def gain(layer, factors):
        rates = {id(p): group["lr"] for group in param_groups(layer, 1.0) for p in group["params"]}
        grads = torch.autograd.grad(layer(x) @ g, factors)
        return [rates[id(p)] * float(grad.abs().sum()) for p, grad in zip(factors, grads, strict=True)]

    dense = nn.Linear(512, 512, bias=False)
    layer = MonarchLinear(512, 512, bias=False, nblocks=nblocks)
    for factor in (dense.weight, layer.blkdiag1, layer.blkdiag2):
        nn.init.normal_(factor, std=factor.shape[-1] ** -0.5)
    (whole,) = gain(dense, [dense.weight])
    for part in gain(layer, [layer.blkdiag1, layer.blkdiag2]):
        assert part / whole == pytest.approx(0.5, rel=0.1)


def test_rates_are_those_of_the_blocks():
    model = nn.Sequential(MonarchLinear(64, 64, nblocks=4), MonarchLinear(256, 64, nblocks=4))
    groups = param_groups(model, lr=1.0)
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    assert rates[id(model[0].blkdiag1)] == 2
    assert rates[id(model[1].blkdiag2)] == 4
    assert rates[id(model[1].bias)] == 1


def test_padding_does_not_change_the_rate_of_the_first_factor():
    assert factor_rates(MonarchShape(62, 64, nblocks=4))[0] == 2


def test_every_parameter_is_in_one_group_and_vectors_do_not_decay():
    model = nn.Sequential(nn.Embedding(10, 16), MonarchLinear(16, 16), nn.LayerNorm(16), nn.Linear(16, 10))
    model[3].weight = model[0].weight
    model[1].blkdiag1.requires_grad_(False)
    groups = param_groups(model, 1e-3, 0.1)
    params = [p for group in groups for p in group["params"]]
    assert sorted(map(id, params)) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    for group in groups:
        assert group["initial_lr"] == group["lr"]
        assert all((p.ndim > 1) == (group["weight_decay"] == 0.1) for p in group["params"])


def test_matrices_and_the_rest_are_everything():
    model = nn.Sequential(nn.Embedding(10, 16), MonarchLinear(16, 16), nn.LayerNorm(16), nn.Linear(16, 10))
    matrices = param_groups(model, 1e-3, matrices=True)
    rest = param_groups(model, 1e-3, without=matrices)
    chosen = {id(p) for group in matrices for p in group["params"]}
    assert chosen == {id(p) for p in (model[1].blkdiag1, model[1].blkdiag2, model[3].weight)}
    assert chosen.isdisjoint(id(p) for group in rest for p in group["params"])


@pytest.mark.parametrize(("matrices", "power"), [(False, 1), (True, 0.5)])
def test_base_width_makes_rates_fall_with_the_width_but_not_those_of_embeddings(matrices, power):
    """A layer that reads more than the model's width gets the root of it less; Muon's fall by the root."""
    for width in (64, 256):
        layers = nn.Linear(width, width), MonarchLinear(width, 4 * width), MonarchLinear(4 * width, width)
        model = nn.Sequential(nn.Embedding(10, width), *layers)
        groups = param_groups(model, 1e-3, base_width=64, matrices=matrices)
        groups += param_groups(model, 1e-3, base_width=64, without=groups) if matrices else []
        rates = {id(p): group["lr"] for group in groups for p in group["params"]}
        scale = (64 / width) ** power
        assert rates[id(model[0].weight)] == 1e-3
        assert rates[id(model[1].weight)] == pytest.approx(1e-3 * scale)
        assert rates[id(model[2].blkdiag1)] == rates[id(model[2].blkdiag2)] == pytest.approx(2e-3 * scale)
        assert rates[id(model[3].blkdiag1)] == pytest.approx(1e-3 * scale)
        assert rates[id(model[3].blkdiag2)] == pytest.approx(2e-3 * scale)


def test_groups_are_those_of_the_original_after_deepcopy():
    model = nn.Sequential(MonarchLinear(64, 256), nn.GELU(), nn.Linear(256, 64))
    groups, copied = param_groups(model, 1e-3, 0.1), param_groups(copy.deepcopy(model), 1e-3, 0.1)
    for one, two in zip(groups, copied, strict=True):
        assert one["lr"] == two["lr"]
        assert [p.shape for p in one["params"]] == [p.shape for p in two["params"]]


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="base_width must be at least 1"):
        param_groups(MonarchLinear(16, 16), 1e-3, base_width=0)
    with pytest.raises(ValueError, match="no parameter"):
        param_groups(nn.GELU(), 1e-3)
    with pytest.raises(ValueError, match="not a parameter of shape \\(16,\\)"):
        Muon(MonarchLinear(16, 16).parameters())


def test_muon_makes_each_block_orthogonal_on_its_own():
    """A step on a factor is the step on each of its blocks alone, scaled to AdamW's size."""
    torch.manual_seed(0)
    factor = nn.Parameter(torch.randn(4, 8, 16))
    blocks = [nn.Parameter(block.clone()) for block in factor.detach()]
    grad = torch.randn_like(factor)
    factor.grad = grad
    for block, part in zip(blocks, grad, strict=True):
        block.grad = part.clone()
    before = factor.detach().clone()
    Muon([factor], lr=0.1).step()
    Muon(blocks, lr=0.1).step()
    torch.testing.assert_close(factor.detach(), torch.stack([b.detach() for b in blocks]))
    change = before - factor.detach()
    assert 0.7 < float(change.square().mean().sqrt()) / 0.02 < 1.2


def test_orthogonal_keeps_singular_vectors():
    torch.manual_seed(0)
    x = torch.randn(3, 12, 20)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    near = u.mT @ orthogonal(x) @ v.mT
    values = near.diagonal(dim1=-2, dim2=-1)
    assert float((near - torch.diag_embed(values)).abs().max()) < 1e-4
    assert float(values.min()) > 0.5
    assert float(values.max()) < 1.3


def _rms(tensor):
    return float(tensor.detach().square().mean().sqrt())


@pytest.mark.parametrize("sizes", [(64, 64), (64, 256), (256, 64), (50, 70)])
@pytest.mark.parametrize("share", [1.0, 0.25])
def test_caps_clip_changes_but_not_their_direction(sizes, share):
    """A large step ends at the cap, which falls with the schedule; a small one is as it was."""
    torch.manual_seed(0)
    layer = MonarchLinear(*sizes, nblocks=4)
    factors = layer.blkdiag1, layer.blkdiag2
    before = [factor.detach().clone() for factor in factors]
    optimizer = torch.optim.SGD([{"params": [f], "initial_lr": 1.0} for f in factors], lr=share)
    StepCaps(layer, ratio=0.1).attach(optimizer)
    large, small = torch.randn_like(factors[0]), 1e-3 * torch.randn_like(factors[1])
    factors[0].grad, factors[1].grad = large, small
    optimizer.step()
    change = before[0] - factors[0].detach()
    assert _rms(change) / _rms(before[0]) == pytest.approx(0.1 * share, rel=0.05)
    torch.testing.assert_close(change / _rms(change), large / _rms(large), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(factors[1].detach(), before[1] - share * small)


def test_caps_leave_factors_alone_that_do_not_move():
    """No NaN from a step of zero, which a graph's warm-up takes at a rate of 0."""
    layer = MonarchLinear(16, 16)
    before = layer.blkdiag1.detach().clone()
    groups = [group | {"lr": 0.0} for group in param_groups(layer, 1e-3, 0.1)]
    for optimizer in (torch.optim.AdamW(groups), torch.optim.SGD(layer.parameters(), lr=0.0)):
        StepCaps(layer).attach(optimizer)
        layer(torch.randn(4, 16)).sum().backward()
        optimizer.step()
        assert torch.equal(layer.blkdiag1.detach(), before)


def test_caps_keep_a_rate_that_is_far_too_high_from_diverging():
    """With them the model learns (0.42 seen), without them it does not (0.99)."""

    def last_loss(capped):
        torch.manual_seed(0)
        model = nn.Sequential(MonarchLinear(32, 64, nblocks=4), nn.GELU(), MonarchLinear(64, 32, nblocks=4))
        optimizer = torch.optim.AdamW(param_groups(model, 0.3))
        if capped:
            StepCaps(model).attach(optimizer)
        for _ in range(100):
            x = torch.randn(64, 32)
            loss = (model(x) - x.roll(1, 1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.detach())

    assert last_loss(capped=True) < 0.6
    assert last_loss(capped=False) > 0.8


def test_caps_need_layers_and_a_positive_ratio():
    with pytest.raises(ValueError, match="no Monarch layers"):
        StepCaps(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="ratio must be positive"):
        StepCaps(MonarchLinear(16, 16), ratio=0)


def _train(model, make, steps=3):
    torch.manual_seed(1)
    x = torch.randn(4, 16)
    optimizers = make(model)
    for _ in range(steps):
        model(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _muon(model):
    matrices = param_groups(model, 1e-2, 0.1, matrices=True)
    muon = Muon(matrices)
    StepCaps(model, ratio=0.005).attach(muon)
    return [muon, torch.optim.AdamW(param_groups(model, 1e-2, without=matrices))]


def _model():
    torch.manual_seed(0)
    return nn.Sequential(MonarchLinear(16, 32, nblocks=4), nn.GELU(), MonarchLinear(32, 16, nblocks=(2, 4)))


def _sharded_steps(rank, store, queue):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,))  # else FSDP2 takes a GPU where there is one
    for where in (0, 1):
        model = _model()
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda p, d=where: Shard(d if p.ndim == 3 else 0))
        groups = param_groups(model, 1e-2, 0.1)
        _train(model, _muon)
        full = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
        if rank == 0:
            queue.put((where, [g["lr"] for g in groups], {name: p.numpy() for name, p in full.items()}))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_sharded_parameters_get_the_same_rates_and_steps(tmp_path):
    """FSDP2 on two processes, shards between the blocks and through them, against one process."""
    pytest.importorskip("torch.distributed.fsdp", reason="FSDP2")
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    torch.multiprocessing.start_processes(
        _sharded_steps, (str(tmp_path / "store"), queue), nprocs=2, join=False, start_method="spawn"
    )
    model = _model()
    rates = [group["lr"] for group in param_groups(model, 1e-2, 0.1)]
    _train(model, _muon)
    for _ in range(2):
        _, found, full = queue.get(timeout=120)
        assert found == rates
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(torch.from_numpy(full[name]), parameter.detach())
