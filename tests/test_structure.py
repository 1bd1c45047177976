"""A converted model is built again from its structure and its state dict, bit for bit."""

import copy
import json

import pytest
import torch
from torch import nn

from monarch_rocm import MonarchConfig, MonarchLinear, monarchize, restructure, structure

pytestmark = pytest.mark.filterwarnings("ignore:a Monarch layer")


def dense(bias=True):
    return nn.Sequential(
        nn.Linear(30, 64, bias=bias), nn.ReLU(), nn.ModuleDict({"a": nn.Linear(64, 30)})["a"]
    )


@pytest.mark.parametrize("layout", ["interleaved", "blocked"])
@pytest.mark.parametrize("nblocks", [4, (2, 3)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_is_built_again_bit_for_bit(layout, nblocks, device, tmp_path):
    config = MonarchConfig(nblocks=nblocks, layout=layout, backend="torch", recompute=True)
    model, _ = monarchize(dense(), config)
    torch.save({"structure": structure(model), "state": model.state_dict()}, tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert json.loads(json.dumps(saved["structure"])) == saved["structure"]
    with torch.device(device):
        again = restructure(dense(), saved["structure"])
    again.load_state_dict(saved["state"], assign=device == "meta")
    assert repr(again) == repr(model)
    assert (again[0].backend, again[0].recompute) == ("torch", True)
    x = torch.randn(5, 30)
    assert torch.equal(again(x), model(x))


def test_roots_and_layers_in_several_places_and_tied_factors():
    model, _ = monarchize(nn.Linear(32, 32), MonarchConfig(nblocks=2))
    again = restructure(nn.Linear(32, 32), structure(model))
    again.load_state_dict(model.state_dict())
    assert isinstance(again, MonarchLinear)

    def shared():
        one, two = nn.Linear(32, 32), nn.Linear(32, 32)
        two.weight = one.weight
        return nn.ModuleDict({"a": one, "b": nn.Sequential(one, two)})

    model, _ = monarchize(shared(), MonarchConfig(nblocks=2))
    again = restructure(shared(), structure(model))
    again.load_state_dict(model.state_dict())
    assert again["a"] is again["b"][0]
    assert again["b"][1].blkdiag1 is again["a"].blkdiag1
    assert again["b"][1].bias is not again["a"].bias


def test_what_does_not_fit_is_refused_and_changes_nothing():
    model, _ = monarchize(dense(), MonarchConfig(nblocks=2))
    good = structure(model)

    def broken(**changes):
        found = copy.deepcopy(good)
        found["layers"]["2"].update(changes)
        return found

    for build, found, said in [
        (dense, {**good, "format": 2}, "reads format 1 .* got 2"),
        (dense, {"layers": good["layers"]}, "got None"),
        (lambda: nn.Sequential(nn.Linear(30, 64)), good, "layer '2', which this model lacks"),
        (lambda: nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 32)), good, "64 to 30"),
        (dense, broken(bias=False), "no bias"),
        (dense, broken(blkdiag1=[2, 3, 4]), "do not meet"),
    ]:
        other = build()
        with pytest.raises(ValueError, match=said):
            restructure(other, found)
        assert not any(isinstance(module, MonarchLinear) for module in other.modules())
    with pytest.raises(ValueError, match="no Monarch layers"):
        structure(dense())
