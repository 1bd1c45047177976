"""Monarch matrices added to layers that stay as they are: adapters, to train little of a large model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from monarch_rocm import projection, tree
from monarch_rocm.integrations.transformers import is_conv1d
from monarch_rocm.linear import MonarchLinear
from monarch_rocm.shape import MonarchShape


class MonarchAdapter(nn.Module):
    """A linear layer, frozen, plus a Monarch matrix that is zero at the start.

    Args:
        base (nn.Linear, transformers' Conv1D or MonarchLinear): frozen, and kept as `base`.
        nblocks (int or (int, int)): of the added matrix. A MonarchLinear takes its own.
        rank (int): rank of each of its sub-blocks.

    Attributes:
        base (nn.Module): the layer that is adapted.
        delta (MonarchLinear): what is added; no bias.
        merged (bool): whether `delta` is in the base's weight now.

    Shape:
        input `(..., in_features)`, output `(..., out_features)`.

    Raises:
        TypeError: a base of another kind. ValueError: nblocks other than a MonarchLinear base has.

    Example:
        >>> base = nn.Linear(32, 64)
        >>> layer, x = MonarchAdapter(base, nblocks=4, rank=2), torch.randn(3, 32)
        >>> torch.equal(layer(x), base(x)), sum(p.numel() for p in layer.parameters() if p.requires_grad)
        (True, 768)
    """

    def __init__(self, base: nn.Module, nblocks: int | Sequence[int] | None = None, rank: int = 4) -> None:
        super().__init__()
        if not (isinstance(base, (nn.Linear, MonarchLinear)) or is_conv1d(base)):
            raise TypeError(f"an adapter is for a linear layer, not for a {type(base).__name__}")
        if isinstance(base, MonarchLinear):
            own, layout, like = base.shape.nblocks, base.shape.layout, base.blkdiag1
            if nblocks not in (None, own) and (nblocks, nblocks) != own:
                raise ValueError(f"the base has nblocks={own}, and so must the adapter, not {nblocks!r}")
            sizes, nblocks = (base.in_features, base.out_features), own
        else:
            like, layout = base.weight, "interleaved"  # type: ignore[assignment]
            sizes = tuple(like.shape) if is_conv1d(base) else tuple(like.shape[::-1])  # type: ignore[assignment]
            nblocks = 4 if nblocks is None else nblocks
        kwargs = {"bias": False, "device": like.device, "dtype": like.dtype}
        self.base = base.requires_grad_(False)
        self.delta = MonarchLinear(*sizes, **kwargs, nblocks=nblocks, rank=rank, layout=layout)  # type: ignore[arg-type]
        nn.init.zeros_(self.delta.blkdiag2)
        self._kept: tuple[Any, ...] | None = None

    @property
    def merged(self) -> bool:
        return self._kept is not None

    @property
    def weight(self) -> Tensor:
        """The dense weight of base and delta together, as the base has it."""
        weight: Tensor = self.base.weight  # type: ignore[assignment]
        if self.merged:
            return weight
        delta = self.delta.weight
        return weight + (delta.T if is_conv1d(self.base) else delta)

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias  # type: ignore[return-value]

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.base(input)
        return output if self.merged else output + self.delta(input)

    @torch.no_grad()
    def merge(self) -> nn.Module:
        """Put the delta into the base, which is returned; exact up to the rounding of its dtype.

        A dense weight takes up the sum. A Monarch layer's sub-blocks get the delta's ranks beside their
        own. What was there before is kept, so that `unmerge` gives it back bit for bit, however often.
        """
        if self.merged:
            return self.base
        if isinstance(self.base, MonarchLinear):
            self._kept = widen(self.base, *projection.unpack(*_factors(self.delta), self.delta.shape))
        else:
            weight: Any = self.base.weight
            self._kept = (weight.data,)
            wide = torch.promote_types(weight.dtype, torch.float32)
            delta = projection.monarch_weight(*(factor.to(wide) for factor in _factors(self.delta)))
            delta = delta[: self.delta.out_features, : self.delta.in_features]
            delta = delta.T if is_conv1d(self.base) else delta
            weight.data = (weight.data.to(wide) + delta).to(weight.dtype)
        return self.base

    @torch.no_grad()
    def unmerge(self) -> None:
        """Give the base back what it had before `merge`, bit for bit."""
        if self._kept is None:
            return
        if isinstance(self.base, MonarchLinear):
            restore(self.base, self._kept)
        else:
            (self.base.weight.data,) = self._kept  # type: ignore[union-attr]
        self._kept = None


def adapt(
    model: nn.Module,
    nblocks: int | Sequence[int] | None = None,
    rank: int = 4,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> list[str]:
    """Put adapters around a model's linear layers, in place, and freeze all else.

    Args:
        model (nn.Module): changed in place.
        nblocks, rank: as in `MonarchAdapter`; `nblocks` is for dense layers.
        filter_fn (callable, optional): as for `monarchize`.

    Returns:
        list of str: names of the adapted layers.

    Raises:
        ValueError: no layer was chosen, or the model itself is one.

    Example:
        >>> model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        >>> adapt(model, nblocks=2)
        ['0', '2']
        >>> unload(model)[0]
        Linear(in_features=16, out_features=32, bias=True)
    """
    chosen = {
        module: name
        for name, module in model.named_modules()
        if (type(module) in (nn.Linear, MonarchLinear) or is_conv1d(module))
        and (filter_fn is None or filter_fn(module, name))
    }
    if not chosen or model in chosen:
        raise ValueError("no linear layer was chosen" if not chosen else "wrap the layer by MonarchAdapter")
    made = {}
    for module in chosen:
        given = None if isinstance(module, MonarchLinear) else nblocks
        made[module] = MonarchAdapter(module, given, rank).train(module.training)
    model.requires_grad_(False)
    tree.replace(model, made)
    return list(chosen.values())


def unload(model: nn.Module, merge: bool = True) -> nn.Module:
    """Take adapters off a model, in place, merged into the layers or not; returns the model."""
    found = {module: module.base for module in model.modules() if isinstance(module, MonarchAdapter)}
    for adapter in found:
        if merge:
            adapter.merge()
        else:
            adapter.unmerge()
    tree.replace(model, found)
    return model


@torch.no_grad()
def widen(layer: MonarchLinear, left: Tensor, right: Tensor) -> tuple[Any, ...]:
    """Give a layer's sub-blocks more ranks, in place; its parameters keep being the same objects.

    Args:
        layer (MonarchLinear): changed.
        left, right (Tensor): `(L, K, more, S)` and `(L, K, more, P)`, whose products are added.

    Returns:
        tuple: what `restore` takes to undo it.
    """
    kept = layer.shape, layer.blkdiag1.data, layer.blkdiag2.data
    old = projection.unpack(kept[1], kept[2], layer.shape)
    left, right = (torch.cat([one, two.to(one)], 2) for one, two in zip(old, (left, right), strict=True))
    shape, rank = layer.shape, left.shape[2]
    layer.shape = MonarchShape(shape.in_features, shape.out_features, shape.nblocks, rank, shape.layout)
    layer.blkdiag1.data, layer.blkdiag2.data = projection.pack(left, right, layer.shape)
    return kept


def restore(layer: MonarchLinear, kept: tuple[Any, ...]) -> None:
    """Undo `widen`."""
    layer.shape, layer.blkdiag1.data, layer.blkdiag2.data = kept


def low_rank_blocks(up: Tensor, down: Tensor, shape: MonarchShape) -> tuple[Tensor, Tensor]:
    """A product `up (out_features, r) @ down (r, in_features)` as ranks for `widen`."""
    order = "(s l) r -> l r s" if shape.layout == "interleaved" else "(l s) r -> l r s"
    left = rearrange(F.pad(up, (0, 0, 0, shape.L * shape.S - shape.out_features)), order, l=shape.L)
    right = rearrange(F.pad(down, (0, shape.K * shape.P - shape.in_features)), "r (k p) -> k r p", k=shape.K)
    return (
        left[:, None].expand(-1, shape.K, -1, -1),
        right[None].expand(shape.L, -1, -1, -1),
    )


def _factors(layer: MonarchLinear) -> tuple[Tensor, Tensor]:
    return layer.blkdiag1.detach(), layer.blkdiag2.detach()
