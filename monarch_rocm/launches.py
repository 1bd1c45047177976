"""What a layer launches, as things to measure: operations on operands drawn for them, and the kernels
that can serve each.

`tune` and `autotune` know kernels by the table `KERNELS` alone: a new one is an entry here, beside
its parameters in `kernels/tuning.py` and its search space in `kernels/configs/space.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from monarch_rocm import batched, dispatch
from monarch_rocm.kernels.tuning import FEW
from monarch_rocm.shape import MonarchShape

Config = dict[str, int]
Tensors = tuple[Tensor, ...]
Draw = Callable[..., Tensor]
Sizes = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Layer:
    """A whole layer: `x (tokens, in)`, `(K, Q, P)`, `(L, S, R)` to `y (tokens, out)`, and with `keep`
    the hidden features.
    """

    tokens: int
    factor1: tuple[int, int, int]
    factor2: tuple[int, int, int]
    in_features: int
    out_features: int
    interleaved: bool
    keep: bool

    def operands(self, draw: Draw) -> Tensors:
        """Input and both factors."""
        return draw(self.tokens, self.in_features), draw(*self.factor1), draw(*self.factor2)

    def run(self, operands: Tensors, path: str) -> Tensors:
        """What `dispatch` runs on "torch" or "auto"."""
        x, w1, w2 = operands
        y, h = dispatch.linear(x, w1, w2, None, self.out_features, self.interleaved, self.keep, path)
        return (y, h) if self.keep else (y,)


@dataclass(frozen=True)
class Stage:
    """One block-diagonal product, forward or input gradient: `x (tokens, in)` and `w (blocks, n_out,
    n_in)` to `(tokens, out)`. One side of it is hidden features, with tokens contiguous: the output
    where `hidden`, else the input.
    """

    tokens: int
    blocks: int
    n_out: int
    n_in: int
    in_features: int
    out_features: int
    group_in: int
    group_out: int
    hidden: bool
    gradient: bool

    def operands(self, draw: Draw) -> Tensors:
        """Input and factor, in a gradient a view of the transposed factor."""
        x = draw(self.tokens, self.in_features)
        size = (self.n_in, self.n_out) if self.gradient else (self.n_out, self.n_in)
        w = draw(self.blocks, *size)
        return x if self.hidden else _hidden(x), w.mT if self.gradient else w

    def run(self, operands: Tensors, path: str) -> Tensors:
        """What `dispatch` runs on "torch" or "auto", an interleaving pass included."""
        x, w = operands
        if self.hidden or self.group_out == 1:
            groups = (self.group_in, self.group_out)
            inside = self.hidden and not self.gradient
            return (dispatch.stage(x, w, self.out_features, *groups, self.hidden, path, inside),)
        z = batched.stage(x, w, self.blocks * self.n_out, self.group_in, 1, False)
        return (dispatch.interleave(z, self.blocks, self.n_out, self.out_features, None, path),)


@dataclass(frozen=True)
class Wgrad:
    """A factor's gradient `(blocks, n_out, n_in)` from `g (tokens, out)` and `a (tokens, in)`; `g` is
    hidden features where `hidden`, else `a` is.
    """

    tokens: int
    blocks: int
    n_out: int
    n_in: int
    out_features: int
    in_features: int
    group_out: int
    group_in: int
    hidden: bool

    def operands(self, draw: Draw) -> Tensors:
        """Gradient and input of the stage."""
        g, a = draw(self.tokens, self.out_features), draw(self.tokens, self.in_features)
        return (_hidden(g), a) if self.hidden else (g, _hidden(a))

    def run(self, operands: Tensors, path: str) -> Tensors:
        """What `dispatch` runs on "torch" or "auto"."""
        g, a = operands
        sizes = (self.blocks, self.n_out, self.n_in, self.group_out, self.group_in)
        return (dispatch.stage_wgrad(g, a, *sizes, path),)


@dataclass(frozen=True)
class Interleave:
    """Rows `x (tokens, in)`, each a matrix `(rows, columns)`, to their transposes `(tokens, out)`."""

    tokens: int
    rows: int
    columns: int
    in_features: int
    out_features: int

    def operands(self, draw: Draw) -> Tensors:
        """The rows alone."""
        return (draw(self.tokens, self.in_features),)

    def run(self, operands: Tensors, path: str) -> Tensors:
        """What `dispatch` runs on "torch" or "auto"."""
        (x,) = operands
        return (dispatch.interleave(x, self.rows, self.columns, self.out_features, None, path),)


Operation = Layer | Stage | Wgrad | Interleave


def _hidden(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def forward(shape: MonarchShape, tokens: int, keep: bool) -> tuple[Operation, ...]:
    """What a forward pass may launch; `keep` where a gradient is to follow."""
    interleaved = shape.reorders
    hidden, padded = shape.K * shape.Q, shape.L * shape.S
    group = shape.S if interleaved else 1
    found: list[Operation] = [
        Layer(tokens, shape.factor1, shape.factor2, shape.in_features, shape.out_features, interleaved, keep),
        Stage(tokens, shape.K, shape.Q, shape.P, shape.in_features, hidden, 1, 1, True, False),
        Stage(tokens, shape.L, shape.S, shape.R, hidden, shape.out_features, shape.R, group, False, False),
    ]
    if interleaved:
        found.append(Interleave(tokens, shape.L, shape.S, padded, shape.out_features))
    return tuple(found)


def backward(shape: MonarchShape, tokens: int) -> tuple[Operation, ...]:
    """What the gradients of input and both factors launch."""
    interleaved = shape.reorders
    hidden, padded = shape.K * shape.Q, shape.L * shape.S
    width = padded if interleaved else shape.out_features  # of the outputs' gradient, block by block
    found: list[Operation] = [
        Wgrad(tokens, *shape.factor2, width, hidden, 1, shape.R, False),
        Stage(tokens, shape.L, shape.R, shape.S, width, hidden, 1, shape.R, True, True),
        Wgrad(tokens, *shape.factor1, hidden, shape.in_features, 1, 1, True),
        Stage(tokens, shape.K, shape.P, shape.Q, hidden, shape.in_features, 1, 1, False, True),
    ]
    if interleaved:
        found.append(Interleave(tokens, shape.S, shape.L, shape.out_features, padded))
    return tuple(found)


@dataclass(frozen=True)
class Kernel:
    """How `tune` treats a kernel.

    Args:
        sizes: each (n_out, n_in) by which its table is looked up for an operation; none where it cannot
            serve it.
        launch: run it on an operation's operands with a config.
        fits: whether a config makes sense for (n_out, n_in, tokens).
        staged: numbers that a stage of its loop holds in shared memory.
    """

    sizes: Callable[[Any], Sizes]
    launch: Callable[[Any, Tensors, Config], Tensors]
    fits: Callable[[Config, int, int, int], bool]
    staged: Callable[[Config], int]


def _stage_sizes(operation: Operation) -> Sizes:
    return ((operation.n_out, operation.n_in),) if isinstance(operation, Stage) else ()


def _bdmv_sizes(operation: Operation) -> Sizes:
    # Forward it runs whole layers, between whose stages it orders hidden features in its own way.
    if operation.tokens > FEW:
        return ()
    if isinstance(operation, Layer):
        return tuple({operation.factor1[1:]: None, operation.factor2[1:]: None})
    return _stage_sizes(operation) if isinstance(operation, Stage) and operation.gradient else ()


def _fused_sizes(operation: Operation) -> Sizes:
    if not isinstance(operation, Layer):
        return ()
    sizes = dispatch.fused_sizes(operation.factor1, operation.factor2)
    return () if sizes is None else (sizes,)


def _launch_bdmm(stage: Stage, operands: Tensors, config: Config) -> Tensors:
    run = dispatch.kernels().bdmm.bdmm
    if not stage.hidden and stage.group_out != 1:  # as `dispatch.linear` does it
        z = run(*operands, None, stage.blocks * stage.n_out, stage.group_in, 1, False, config)
        return (dispatch.interleave(z, stage.blocks, stage.n_out, stage.out_features, None, "auto"),)
    groups = (stage.group_in, stage.group_out)
    return (run(*operands, None, stage.out_features, *groups, stage.hidden, config),)


def _launch_bdmv(operation: Layer | Stage, operands: Tensors, config: Config) -> Tensors:
    kernel = dispatch.kernels().bdmv
    if isinstance(operation, Stage):
        groups = (operation.group_in, operation.group_out)
        return (kernel.bdmv(*operands, None, operation.out_features, *groups, operation.hidden, config),)
    kind = (operation.out_features, operation.interleaved, operation.keep)
    y, h = kernel.bdmv_layer(*operands, None, *kind, config, config)
    return (y, h) if operation.keep else (y,)


def _launch_wgrad(wgrad: Wgrad, operands: Tensors, config: Config) -> Tensors:
    sizes = (wgrad.blocks, wgrad.n_out, wgrad.n_in, wgrad.group_out, wgrad.group_in)
    return (dispatch.kernels().bdmm_wgrad.bdmm_wgrad(*operands, *sizes, config),)


def _launch_interleave(each: Interleave, operands: Tensors, config: Config) -> Tensors:
    run = dispatch.kernels().interleave.interleave
    return (run(*operands, each.rows, each.columns, each.out_features, None, config),)


def _launch_fused(layer: Layer, operands: Tensors, config: Config) -> Tensors:
    run = dispatch.kernels().fused.fused
    y, h = run(*operands, None, layer.out_features, layer.interleaved, layer.keep, config)
    return (y, h) if layer.keep else (y,)


def _chained_sizes(operation: Operation) -> Sizes:
    if not isinstance(operation, Layer) or operation.keep:
        return ()
    return (dispatch.widest(operation.factor1, operation.factor2),)


def _launch_chained(layer: Layer, operands: Tensors, config: Config) -> Tensors:
    x, w1, w2 = operands
    y = dispatch.run_chained(x, w1, w2, None, layer.out_features, layer.interleaved, config, "auto")
    return (y,)


def _between(config: Config, least: int, **sizes: int) -> bool:
    """Whether each tile is no larger than 16 or its size, nor smaller than `least` or its size."""
    for name, size in sizes.items():
        whole = 1 << max(0, size - 1).bit_length()
        if not min(least, whole) <= config[name] <= max(16, whole):
            return False
    return True


# In the order of measurement: a kernel competes with what "auto" takes without it.
KERNELS = {
    "interleave": Kernel(
        sizes=lambda each: ((each.rows, each.columns),) if isinstance(each, Interleave) else (),
        launch=_launch_interleave,
        fits=lambda config, rows, columns, tokens: _between(config, 1, BT=tokens, BR=rows, BC=columns),
        staged=lambda config: config["BT"] * config["BR"] * config["BC"],
    ),
    "bdmm_wgrad": Kernel(
        sizes=lambda each: ((each.n_out, each.n_in),) if isinstance(each, Wgrad) else (),
        launch=_launch_wgrad,
        fits=lambda config, n_out, n_in, tokens: (
            _between(config, 64, BO=n_out, BI=n_in) and _between(config, 16, BT=tokens)
        ),
        staged=lambda config: (config["BO"] + config["BI"]) * config["BT"],
    ),
    "bdmm": Kernel(
        sizes=_stage_sizes,
        launch=_launch_bdmm,
        fits=lambda config, n_out, n_in, tokens: (
            _between(config, 64, BT=tokens)
            and _between(config, min(64, tokens), BO=n_out)
            and _between(config, 16, BI=n_in)
        ),
        staged=lambda config: (config["BT"] + config["BO"]) * config["BI"],
    ),
    "bdmv": Kernel(
        sizes=_bdmv_sizes,
        launch=_launch_bdmv,
        # It takes all tokens at once, below 16 of them on the vector units out of registers.
        fits=lambda config, n_out, n_in, tokens: (
            config["BT"] in (tokens, 16)
            and (config["BT"] == 16 or config["BT"] * config["BO"] * config["BI"] <= 2**14)
            and _between(config, 1, BO=n_out, BI=n_in)
        ),
        staged=lambda config: config["BO"] * config["BI"],
    ),
    "fused": Kernel(
        sizes=_fused_sizes,
        launch=_launch_fused,
        fits=lambda config, features, size, tokens: _between(config, 16, BT=tokens),
        staged=lambda config: 0,
    ),
    "chained": Kernel(
        sizes=_chained_sizes,
        launch=_launch_chained,
        fits=lambda config, features, size, tokens: (
            _between(config, 16, BT=tokens) and _between(config, 16, BO=min(features, size), BI=size)
        ),
        staged=lambda config: (config["BT"] + config["BO"]) * config["BI"],
    ),
}


@dataclass(frozen=True)
class Task:
    """One row of a kernel's table to find, and the operations that it will serve."""

    kernel: str
    n_out: int
    n_in: int
    tokens: int
    operations: tuple[Operation, ...]

    def __str__(self) -> str:
        return f"{self.kernel} {self.n_out}x{self.n_in}, {self.tokens} tokens"


def tasks(operations: tuple[Operation, ...]) -> Iterator[Task]:
    """The rows that some operations look up, in the order in which to find them.

    Operations that share a row are one task.
    """
    for name, kernel in KERNELS.items():
        rows: dict[tuple[int, int, int], dict[Operation, None]] = {}
        for operation in operations:
            for sizes in kernel.sizes(operation):
                rows.setdefault((*sizes, operation.tokens), {})[operation] = None
        for (n_out, n_in, tokens), served in rows.items():
            yield Task(name, n_out, n_in, tokens, tuple(served))


def draw(dtype: torch.dtype, device: torch.device) -> Draw:
    """Make random tensors of about unit products, the same every time, whose random numbers are no
    one else's.
    """
    generator = torch.Generator(device).manual_seed(0)

    def one(*size: int) -> Tensor:
        values = torch.randn(*size, generator=generator, device=device, dtype=dtype)
        return values / size[-1] ** 0.5

    return one
