"""The `torch` backend: two batched matrix products, the fast path where there is no Triton.

Permutations cost more than products here, so as few as possible are done. Hidden features are kept
in plain order with tokens contiguous, `(features, tokens)` in memory: both stages, both input
gradients and both weight gradients can then read and write them as strided matrices. The one copy
left is the interleaved output (or its gradient), within each row.

A stage's features lie in memory by the index map of `kernels/README.md`; only two groups occur
here, 1 (block by block) and the block size (block index fastest).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def stage(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    out_features: int,
    group_in: int,
    group_out: int,
    hidden: bool,
) -> Tensor:
    """Block-diagonal product `(tokens, in) -> (tokens, out_features)`, `w` of shape `(blocks, out, in)`.

    With `hidden`, the output has tokens contiguous, strides `(1, tokens)`; else features.
    """
    blocks, n_out, n_in = w.shape
    tokens = x.shape[0]
    a = split(x, blocks, n_in, group_in)
    if hidden:
        y = x.new_empty(out_features, tokens)
        if group_out == 1:
            torch.bmm(w, a.mT, out=y.view(blocks, n_out, tokens))
        else:
            torch.bmm(a, w.mT, out=y.view(n_out, blocks, tokens).permute(1, 2, 0))
        return y.t()
    y = x.new_empty(tokens, blocks, n_out)
    torch.bmm(a, w.mT, out=y.transpose(0, 1))
    padded = blocks * n_out
    if group_out == 1:
        y = y.view(tokens, padded)
        if padded != out_features:
            y = y[:, :out_features]
        if bias is not None:
            y = y.add_(bias)
        return y.contiguous()
    if bias is None:
        y = y.transpose(1, 2).contiguous()
    else:
        if padded != out_features:
            bias = F.pad(bias, (0, padded - out_features))
        y = torch.add(y.transpose(1, 2), bias.view(n_out, blocks), out=y.new_empty(tokens, n_out, blocks))
    return y.view(tokens, padded)[:, :out_features].contiguous()


def stage_wgrad(
    g: Tensor, a: Tensor, blocks: int, n_out: int, n_in: int, group_out: int, group_in: int
) -> Tensor:
    """Weight gradient `(blocks, n_out, n_in)` of a stage from `g (tokens, out)` and `a (tokens, in)`."""
    left, right = split(g, blocks, n_out, group_out), split(a, blocks, n_in, group_in)
    return torch.bmm(left.mT, right.conj())


def split(x: Tensor, blocks: int, size: int, group: int) -> Tensor:
    """`(tokens, features)` as `(blocks, tokens, size)`, a view wherever a product can read one."""
    if x.shape[1] != blocks * size:
        x = F.pad(x, (0, blocks * size - x.shape[1]))
    if group == 1:
        return x.unflatten(1, (blocks, size)).transpose(0, 1)
    x = x.unflatten(1, (size, blocks)).transpose(1, 2)
    # With tokens contiguous a block is a matrix in column order; else its numbers lie apart.
    return (x if x.stride(0) == 1 else x.contiguous()).transpose(0, 1)
