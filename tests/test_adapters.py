"""Adapters start at nothing, train alone, merge exactly, and come off without a trace."""

import copy

import pytest
import torch
from support import LAYOUTS, by_shape, make_shape
from torch import nn

from monarch_rocm import MonarchConfig, MonarchLinear, monarchize, restructure, structure
from monarch_rocm.adapters import MonarchAdapter, adapt, low_rank_blocks, restore, unload, widen
from monarch_rocm.projection import pack, unpack

pytestmark = pytest.mark.filterwarnings("ignore:a Monarch layer")


def bases():
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    return {
        "dense": nn.Linear(24, 36),
        "conv1d": conv1d(36, 24),
        "monarch": MonarchLinear(24, 36, nblocks=(2, 3), layout="blocked"),
    }


KINDS = ("dense", "conv1d", "monarch")
EXACT = {"atol": 1e-11, "rtol": 1e-11}  # in float64: what rounding leaves, and nothing else could


def trained(kind, dtype=torch.float32):
    layer = MonarchAdapter(bases()[kind].to(dtype), rank=2)
    nn.init.normal_(layer.delta.blkdiag2, std=0.3)
    return layer


@by_shape
@pytest.mark.parametrize("layout", LAYOUTS)
def test_unpacked_factors_pack_again(sizes, layout):
    shape = make_shape(sizes, layout)
    factors = torch.randn(shape.factor1), torch.randn(shape.factor2)
    again = pack(*unpack(*factors, shape), shape)
    assert all(torch.equal(one, two) for one, two in zip(factors, again, strict=True))


@by_shape
@pytest.mark.parametrize("layout", LAYOUTS)
def test_widening_adds_a_low_rank_matrix_and_is_undone(sizes, layout):
    shape = make_shape(sizes, layout)
    factors = [nn.Parameter(torch.randn(size).double()) for size in (shape.factor1, shape.factor2)]
    layer = MonarchLinear._assemble(shape, *factors, None, "torch", False)
    before, weight = copy.deepcopy(layer.state_dict()), layer.weight.detach()
    up, down = torch.randn(shape.out_features, 3).double(), torch.randn(3, shape.in_features).double()
    kept = widen(layer, *low_rank_blocks(up, down, shape))
    torch.testing.assert_close(layer.weight, weight + up @ down, **EXACT)
    assert layer.blkdiag1 is factors[0]
    restore(layer, kept)
    assert layer.shape == shape
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_starts_at_nothing_and_trains_alone(kind):
    base = bases()[kind]
    before = copy.deepcopy(base.state_dict())
    layer, x = MonarchAdapter(base, rank=2), torch.randn(5, 24)
    assert torch.equal(layer(x), base(x))
    optimizer = torch.optim.SGD([p for p in layer.parameters() if p.requires_grad], lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()
    assert not torch.equal(layer(x), base(x))
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_merging_a_hundred_times_changes_nothing(kind, dtype):
    layer, x = trained(kind, dtype), torch.randn(5, 24).to(dtype)
    before, apart = copy.deepcopy(layer.base.state_dict()), layer(x)
    for _ in range(100):
        layer.merge()
        assert layer.merged
        layer.merge()
        layer.unmerge()
        layer.unmerge()
    assert all(torch.equal(value, before[name]) for name, value in layer.base.state_dict().items())
    assert torch.equal(layer(x), apart)
    together = layer.merge()(x)
    # In bfloat16 the sum is rounded, as each output is too.
    tolerance = 1e-12 if dtype == torch.float64 else 2**-7 * apart.abs().max()
    assert (together - apart).abs().max() <= tolerance
    assert torch.equal(layer(x), together)


def test_a_model_is_adapted_trained_saved_and_unloaded():
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(24, 36), nn.ReLU(), nn.Linear(36, 24), nn.ReLU(), nn.Linear(24, 4))
    model, _ = monarchize(dense.double(), MonarchConfig(nblocks=2), lambda module, name: name == "2")
    before = copy.deepcopy(model)
    assert adapt(model, nblocks=2, rank=2, filter_fn=lambda module, name: name != "4") == ["0", "2"]
    free = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert free == [f"{place}.delta.blkdiag{i}" for place in (0, 2) for i in (1, 2)]
    x, wanted = torch.randn(32, 24).double(), torch.randn(32, 4).double()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(60):
        loss = (model(x) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    output = model(x)
    bare = unload(copy.deepcopy(model), merge=False)
    assert torch.equal(bare(x), before(x))
    merged = unload(model)
    torch.testing.assert_close(merged(x), output, **EXACT)
    again = restructure(copy.deepcopy(dense), structure(merged))
    again.load_state_dict(merged.state_dict())
    assert torch.equal(again(x), merged(x))


def test_what_cannot_be_adapted_is_refused():
    with pytest.raises(TypeError, match="not for a ReLU"):
        MonarchAdapter(nn.ReLU())
    with pytest.raises(ValueError, match=r"nblocks=\(2, 3\)"):
        MonarchAdapter(bases()["monarch"], nblocks=4)
    with pytest.raises(ValueError, match="no linear layer"):
        adapt(nn.Sequential(nn.ReLU()))
    with pytest.raises(ValueError, match="wrap the layer"):
        adapt(nn.Linear(4, 4))


@pytest.fixture
def peft():
    return pytest.importorskip("peft")


def lora(peft, **kwargs):
    from monarch_rocm.integrations.peft import enable

    model, _ = monarchize(
        nn.Sequential(nn.Linear(24, 36), nn.ReLU(), nn.Linear(36, 4)).double(), MonarchConfig(nblocks=2)
    )
    config = enable(peft.LoraConfig(r=3, target_modules=["0", "2"], **kwargs))
    adapted = peft.get_peft_model(copy.deepcopy(model), config)
    return model, adapted


@pytest.mark.parametrize("lora_bias", [False, True])
def test_lora_on_monarch_layers_trains_saves_loads_and_merges(peft, tmp_path, lora_bias):
    from monarch_rocm.integrations.peft import enable

    torch.manual_seed(0)
    model, adapted = lora(peft, lora_bias=lora_bias)
    x, wanted = torch.randn(32, 24).double(), torch.randn(32, 4).double()
    torch.testing.assert_close(adapted(x), model(x), **EXACT)
    optimizer = torch.optim.Adam([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        (adapted(x) - wanted).square().mean().backward()
        optimizer.step()
    adapted.eval()
    output = adapted(x)
    assert (output - model(x)).abs().max() > 0.01
    adapted.save_pretrained(tmp_path)
    config = enable(peft.PeftConfig.from_pretrained(tmp_path))
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path, config=config).eval()
    assert torch.equal(loaded(x), output)
    base = adapted.base_model.model[0].base_layer
    before = copy.deepcopy(base.state_dict())
    for _ in range(20):
        adapted.merge_adapter()
        torch.testing.assert_close(adapted(x), output, **EXACT)
        adapted.unmerge_adapter()
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())
    merged = adapted.merge_and_unload()
    assert type(merged[0]) is MonarchLinear
    torch.testing.assert_close(merged(x), output, **EXACT)


def test_lora_that_does_not_fit_is_refused(peft):
    from monarch_rocm.integrations.peft import enable

    with pytest.raises(ValueError, match="DoRA"):
        enable(peft.LoraConfig(r=2, target_modules=["0"], use_dora=True))
    with pytest.raises(TypeError, match="is a dict"):
        enable({})
