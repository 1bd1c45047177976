"""What of a converted model its state dict does not say: where its Monarch layers are, of what geometry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from monarch_rocm import tree
from monarch_rocm.dispatch import check_backend
from monarch_rocm.linear import MonarchLinear
from monarch_rocm.shape import MonarchShape

FORMAT = 1  # raised when older code could no longer read what is written
KINDS = {
    "in_features": int,
    "out_features": int,
    "blkdiag1": list,  # of three ints
    "blkdiag2": list,
    "layout": str,
    "bias": bool,
    "backend": str,
    "recompute": bool,
}


def structure(model: nn.Module) -> dict[str, Any]:
    """Where a model has Monarch layers, and of what geometry, as a dict that JSON can hold.

    Together with the model's code and its state dict this is all that is needed to build it again.

    Args:
        model (nn.Module): with Monarch layers somewhere.

    Returns:
        dict: `format`, a version, and `layers`, by name. Layers that share factors name the first of
        them as `tied`.

    Raises:
        ValueError: a model without Monarch layers.

    Example:
        >>> model, _ = monarchize(nn.Sequential(nn.Linear(16, 32), nn.ReLU()), MonarchConfig(nblocks=2))
        >>> saved = {"structure": structure(model), "state": model.state_dict()}  # for torch.save
        >>> again = restructure(nn.Sequential(nn.Linear(16, 32), nn.ReLU()), saved["structure"])
        >>> again.load_state_dict(saved["state"])
        <All keys matched successfully>
    """
    layers: dict[str, dict[str, Any]] = {}
    first: dict[int, str] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, MonarchLinear):
            continue
        shape = layer.shape
        layers[name] = {
            "in_features": shape.in_features,
            "out_features": shape.out_features,
            "blkdiag1": list(shape.factor1),
            "blkdiag2": list(shape.factor2),
            "layout": shape.layout,
            "bias": layer.bias is not None,
            "backend": layer.backend,
            "recompute": layer.recompute,
        }
        owner = first.setdefault(id(layer.blkdiag1), name)
        if owner != name:
            layers[name]["tied"] = owner
    if not layers:
        raise ValueError("the model has no Monarch layers")
    return {"format": FORMAT, "layers": layers}


def restructure(model: nn.Module, structure: Mapping[str, Any], prefix: str = "") -> nn.Module:
    """Put Monarch layers where `structure` says, in place of the dense ones, with no values yet.

    Factors are on the device and of the dtype of the weight that they replace (also "meta"), and are
    to be filled by `load_state_dict`.

    Args:
        model (nn.Module): changed in place; the dense model that was converted once, or one built alike.
        structure (mapping): from `monarch_rocm.structure`.
        prefix (str): what every name starts with in `model`, ending in a dot.

    Returns:
        nn.Module: the model, the same object unless it is itself the layer.

    Raises:
        ValueError: another format; something that is no structure; a layer that the model lacks, or that
            has other sizes there. Nothing has been replaced then.

    Example:
        >>> found = structure(MonarchLinear(16, 32, nblocks=2))
        >>> restructure(nn.Linear(16, 32), found).shape.nblocks
        (2, 2)
    """
    if not isinstance(structure, Mapping):
        raise ValueError(f"a Monarch structure is a mapping, not {structure!r}")
    number = structure.get("format")
    if type(number) is not int or number != FORMAT:
        raise ValueError(f"this version reads format {FORMAT} of Monarch structures, but got {number!r}")
    layers = structure.get("layers")
    if not isinstance(layers, Mapping) or not layers:
        raise ValueError(f"a Monarch structure has its layers by name under 'layers', not {layers!r}")
    made: dict[str, MonarchLinear] = {}
    for name, entry in layers.items():
        place = prefix + name if name else name
        try:
            old = model.get_submodule(place)
        except AttributeError:
            raise ValueError(f"the structure has a layer {place!r}, which this model lacks") from None
        _check(place, entry)
        made[place] = layer = _layer(place, old, entry)
        if "tied" in entry:
            owner = made.get(prefix + entry["tied"])
            if owner is None or owner is layer or _sizes(owner) != _sizes(layer):
                raise ValueError(
                    f"layer {place!r} can be tied to an earlier layer of its shape, not to {entry['tied']!r}"
                )
            layer.blkdiag1, layer.blkdiag2 = owner.blkdiag1, owner.blkdiag2
    return tree.replace(model, {model.get_submodule(place): layer for place, layer in made.items()})


def _check(name: str, entry: Any) -> None:
    """Raise unless `entry` has what one of a layer has, of the right kinds."""
    if not isinstance(entry, Mapping) or not KINDS.keys() <= entry.keys() <= {*KINDS, "tied"}:
        raise ValueError(f"layer {name!r} of the structure has {', '.join(KINDS)}, unlike {entry!r}")
    for key, value in entry.items():
        if not _fits(value, KINDS.get(key, str)):
            raise ValueError(f"{key} of layer {name!r} of the structure cannot be {value!r}")


def _sizes(layer: MonarchLinear) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return layer.shape.factor1, layer.shape.factor2


def _fits(value: Any, kind: type) -> bool:
    if kind is list:
        return isinstance(value, (list, tuple)) and [type(size) for size in value] == [int] * 3
    return type(value) is kind


def _layer(name: str, old: nn.Module, entry: Mapping[str, Any]) -> MonarchLinear:
    sizes = entry["in_features"], entry["out_features"]
    try:
        factors = entry["blkdiag1"], entry["blkdiag2"]
        shape = MonarchShape.from_factors(*factors, *sizes, layout=entry["layout"])
        backend = check_backend(entry["backend"])
    except ValueError as error:
        raise ValueError(f"layer {name!r} of the structure: {error}") from None
    weight: Any = None if isinstance(old, nn.Embedding) else getattr(old, "weight", None)
    if not isinstance(weight, torch.Tensor) or sorted(weight.shape) != sorted(sizes):
        has = f"a {type(old).__name__}" + ("" if weight is None else f" of weight {tuple(weight.shape)}")
        raise ValueError(
            f"layer {name!r} should be linear, {sizes[0]} to {sizes[1]}, but the model has {has}"
        )
    frozen = isinstance(old, MonarchLinear) and not old.blkdiag1.requires_grad
    trains = weight.requires_grad and not frozen
    one, two = (nn.Parameter(weight.new_empty(size), trains) for size in (shape.factor1, shape.factor2))
    bias = getattr(old, "bias", None)
    if entry["bias"] != (bias is not None):
        raise ValueError(
            f"layer {name!r} should have {'a' if entry['bias'] else 'no'} bias, unlike the model's"
        )
    layer = MonarchLinear._assemble(shape, one, two, bias, backend, entry["recompute"])
    return layer.train(old.training)
