"""A small GPT without its vocabulary, dense or Monarch: the model whose training step `bench` times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monarch_rocm.linear import MonarchLinear
from monarch_rocm.shape import MonarchShape

DEPTH, CONTEXT, HEAD = 8, 1024, 128
Linear = Callable[[int, int], nn.Module]


def _sizes(width: int) -> tuple[tuple[int, int], ...]:
    return (width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)


class Block(nn.Module):
    """Attention and a perceptron, each on normalised input, each added to it."""

    def __init__(self, width: int, linear: Linear) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project, self.up, self.down = (linear(*sizes) for sizes in _sizes(width))

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        heads = self.attend(self.norm1(x)).view(batch, context, 3, -1, HEAD).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(batch, context, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


def steps(
    width: int, tokens: int, nblocks: int, layout: str, dtype: torch.dtype
) -> dict[str, Callable[[], Any]]:
    """A compiled training step (forward, backward, AdamW) of the dense and of the Monarch model."""

    def monarch(n_in: int, n_out: int) -> nn.Module:
        return MonarchLinear(n_in, n_out, bias=False, nblocks=nblocks, layout=layout)

    def dense(n_in: int, n_out: int) -> nn.Module:
        return nn.Linear(n_in, n_out, bias=False)

    x = torch.randn(tokens // CONTEXT, CONTEXT, width, device="cuda", dtype=dtype)
    return {"dense": _step(dense, x), "auto": _step(monarch, x)}


def _step(linear: Linear, x: Tensor) -> Callable[[], Any]:
    torch.compiler.reset()
    with torch.device("cuda"):
        model = nn.Sequential(*[Block(x.shape[-1], linear) for _ in range(DEPTH)]).to(x.dtype)
    for block in model:
        block.compile()  # the blocks share one graph, so that one is compiled
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def parameters(width: int, nblocks: int) -> int:
    """Numbers in the model's linear layers."""
    return DEPTH * sum(MonarchShape(*sizes, nblocks).num_parameters for sizes in _sizes(width))
