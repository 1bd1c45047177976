"""Batched matrix products: all of the `torch` backend, and a part of what runs on a GPU.

Permutations cost more than products on a GPU, so as few as possible are done. Hidden features are
kept in plain order with tokens contiguous (`new_hidden`): both stages, both input gradients and both
weight gradients can then read and write them as strided matrices. The one pass left is between the
blocked and the interleaved order of outputs, within each row.

A stage's features lie in memory by the index map of `kernels/README.md`. Only two groups can be read
or written by a product: 1 (block by block), and for hidden features the block size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from monarch_rocm import autocast

ALIGNMENT = 8  # numbers: 16 bytes in half precision, which fast products ask of a row


def stage(
    x: Tensor,
    w: Tensor,
    out_features: int,
    group_in: int,
    group_out: int,
    hidden: bool,
    inside: bool = False,
) -> Tensor:
    """Block-diagonal product `(tokens, in) -> (tokens, out_features)`, `w` of shape `(blocks, out, in)`.

    With `hidden`, the output lies as `new_hidden` says; else features are contiguous, and then
    `group_out` must be 1. With `inside`, hidden features go straight into the next product and lie as
    suits that best: on the CPU with features contiguous, whose library multiplies plain rows so much
    faster that a copy costs less; elsewhere with the tokens of a feature padded to a multiple of
    `ALIGNMENT`, so that no number of them sends the product to its slow path.
    """
    blocks, n_out, n_in = w.shape
    tokens = x.shape[0]
    a = split(x, blocks, n_in, group_in)
    if not hidden or (inside and x.device.type == "cpu"):
        y = x.new_empty(tokens, blocks, n_out)
        _bmm(a, w.mT, y.transpose(0, 1))
        if group_out != 1:
            y = y.transpose(1, 2).contiguous()
        return _cut(y.view(tokens, blocks * n_out), out_features)
    row = tokens
    if inside and tokens > 1:
        row = -(-tokens // ALIGNMENT) * ALIGNMENT
    y = x.new_empty(out_features, row)[:, :tokens]
    if group_out == 1:
        _bmm(w, a.mT, y.view(blocks, n_out, tokens))
    else:
        _bmm(a, w.mT, y.view(n_out, blocks, tokens).permute(1, 2, 0))
    return y.t()


def low_rank(x: Tensor, blkdiag1: Tensor, blkdiag2: Tensor, bias: Tensor | None) -> Tensor:
    """A layer of one block: two plain products, which cost the host less than products of batches."""
    with autocast.off(x):
        return F.linear(F.linear(x, blkdiag1[0]), blkdiag2[0], bias)


def stage_wgrad(
    g: Tensor, a: Tensor, blocks: int, n_out: int, n_in: int, group_out: int, group_in: int
) -> Tensor:
    """Weight gradient `(blocks, n_out, n_in)` of a stage from `g (tokens, out)` and `a (tokens, in)`."""
    left, right = split(g, blocks, n_out, group_out), split(a, blocks, n_in, group_in)
    return _bmm(left.mT, right.conj(), None)


def _bmm(a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
    with autocast.off(a):  # operands have their dtype already
        return torch.bmm(a, b, out=out)


def split(x: Tensor, blocks: int, size: int, group: int) -> Tensor:
    """`(tokens, features)` as `(blocks, tokens, size)`, a view wherever a product can read one."""
    if x.shape[1] != blocks * size:
        x = F.pad(x, (0, blocks * size - x.shape[1]))
    if group == 1:
        return x.view(x.shape[0], blocks, size).transpose(0, 1)
    x = x.view(x.shape[0], size, blocks)
    if x.stride(0) == 1:  # tokens contiguous: each block is a matrix in column order
        return x.permute(2, 0, 1)
    return x.transpose(1, 2).contiguous().transpose(0, 1)


def interleave(x: Tensor, rows: int, columns: int, out_features: int, bias: Tensor | None) -> Tensor:
    """Take each row of `x` as a matrix `(rows, columns)` and transpose it; then cut, and add the bias."""
    padded = rows * columns
    if x.shape[1] != padded:
        x = F.pad(x, (0, padded - x.shape[1]))
    x = x.unflatten(1, (rows, columns)).transpose(1, 2)
    # Into a tensor of its own, also where the transpose moves nothing: an op must not return its input.
    y = x.new_empty(x.shape)
    if bias is None:
        y.copy_(x)
    else:
        if padded != out_features:
            bias = F.pad(bias, (0, padded - out_features))
        torch.add(x, bias.view(columns, rows), out=y)
    return _cut(y.view(-1, padded), out_features)


def _cut(y: Tensor, features: int) -> Tensor:
    """The first features of each row, contiguous."""
    return y if y.shape[1] == features else y[:, :features].clone(memory_format=torch.contiguous_format)
