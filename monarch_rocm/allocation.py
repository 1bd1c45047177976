"""How a budget is spent: which geometry each layer gets, and which layers stay dense."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from torch import Tensor

from monarch_rocm import fitting, projection
from monarch_rocm.shape import MonarchShape, check_nblocks

COSTS = ("parameters", "flops")
STEPS = 48  # ranks that are tried of each nblocks, about
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Budget:
    """What a compressed model may cost, and the numbers of blocks to choose from.

    Args:
        fraction (float): of the dense model's parameters or FLOPs, between 0 and 1.
        of (str): "parameters" (default), shared ones counted once; or "flops", of a pass over the
            first calibration batch.
        nblocks (sequence of int or (int, int)): what `nblocks` may be. Default: 1, 2 and 4. With
            `(1,)` every layer is of low rank, with `(4,)` all have four blocks.

    Raises:
        TypeError, ValueError: a field that fits no model.

    Example:
        >>> Budget(0.7).fraction, Budget(0.5, of="flops", nblocks=(2, 4)).of
        (0.7, 'flops')
    """

    fraction: float
    of: str = "parameters"
    nblocks: tuple[int | tuple[int, int], ...] = (1, 2, 4)

    def __post_init__(self) -> None:
        number = self.fraction
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise TypeError(f"a budget must be a number between 0 and 1, but {number!r} was given")
        if not 0 < number < 1:
            raise ValueError(f"a budget must be between 0 and 1, not included, but {number!r} was given")
        if self.of not in COSTS:
            raise ValueError(f"a budget must be of one of {COSTS}, but of={self.of!r} was given")
        pairs = tuple(check_nblocks(each) for each in self.nblocks)
        if not pairs:
            raise ValueError("a budget needs at least one nblocks to choose from")
        object.__setattr__(self, "nblocks", pairs)


@dataclass(frozen=True)
class Choice:
    """One way to build a layer.

    Attributes:
        shape (MonarchShape or None): the geometry, None to keep the layer dense.
        cost (int): parameters or FLOPs.
        loss (float): what it is predicted to add to the model's error; 0 for dense.
    """

    shape: MonarchShape | None
    cost: int
    loss: float


def choices(
    weight: Tensor,
    second: Tensor,
    outputs: Tensor | None,
    nblocks: Sequence[Any],
    layout: str,
    unit: int,
) -> list[Choice]:
    """All ways to build one layer that cost less than the dense one, and the dense one.

    Errors of all ranks come from the singular values of the whitened sub-blocks. They are exact for
    one block; where blocks are coupled, they are scaled by what the coupling does at rank 0 and in
    fits of a third and of two thirds of the highest rank.

    Args:
        weight (Tensor): `(out_features, in_features)`.
        second (Tensor): `(in_features, in_features)`, second moment of its inputs.
        outputs (Tensor, optional): `(out_features, out_features)`, how much its outputs matter
            (`calibration.sensitivities`). Default: losses are relative to the power of the outputs, as
            if all layers mattered alike.
        nblocks (sequence of (int, int)): as in `Budget`.
        layout (str): as in `MonarchConfig`.
        unit (int): what a number in a factor costs, in parameters or FLOPs.
    """
    out_features, in_features = weight.shape
    found = [Choice(None, weight.numel() * unit, 0.0)]
    power = fitting.power(weight, second, outputs)
    scale = 1.0 if outputs is not None or power <= 0 else 1 / power
    for K, L in nblocks:
        P, S = -(-in_features // K), -(-out_features // L)
        each = K * L * (P + S)  # numbers that one more rank costs
        highest = min(P, S, (weight.numel() - 1) // each)
        if highest < 1 or weight.numel() < K * L:
            continue
        errors = fitting.errors(weight, second, (K, L), layout, outputs)
        step = 2 ** max(0, int(math.log2(highest / STEPS))) if highest > STEPS else 1
        coupling = [(0, 1.0)]
        if K > 1 or (L > 1 and outputs is not None):
            known = [(0, power)]
            for part in (1, 2):
                rank = max(1, part * highest // 3 // step * step)
                shape = MonarchShape(in_features, out_features, (K, L), rank, layout)
                factors = fitting.fit_to(weight, second, shape, outputs, sweeps=4)
                change = projection.change(weight, factors, shape)
                known.append((rank, fitting.power(change, second, outputs)))
            coupling = [(rank, real / max(float(errors[rank]), 1e-300)) for rank, real in known]
        for rank in sorted({*range(step, highest + 1, step), 1}):
            shape = MonarchShape(in_features, out_features, (K, L), rank, layout)
            loss = _at(rank, coupling) * float(errors[rank])
            found.append(Choice(shape, each * rank * unit, loss * scale))
    return found


def _at(x: int, points: Sequence[tuple[int, float]]) -> float:
    """The value at `x` between known points, and that of the last beyond it."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / max(1, x1 - x0)
    return points[-1][1]


def allocate(options: Mapping[Key, Sequence[Choice]], limit: int) -> dict[Key, Choice] | None:
    """One choice for each key, of the least loss in all, costing at most `limit`; None where none does.

    A price per unit of cost is found by bisection, for which every layer's best choice fits the limit
    (the Lagrangian relaxation); what is left over goes, step by step, to the layer that gains most
    for it.

    Source: Everett, "Generalized Lagrange multiplier method", 1963; Shoham & Gersho 1988, for bits.

    Example:
        >>> dense, low = Choice(None, 10, 0.0), Choice(MonarchShape(8, 8, 1, 1), 4, 1.0)
        >>> [choice.cost for choice in allocate({"a": [dense, low], "b": [dense, low]}, 15).values()]
        [10, 4]
    """

    def cheapest(price: float) -> dict[Key, Choice]:
        return {
            key: min(each, key=lambda choice: (choice.loss + price * choice.cost, choice.cost))
            for key, each in options.items()
        }

    def cost(picked: Mapping[Key, Choice]) -> int:
        return sum(choice.cost for choice in picked.values())

    picked = {key: min(each, key=lambda choice: (choice.cost, choice.loss)) for key, each in options.items()}
    if cost(picked) > limit:
        return None
    low, high = math.log(1e-30), math.log(1e30)  # prices, of losses in any unit
    for _ in range(100):
        middle = (low + high) / 2
        tried = cheapest(math.exp(middle))
        if cost(tried) <= limit:
            picked, high = tried, middle
        else:
            low = middle
    left = limit - cost(picked)
    while True:
        best, gain = None, 0.0
        for key, each in options.items():
            now = picked[key]
            for choice in each:
                more = choice.cost - now.cost
                if choice.loss < now.loss and more <= left:
                    worth = (now.loss - choice.loss) / max(more, 1e-9)
                    if worth > gain:
                        best, gain = (key, choice), worth
        if best is None:
            return picked
        left -= best[1].cost - picked[best[0]].cost
        picked[best[0]] = best[1]
