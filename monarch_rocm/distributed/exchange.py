"""The collectives of a tensor-parallel layer, differentiable, and the bytes that they send."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

Group = dist.ProcessGroup
_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from PyTorch 2.13 on


class AllToAll(Function):
    """`x (ranks, ...)`: part i goes to rank i, and part i of the result came from it. Its own gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return AllToAll.apply(dy, ctx.group), None


class Gather(Function):
    """The parts `(...)` of all ranks, `(ranks, ...)`; all ranks must go on alike, as the gradient assumes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        out = x.new_empty(group.size(), *x.shape)
        _gather(out.flatten(0, 1) if x.ndim else out, x, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return Own.apply(dy, ctx.group), None


class Own(Function):
    """A rank's own part of `x (ranks, ...)`, which all ranks hold; the gradients' parts are gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x[group.rank()].clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return Gather.apply(dy, ctx.group), None


class Sum(Function):
    """The sum over ranks; each rank's gradient goes to all of them, summed, since all have used the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return Sum.apply(dy, ctx.group), None


class Shared(Function):
    """A parameter that all ranks hold and use on tokens of their own: its gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return Sum.apply(dy, ctx.group), None
