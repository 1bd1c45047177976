"""Whole layers, forward and every gradient, through dispatch as shipped."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from support import (
    DTYPES,
    LAYOUTS,
    assert_within_budget,
    error_over_budget,
    forward,
    make_operands,
    make_shape,
    run,
    run_dense,
)

from cdna.backend import ARCHS, on_cdna
from cdna.cases import ADDRESSING

# in, out, nblocks, rank: padded both ways, K != L, L not dividing Q, low rank, more blocks than a
# tile's rows, blocks larger than a tile.
SIZES = [
    (100, 75, 5, None),
    (33, 10, 4, None),
    (72, 48, (3, 2), 12),
    (48, 36, (2, 3), 4),
    (64, 64, 16, None),
    (300, 160, 2, 70),
]
TOKENS = (37, 5, 1)  # through bdmm, through bdmv, and with hidden features dealt to their blocks
OUTPUTS = ("y", "dx", "dblkdiag1", "dblkdiag2", "dbias", "y without gradients")


@dataclass(frozen=True)
class Layer:
    sizes: tuple[Any, ...]
    tokens: int
    layout: str
    dtype: torch.dtype
    arch: str
    addressing: str

    def __str__(self) -> str:
        shape = "x".join(map(str, self.sizes[:2]))
        return f"{shape}-{self.tokens}-{self.layout}-{str(self.dtype)[6:]}-{self.arch}-{self.addressing}"


def every_layer() -> list[Layer]:
    """Shapes, layouts, dtypes and architectures each with each other; ways of addressing take turns."""
    parts = itertools.product(SIZES, TOKENS, LAYOUTS, DTYPES, ARCHS)
    return [Layer(*part, list(ADDRESSING)[(i + i // 9) % 3]) for i, part in enumerate(parts)]


def some_layers() -> list[Layer]:
    """Each shape and number of tokens once, and each layout, dtype and architecture with each other."""
    chosen = []
    for i, (sizes, tokens) in enumerate(itertools.product(SIZES, TOKENS)):
        turn = LAYOUTS[(i + i // 4) % 2], DTYPES[i % 3], ARCHS[(i + i // 3) % 3], list(ADDRESSING)[i // 6]
        chosen.append(Layer(sizes, tokens, *turn))
    return chosen


def try_layer(case: Layer) -> dict[str, Any]:
    """Run a layer's forward and backward passes, and raise where one is not right."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        # Ranks that cost more than dense, and Triton's own interpreter, which takes no part.
        warnings.filterwarnings("ignore", "a Monarch layer|Triton's interpreter")
        shape = make_shape(case.sizes, case.layout)
        operands = make_operands(shape, case.dtype, (case.tokens,), device="cpu")
        grad = torch.randn(case.tokens, shape.out_features).to(case.dtype)
        buffers, wide = ADDRESSING[case.addressing]
        with on_cdna(case.arch, buffers, wide=wide) as backend:
            got = run(shape, operands, "triton", grad)
            with torch.no_grad():
                alone = forward(shape, operands, "triton")
        plain = run(shape, operands, "torch", grad)
    exact = run_dense(shape, operands, grad)
    got, plain, exact = [*got, alone], [*plain, plain[0]], [*exact, exact[0]]
    errors = []
    for name, *values in zip(OUTPUTS, got, plain, exact, strict=True):
        depth = max(shape.P, shape.R, case.tokens)
        assert_within_budget(f"{case} {name}", *values, depth=depth)
        errors.append(error_over_budget(*values, depth=depth))
    return {"error": max(errors), "launches": backend.launches}
