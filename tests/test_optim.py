"""Learning rates of factors come from shapes; Muon makes each block's update orthogonal."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from monarch_rocm import MonarchLinear, MonarchShape
from monarch_rocm.optim import Muon, RMSCaps, factor_rates, orthogonal, param_groups


def change_of_output(layer, rates, lr=1e-3, steps=1):
    """RMS change of the outputs when a step of size `lr * rate` is made along the gradients' signs."""
    x = torch.randn(1, layer.in_features)
    before = layer(x)
    loss = (before * torch.randn(before.shape).sign()).sum()
    loss.backward()
    with torch.no_grad():
        for parameter, rate in rates:
            parameter -= lr * rate * parameter.grad.sign()
        return float((layer(x) - before).square().mean().sqrt())


@pytest.mark.parametrize("sizes", [(512, 512), (512, 2048), (2048, 512)])
@pytest.mark.parametrize("nblocks", [2, 4, 8])
def test_a_step_changes_outputs_about_as_one_of_a_dense_layer(sizes, nblocks):
    """The derivation of `factor_rates`, on a sign step for one input; without them it is far off."""
    torch.manual_seed(0)
    dense = nn.Linear(*sizes, bias=False)
    layer = MonarchLinear(*sizes, bias=False, nblocks=nblocks)
    factors = layer.blkdiag1, layer.blkdiag2
    wanted = change_of_output(dense, [(dense.weight, 1.0)])
    ours = change_of_output(copy.deepcopy(layer), [])
    assert ours == 0
    ours = change_of_output(layer, list(zip(factors, factor_rates(layer.shape), strict=True)))
    assert 0.4 < ours / wanted < 2.0


def test_rates_are_those_of_the_blocks():
    model = nn.Sequential(MonarchLinear(64, 64, nblocks=4), MonarchLinear(256, 64, nblocks=4))
    groups = param_groups(model, lr=1.0)
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    assert rates[id(model[0].blkdiag1)] == 2
    assert rates[id(model[1].blkdiag2)] == 8
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


def test_base_fan_in_makes_rates_fall_with_the_width_but_not_those_of_embeddings():
    for width in (64, 256):
        model = nn.Sequential(nn.Embedding(10, width), MonarchLinear(width, width), nn.Linear(width, 10))
        groups = param_groups(model, 1e-3, base_fan_in=64)
        rates = {id(p): group["lr"] for group in groups for p in group["params"]}
        assert rates[id(model[0].weight)] == 1e-3
        assert rates[id(model[2].weight)] == pytest.approx(1e-3 * 64 / width)
        assert rates[id(model[1].blkdiag1)] == pytest.approx(2e-3 * 64 / width)


def test_groups_are_those_of_the_original_after_deepcopy():
    model = nn.Sequential(MonarchLinear(64, 256), nn.GELU(), nn.Linear(256, 64))
    groups, copied = param_groups(model, 1e-3, 0.1), param_groups(copy.deepcopy(model), 1e-3, 0.1)
    for one, two in zip(groups, copied, strict=True):
        assert one["lr"] == two["lr"]
        assert [p.shape for p in one["params"]] == [p.shape for p in two["params"]]


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="base_fan_in must be at least 1"):
        param_groups(MonarchLinear(16, 16), 1e-3, base_fan_in=0)
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


@pytest.mark.parametrize("sizes", [(64, 64), (64, 256), (256, 64), (50, 70)])
def test_caps_leave_new_factors_alone_and_scale_back_grown_ones(sizes):
    """A new factor is within a few percent of its cap; a grown one ends at it, its direction kept."""
    torch.manual_seed(0)
    layer = MonarchLinear(*sizes, nblocks=4)
    caps = RMSCaps(layer)
    before = [factor.detach().clone() for factor in (layer.blkdiag1, layer.blkdiag2)]
    caps()
    for factor, old in zip((layer.blkdiag1, layer.blkdiag2), before, strict=True):
        torch.testing.assert_close(factor.detach(), old, rtol=0.05, atol=0)
    before = [factor.detach().clone() for factor in (layer.blkdiag1, layer.blkdiag2)]
    with torch.no_grad():
        layer.blkdiag1 *= 3
        layer.blkdiag2 *= 0.5
    RMSCaps(layer, ratio=2.0)()
    torch.testing.assert_close(layer.blkdiag1.detach(), 2 * before[0], rtol=0.05, atol=0)
    torch.testing.assert_close(layer.blkdiag2.detach(), 0.5 * before[1])


def test_caps_follow_each_step_of_an_optimizer():
    layer = MonarchLinear(64, 64, nblocks=4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    optimizer.register_step_post_hook(RMSCaps(layer))
    limit = float(layer.blkdiag1.detach().square().mean())
    layer.blkdiag1.grad = torch.full_like(layer.blkdiag1, -100.0)
    optimizer.step()
    assert float(layer.blkdiag1.detach().square().mean()) == pytest.approx(limit, rel=0.1)


def test_caps_need_layers_and_a_positive_ratio():
    with pytest.raises(ValueError, match="no Monarch layers"):
        RMSCaps(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="ratio must be positive"):
        RMSCaps(MonarchLinear(16, 16), ratio=0)


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
    muon.register_step_post_hook(RMSCaps(model, ratio=0.9))
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
    for where in (0, 1):
        model = _model()
        fully_shard(model, shard_placement_fn=lambda p, d=where: Shard(d if p.ndim == 3 else 0))
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
