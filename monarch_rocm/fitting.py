"""Factors whose outputs, on the inputs that a layer really sees, are nearest to the dense layer's.

With C the second moment of the inputs, the mean squared output error of a weight M for a weight W is
tr((W - M) C (W - M)^T). Were C block-diagonal, sub-blocks would be independent and their truncated
SVDs, taken of W_lk C_kk^(1/2), best; that is where the search starts. C couples in-blocks, so that
factors then take turns: for fixed rows of the first factor the second is a least-squares problem for
each out-block, and for fixed columns of the second each in-block of the first is one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from monarch_rocm import projection
from monarch_rocm.shape import MonarchShape

SWEEPS = 8  # turns of both factors; on MiniLM the sixth still gained 1 %
DAMPING = 1e-6  # of the mean variance, for inputs that never vary
OUTPUT_DAMPING = 1e-3  # of the mean weight of an output, for outputs that never mattered


@torch.no_grad()
def fit_to(
    weight: Tensor,
    second: Tensor,
    shape: MonarchShape,
    outputs: Tensor | None = None,
    sweeps: int = SWEEPS,
) -> tuple[Tensor, Tensor]:
    """Factors of a weight for inputs with a given second moment.

    Args:
        weight (Tensor): `(out_features, in_features)`, floating, finite.
        second (Tensor): `(in_features, in_features)`, symmetric, about zero or the mean; floating.
        shape (MonarchShape): the geometry.
        outputs (Tensor, optional): `(out_features, out_features)`, symmetric and not negative, G of the
            error `e^T G e` that an error e of the layer's output makes. Terms between out-blocks are
            left out. Default: the squared error.
        sweeps (int): turns of both factors, at most.

    Returns:
        (Tensor, Tensor): `blkdiag1`, `blkdiag2` in the weight's dtype.

    Source: as GPTQ-like and whitened SVD compression weigh errors (Frantar et al. 2022; Wang et al.
    2024, "SVD-LLM"), here for Monarch's sub-blocks, with alternating least squares.
    """
    K, L = shape.K, shape.L
    system = _prepare(weight, second, shape.nblocks, shape.layout, outputs)
    dense, second, diagonal = system.dense, system.second, system.diagonal

    # Hidden features of out-block l and in-block k: left[l, k] (depth, S) and right[l, k] (depth, P).
    depth = -(-shape.Q // L)
    k, l, t, _, _ = projection.hidden_features(shape, second.device)
    exists = torch.zeros(L, K, depth, 1, dtype=second.dtype, device=second.device)
    exists[l, k, t] = 1
    left, right = _start(dense, diagonal, depth, system.damping)
    left, right = left * exists, right * exists
    error = _error(dense - _product(left, right), second)
    for _ in range(sweeps):
        left = _second_factor(dense, second, right) * exists
        change = dense - _product(left, right)
        for block in range(K):
            columns = slice(block * shape.P, (block + 1) * shape.P)
            step = _first_factor_step(change @ second[:, columns], left[:, block], diagonal[block])
            step = step * exists[:, block]
            right[:, block] += step
            change[:, :, columns] -= left[:, block].mT @ step
        before, error = error, _error(change, second)
        if before - error < 1e-4 * before:
            break
    if system.inverse is not None:
        left = left @ system.inverse[:, None]

    ratio = (torch.linalg.vector_norm(left, dim=-1) / torch.linalg.vector_norm(right, dim=-1)).sqrt()
    ratio = ratio.nan_to_num(1, 1, 1).clamp(1e-6, 1e6)[..., None]  # both factors alike, as `project` has them
    left, right = left / ratio, right * ratio
    blkdiag1, blkdiag2 = projection.pack(left, right, shape)
    return blkdiag1.to(weight.dtype), blkdiag2.to(weight.dtype)


@torch.no_grad()
def errors(
    weight: Tensor, second: Tensor, nblocks: tuple[int, int], layout: str, outputs: Tensor | None = None
) -> Tensor:
    """Output error of each rank of the sub-blocks, from 0, as if these were not coupled.

    Exact for one in-block and, with `outputs`, one out-block (up to the damping); what `fit_to` starts
    from elsewhere.
    """
    system = _prepare(weight, second, nblocks, layout, outputs)
    root, _ = _roots(system.diagonal, system.damping)
    blocks = rearrange(system.dense, "l s (k p) -> l k s p", k=len(root)) @ root
    squares = torch.linalg.svdvals(blocks).square().sum((0, 1))
    return F.pad(squares.flip(0).cumsum(0).flip(0), (0, 1))


@torch.no_grad()
def power(change: Tensor, second: Tensor, outputs: Tensor | None = None) -> float:
    """Mean of `e^T G e` for what a weight `(out_features, in_features)` makes of its inputs, e."""
    change = projection.check_weight(change).to(second.dtype)
    weighed = change if outputs is None else outputs @ change
    return float((change @ second * weighed).sum())


@dataclass(frozen=True)
class _System:
    """A layer in blocks: the weight `(L, S, K*P)`, weighed by what its outputs matter; its inputs' second
    moments `(K*P, K*P)`, damped, and those of each in-block `(K, P, P)`; the damping; and, where outputs
    are weighed, what takes the weight off again `(L, S, S)`.
    """

    dense: Tensor
    second: Tensor
    diagonal: Tensor
    damping: float
    inverse: Tensor | None


def _prepare(
    weight: Tensor, second: Tensor, nblocks: tuple[int, int], layout: str, outputs: Tensor | None
) -> _System:
    K, L = nblocks
    dense = projection.check_weight(weight).to(second.dtype)
    P, S = -(-dense.shape[1] // K), -(-dense.shape[0] // L)
    width, height = K * P, L * S
    pad, below = width - dense.shape[1], height - dense.shape[0]
    order = "(s l) ... -> l s ..." if layout == "interleaved" else "(l s) ... -> l s ..."
    dense = rearrange(F.pad(dense, (0, pad, 0, below)), order, l=L)
    damping = DAMPING * float(second.diagonal().mean())
    damping = damping or 1.0  # inputs that are all zero: any factors are right, and these are finite
    second = F.pad(second, (0, pad, 0, pad))
    second = second + damping * torch.eye(width, dtype=second.dtype, device=second.device)
    diagonal = torch.stack([second[i : i + P, i : i + P] for i in range(0, width, P)])
    inverse = None
    if outputs is not None:
        place = rearrange(torch.arange(height, device=second.device), order, l=L)
        padded = F.pad(outputs.to(second.dtype), (0, below, 0, below))
        blocks = padded[place[:, :, None], place[:, None, :]]
        floor = OUTPUT_DAMPING * float(outputs.diagonal().mean()) or 1.0
        root, inverse = _roots(blocks + floor * torch.eye(S, dtype=second.dtype, device=second.device), floor)
        dense = root @ dense
    return _System(dense, second, diagonal, damping, inverse)


def _roots(diagonal: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Square roots of second moments `(..., P, P)`, and their inverses."""
    values, vectors = torch.linalg.eigh(diagonal)
    values = values.clamp_min(damping).sqrt()[..., None, :]
    return vectors * values @ vectors.mT, vectors / values @ vectors.mT


def _start(dense: Tensor, diagonal: Tensor, depth: int, damping: float) -> tuple[Tensor, Tensor]:
    """Truncated SVDs of the sub-blocks, whitened by each in-block's own second moment."""
    blocks = len(diagonal)
    root, inverse = _roots(diagonal, damping)
    u, sigma, vh = torch.linalg.svd(
        rearrange(dense, "l s (k p) -> l k s p", k=blocks) @ root, full_matrices=False
    )
    kept = min(depth, sigma.shape[-1])  # a rank above the sub-block's own leaves zeros
    share = sigma[..., :kept].sqrt()
    left = F.pad((u[..., :kept] * share[..., None, :]).mT, (0, 0, 0, depth - kept))
    right = F.pad(vh[..., :kept, :] * share[..., None] @ inverse, (0, 0, 0, depth - kept))
    return left, right


def _product(left: Tensor, right: Tensor) -> Tensor:
    return rearrange(left.mT @ right, "l k s p -> l s (k p)")


def _error(change: Tensor, second: Tensor) -> float:
    return float((change @ second * change).sum())


def _second_factor(dense: Tensor, second: Tensor, right: Tensor) -> Tensor:
    """The best `left (L, K, depth, S)` for the hidden features that `right` makes."""
    blocks, depth = right.shape[1:3]
    rows = torch.zeros(*right.shape[:3], blocks, right.shape[3], dtype=right.dtype, device=right.device)
    for block in range(blocks):
        rows[:, block, :, block] = right[:, block]
    rows = rows.flatten(3).flatten(1, 2)  # (L, K*depth, in)
    seen = rows @ second
    return _solve(seen @ rows.mT, (dense @ seen.mT).mT).unflatten(1, (blocks, depth))


def _first_factor_step(pull: Tensor, left: Tensor, own: Tensor) -> Tensor:
    """What to add to an in-block's `right (L, depth, P)`, given its `left (L, depth, S)`, its own second
    moment `(P, P)` and the change left to explain, times the moments of the block's inputs `(L, S, P)`.
    """
    step = _solve(left @ left.mT, left @ pull)
    return torch.linalg.solve(own, step.mT).mT


def _solve(matrices: Tensor, values: Tensor) -> Tensor:
    """Solve positive systems of which rows may be empty: features that do not exist, or carry nothing."""
    scale = matrices.diagonal(dim1=-2, dim2=-1).mean(-1)
    scale = torch.where(scale > 0, scale, 1)
    eye = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    return torch.linalg.solve(matrices + 1e-9 * scale[:, None, None] * eye, values)
