"""Factors whose outputs, on the inputs that a layer really sees, are nearest to the dense layer's.

With C the second moment of the inputs, the mean squared output error of a weight M for a weight W is
tr((W - M) C (W - M)^T). Were C block-diagonal, sub-blocks would be independent and their truncated
SVDs, taken of W_lk C_kk^(1/2), best; that is where the search starts. C couples in-blocks, so that
factors then take turns: for fixed rows of the first factor the second is a least-squares problem for
each out-block, and for fixed columns of the second each in-block of the first is one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from monarch_rocm import projection
from monarch_rocm.shape import MonarchShape

SWEEPS = 8  # turns of both factors; on MiniLM the sixth still gained 1 %
DAMPING = 1e-6  # of the mean variance, for inputs that never vary


@torch.no_grad()
def fit_to(
    weight: Tensor, second: Tensor, shape: MonarchShape, sweeps: int = SWEEPS
) -> tuple[Tensor, Tensor, float]:
    """Factors of a weight for inputs with a given second moment.

    Args:
        weight (Tensor): `(out_features, in_features)`, floating, finite.
        second (Tensor): `(in_features, in_features)`, symmetric, about zero or the mean; floating.
        shape (MonarchShape): the geometry.
        sweeps (int): turns of both factors, at most.

    Returns:
        (Tensor, Tensor, float): `blkdiag1`, `blkdiag2` in the weight's dtype, and the root mean
        squared output error over the root mean squared output.

    Source: as GPTQ-like and whitened SVD compression weigh errors (Frantar et al. 2022; Wang et al.
    2024, "SVD-LLM"), here for Monarch's sub-blocks, with alternating least squares.
    """
    K, L = shape.K, shape.L
    dense, second, diagonal, damping = _prepare(weight, second, shape.nblocks, shape.layout)

    # Hidden features of out-block l and in-block k: left[l, k] (depth, S) and right[l, k] (depth, P).
    depth = -(-shape.Q // L)
    k, l, t, r, q = projection.hidden_features(shape, second.device)
    exists = torch.zeros(L, K, depth, 1, dtype=second.dtype, device=second.device)
    exists[l, k, t] = 1
    left, right = _start(dense, diagonal, depth, damping)
    left, right = left * exists, right * exists
    total = float((dense @ second * dense).sum())
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

    ratio = (torch.linalg.vector_norm(left, dim=-1) / torch.linalg.vector_norm(right, dim=-1)).sqrt()
    ratio = ratio.nan_to_num(1, 1, 1).clamp(1e-6, 1e6)[..., None]  # both factors alike, as `project` has them
    left, right = left / ratio, right * ratio
    blkdiag1 = right.new_zeros(shape.factor1)
    blkdiag1[k, q] = right[l, k, t]
    blkdiag2 = left.new_zeros(shape.factor2)
    blkdiag2[l, :, r] = left[l, k, t]
    relative = (max(error, 0.0) / total) ** 0.5 if total > 0 else 0.0
    return blkdiag1.to(weight.dtype), blkdiag2.to(weight.dtype), relative


@torch.no_grad()
def errors(weight: Tensor, second: Tensor, nblocks: tuple[int, int], layout: str) -> Tensor:
    """Squared output error of each rank of the sub-blocks, from 0, as if in-blocks were not coupled.

    Exact for one in-block (up to the damping); what `fit_to` starts from elsewhere.
    """
    dense, _, diagonal, damping = _prepare(weight, second, nblocks, layout)
    root, _ = _roots(diagonal, damping)
    blocks = rearrange(dense, "l s (k p) -> l k s p", k=len(diagonal)) @ root
    squares = torch.linalg.svdvals(blocks).square().sum((0, 1))
    return F.pad(squares.flip(0).cumsum(0).flip(0), (0, 1))


@torch.no_grad()
def power(weight: Tensor, second: Tensor) -> float:
    """Mean squared norm of the dense layer's outputs."""
    dense = projection.check_weight(weight).to(second.dtype)
    return float((dense @ second * dense).sum())


def _prepare(
    weight: Tensor, second: Tensor, nblocks: tuple[int, int], layout: str
) -> tuple[Tensor, Tensor, Tensor, float]:
    """The weight as `(L, S, K*P)`, its inputs' moments padded and damped, those of each in-block, and
    the damping.
    """
    K, L = nblocks
    dense = projection.check_weight(weight).to(second.dtype)
    P, S = -(-dense.shape[1] // K), -(-dense.shape[0] // L)
    width = K * P
    pad = width - dense.shape[1]
    dense = F.pad(dense, (0, pad, 0, L * S - dense.shape[0]))
    dense = rearrange(dense, "(s l) i -> l s i" if layout == "interleaved" else "(l s) i -> l s i", l=L)
    damping = DAMPING * float(second.diagonal().mean())
    damping = damping or 1.0  # inputs that are all zero: any factors are right, and these are finite
    second = F.pad(second, (0, pad, 0, pad))
    second = second + damping * torch.eye(width, dtype=second.dtype, device=second.device)
    diagonal = torch.stack([second[i : i + P, i : i + P] for i in range(0, width, P)])
    return dense, second, diagonal, damping


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
