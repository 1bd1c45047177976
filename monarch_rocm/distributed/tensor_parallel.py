"""Tensor-parallel Monarch layers: factor 1 over K, factor 2 over L, one all-to-all at the permutation.

A rank holds K/n blocks of the first factor and L/n of the second. Its own input features are enough for
its hidden features; one all-to-all deals these out over the blocks of the second factor, and what
comes out are its own output features. No activation inside the layer exists twice, and nothing is summed
over ranks, so that results do not depend on the number of them.

How activations enter and leave is a choice, for each layer and side:

- "replicated": every rank holds all. Entering costs nothing forward and an all-gather backward, leaving
  an all-gather forward and nothing backward.
- "features": a rank holds all tokens of its features, the r-th of n equal runs. Costs nothing.
- "tokens": a rank holds all features of its tokens, the r-th of n equal runs of dimension -2. An
  all-to-all, either way, forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from monarch_rocm import autocast, dispatch, ops
from monarch_rocm.distributed.exchange import AllToAll, Gather, Own, Shared, Sum
from monarch_rocm.linear import MonarchLinear
from monarch_rocm.shape import MonarchShape

PLACES = ("replicated", "features", "tokens")


def why_not(shape: MonarchShape, ranks: int) -> str | None:
    """Why a layer cannot be split over so many ranks, None where it can.

    Example:
        >>> why_not(MonarchShape(64, 64, nblocks=4), 4)
        >>> print(why_not(MonarchShape(64, 64, nblocks=(4, 2)), 4))
        L = 2 is no multiple of 4 ranks
    """
    for name, size in (("K", shape.K), ("L", shape.L), ("R", shape.R)):
        if size % ranks:
            return f"{name} = {size} is no multiple of {ranks} ranks"
    return None


class MonarchParallel(ParallelStyle):
    """Split a `MonarchLinear` over the ranks of a mesh, a style for `parallelize` and for PyTorch's
    `parallelize_module`.

    Args:
        input, output (str): how activations enter and leave, "replicated" (default), "features" or
            "tokens", as the module's table says. Two layers joined by "features", with only elementwise
            functions between, cost two all-to-alls in all. A residual stream in "features" needs
            `layout="blocked"` and `NormParallel` for its norms.

    Raises:
        TypeError: a module that is no `MonarchLinear`.
        ValueError: an unknown place; blocks that the ranks do not divide; "features" where sizes are
            padded, or for the outputs of an interleaved layout; `backend="reference"`.

    Factors become DTensors, `Shard(0)`, so that gradients, optimizers, norms and checkpoints see whole
    parameters. Ranks take rank 0's values.

    Example:
        >>> MonarchParallel(output="features")
        MonarchParallel(input='replicated', output='features')
    """

    def __init__(self, *, input: str = "replicated", output: str = "replicated") -> None:
        for side, place in (("input", input), ("output", output)):
            if place not in PLACES:
                raise ValueError(f"{side} must be one of {PLACES}, but {side}={place!r} was given")
        self.input, self.output = input, output

    def __repr__(self) -> str:
        return f"MonarchParallel(input={self.input!r}, output={self.output!r})"

    def traffic(self, shape: MonarchShape, tokens: int, ranks: int, itemsize: int) -> tuple[int, int]:
        """Bytes that a rank sends for one layer, forward and backward.

        Of `n` ranks, an all-to-all of a tensor sends (n-1)/n of a rank's part, a ring all-gather n-1 of
        them. All ranks together multiply that by n; the gradient of a bias under "tokens" is not counted.

        Args:
            shape (MonarchShape): the layer.
            tokens (int): of all ranks together.
            ranks (int): how many.
            itemsize (int): bytes of an activation's number.

        Example:
            >>> shape = MonarchShape(256, 1024, nblocks=4, layout="blocked")
            >>> MonarchParallel(output="features").traffic(shape, tokens=512, ranks=4, itemsize=4)
            (98304, 491520)
        """
        hidden, enter, leave = (
            tokens * width // ranks for width in (shape.K * shape.Q, shape.K * shape.P, shape.L * shape.S)
        )
        exchange, gather = (ranks - 1) / ranks, ranks - 1
        forward = {"replicated": gather * leave, "features": 0, "tokens": exchange * leave}[self.output]
        forward += exchange * hidden + (exchange * enter if self.input == "tokens" else 0)
        backward = {"replicated": gather * enter, "features": 0, "tokens": exchange * enter}[self.input]
        backward += exchange * hidden + (exchange * leave if self.output == "tokens" else 0)
        return int(forward * itemsize), int(backward * itemsize)

    def check(self, layer: nn.Module, ranks: int) -> None:
        """Raise unless `layer` can be split so."""
        if not isinstance(layer, MonarchLinear):
            raise TypeError(f"MonarchParallel takes a MonarchLinear, not a {type(layer).__name__}")
        if isinstance(layer, SplitMonarchLinear):
            raise ValueError("this MonarchLinear is split over ranks already")
        shape = layer.shape
        reason = why_not(shape, ranks)
        if reason is not None:
            raise ValueError(f"a Monarch layer {shape} cannot be split: {reason}")
        if layer.backend == "reference":
            raise ValueError("backend='reference' is not for layers split over ranks; backend='torch' is")
        if self.input == "features" and shape.in_features != shape.K * shape.P:
            raise ValueError(f"input='features' takes no padding, and {shape} pads to {shape.K * shape.P}")
        if self.output == "features":
            if shape.out_features != shape.L * shape.S:
                raise ValueError(
                    f"output='features' takes no padding, and {shape} pads to {shape.L * shape.S}"
                )
            if shape.layout != "blocked":
                raise ValueError(
                    "output='features' needs layout='blocked': a rank computes whole output blocks, whose "
                    "features lie side by side in that layout only"
                )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(module, device_mesh.size())
        for name in ("blkdiag1", "blkdiag2"):
            distribute(module, name, device_mesh, Shard(0))
        if module.bias is not None:
            sharded = self.output == "features"
            distribute(module, "bias", device_mesh, Shard(0) if sharded else Replicate())
        module.__class__ = SplitMonarchLinear
        module.places, module.mesh = (self.input, self.output), device_mesh  # type: ignore[assignment]
        return module


def distribute(module: nn.Module, name: str, mesh: DeviceMesh, place: Any) -> None:
    """Make a parameter a DTensor, of rank 0's values."""
    old = module._parameters[name]
    assert old is not None
    new = nn.Parameter(distribute_tensor(old.detach(), mesh, [place]), old.requires_grad)
    module.register_parameter(name, new)


def local(parameter: Tensor) -> Tensor:
    """A parameter's part on this rank, differentiable."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class SplitMonarchLinear(MonarchLinear):
    """A `MonarchLinear` of which each rank holds and computes a part; made by `MonarchParallel`."""

    places: tuple[str, str]
    mesh: DeviceMesh

    @property
    def weight(self) -> Tensor:
        """The dense weight `(out_features, in_features)`, of the gathered factors, differentiable."""
        from monarch_rocm.projection import monarch_weight

        factors = (w.full_tensor() if isinstance(w, DTensor) else w for w in (self.blkdiag1, self.blkdiag2))
        return monarch_weight(*factors, layout=self.shape.layout)[: self.out_features, : self.in_features]

    def forward(self, input: Tensor) -> Tensor:
        """`input (..., in_features)` to `(..., out_features)`, or this rank's part of either."""
        shape, group = self.shape, self.mesh.get_group()
        enter, leave = self.places
        n = group.size()
        mine = shape.in_features // n if enter == "features" else shape.in_features
        if input.ndim == 0 or input.shape[-1] != mine:
            raise RuntimeError(
                f"the last dimension of x must be {mine}, a layer {shape} over {n} ranks taking "
                f"{enter!r} input, but x is {tuple(input.shape)}"
            )
        if "tokens" in self.places and input.ndim < 2:
            raise RuntimeError("a layer whose tokens are split takes x of two dimensions or more")
        w1, w2 = local(self.blkdiag1), local(self.blkdiag2)
        bias = None if self.bias is None else local(self.bias)
        dtype = autocast.active_dtype(input.device.type)
        if dtype is not None:
            input, w1, w2 = (autocast.cast(t, dtype) for t in (input, w1, w2))
            bias = None if bias is None else autocast.cast(bias, dtype)
        if not input.dtype == w1.dtype == w2.dtype:
            raise RuntimeError(f"x is {input.dtype}, and the factors are {w1.dtype} and {w2.dtype}")
        x = _enter(input, enter, shape, group)
        rows = x.reshape(-1, x.shape[-1])
        backend = dispatch.requested(self.backend)
        y = _through(rows, w1, w2, shape, n, group, backend, leave)
        y = _leave(y, x.shape[:-1], leave, shape, group, backend)
        if bias is None:
            return y
        return y + (Shared.apply(bias, group) if leave == "tokens" else bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ranks={self.mesh.size()}, places={self.places}"


def _enter(x: Tensor, place: str, shape: MonarchShape, group: Any) -> Tensor:
    """The input features of this rank, for all tokens."""
    if place == "features":
        return x
    padding = shape.K * shape.P - shape.in_features
    if padding:
        x = F.pad(x, (0, padding))
    parts = x.unflatten(-1, (group.size(), -1)).movedim(-2, 0)
    if place == "replicated":
        return Own.apply(parts, group)
    x = AllToAll.apply(parts, group)  # (ranks that sent, ..., their tokens, features)
    return x.movedim(0, -3).flatten(-3, -2)


def _through(
    x: Tensor, w1: Tensor, w2: Tensor, shape: MonarchShape, n: int, group: Any, backend: str, leave: str
) -> Tensor:
    """`x (tokens, K/n*P)` to `(tokens, L/n*S)`, l-major.

    Hidden features lie with tokens contiguous (`hidden`): a rank's are R/n rows of L, whose columns
    belong to the blocks of the second factor. So what goes to one rank is packed by one copy, and what
    comes from all is the matrix (R, L/n) that the second stage reads in place.
    """
    (K, Q, _), (L, S, R) = shape.factor1, shape.factor2
    tokens = x.shape[0]
    h = ops._call(ops.Stage, x, w1, K // n * Q, 1, 1, True, backend)
    h = h.t().reshape(R // n, n, L // n, tokens).transpose(0, 1)
    h = AllToAll.apply(h, group).view(L // n * R, tokens).t()
    # What is gathered next is whole features.
    return ops._call(ops.Stage, h, w2, L // n * S, R, 1, leave == "replicated", backend)


def _leave(y: Tensor, lead: torch.Size, place: str, shape: MonarchShape, group: Any, backend: str) -> Tensor:
    if place == "features":
        return y.view(*lead, y.shape[-1])
    n = group.size()
    if place == "replicated":
        y = Gather.apply(y.t(), group).flatten(0, 1).t()
    else:
        y = y.view(*lead, y.shape[-1])
        if lead[-1] % n:
            raise RuntimeError(f"{n} ranks do not divide {lead[-1]} tokens, the size of dimension -2")
        y = AllToAll.apply(y.unflatten(-2, (n, -1)).movedim(-3, 0), group)  # (ranks that sent, ...)
        y = y.movedim(0, -2)
        lead = y.shape[:-2]
        y = y.reshape(-1, shape.L * shape.S)
    if shape.reorders:
        y = ops._call(ops.Interleave, y, shape.L, shape.S, shape.out_features, backend)
    else:
        y = y[:, : shape.out_features].contiguous()
    return y.view(*lead, shape.out_features)


class NormParallel(ParallelStyle):
    """Let an `nn.LayerNorm` or `nn.RMSNorm` take activations that are split over ranks.

    Args:
        place (str): "features", where ranks exchange the sums of one or two numbers a token; or
            "tokens", where only the gradients of the parameters are summed.

    Raises:
        TypeError: another kind of module.
        ValueError: an unknown place; more than one normalised dimension; features that the ranks do not
            divide.

    Example:
        >>> NormParallel("features")
        NormParallel('features')
    """

    def __init__(self, place: str) -> None:
        if place not in PLACES[1:]:
            raise ValueError(f"place must be one of {PLACES[1:]}, but {place!r} was given")
        self.place = place

    def __repr__(self) -> str:
        return f"NormParallel({self.place!r})"

    def check(self, module: nn.Module, ranks: int) -> None:
        """Raise unless `module` can be split so."""
        if not isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            raise TypeError(
                f"NormParallel takes an nn.LayerNorm or nn.RMSNorm, not a {type(module).__name__}"
            )
        if self.place == "features" and (
            len(module.normalized_shape) != 1 or module.normalized_shape[0] % ranks
        ):
            raise ValueError(
                f"NormParallel('features') over {ranks} ranks takes one normalised dimension that they "
                f"divide, not {tuple(module.normalized_shape)}"
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(module, device_mesh.size())
        place = Shard(0) if self.place == "features" else Replicate()
        for name, parameter in list(module.named_parameters(recurse=False)):
            del parameter
            distribute(module, name, device_mesh, place)
        centred = isinstance(module, nn.LayerNorm)
        module.__class__ = SplitNorm
        module.place, module.centred, module.mesh = self.place, centred, device_mesh  # type: ignore[assignment]
        return module


class SplitNorm(nn.Module):
    """A norm of activations that are split over ranks; made by `NormParallel`."""

    place: str
    centred: bool
    mesh: DeviceMesh
    eps: float | None
    normalized_shape: tuple[int, ...]

    def forward(self, input: Tensor) -> Tensor:
        """`input`, this rank's part, to the same part of its norm."""
        group = self.mesh.get_group()
        parameters = (getattr(self, name, None) for name in ("weight", "bias"))
        weight, bias = (None if p is None else local(p) for p in parameters)
        if self.place == "tokens":
            weight, bias = (None if p is None else Shared.apply(p, group) for p in (weight, bias))
            if self.centred:
                eps = 1e-5 if self.eps is None else self.eps
                return F.layer_norm(input, self.normalized_shape, weight, bias, eps)
            return F.rms_norm(input, self.normalized_shape, weight, self.eps)
        wide = torch.promote_types(input.dtype, torch.float32)
        x = input.to(wide)
        features = self.normalized_shape[0]
        if self.centred:  # two rounds, since a difference of two large sums would lose the variance
            x = x - Sum.apply(x.sum(-1, keepdim=True), group) / features
        square = Sum.apply(x.square().sum(-1, keepdim=True), group) / features
        eps = torch.finfo(input.dtype).eps if self.eps is None else self.eps
        y = (x * torch.rsqrt(square + eps)).to(input.dtype)
        if weight is not None:
            y = y * weight
        return y if bias is None else y + bias

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, ranks={self.mesh.size()}, place={self.place!r}"
