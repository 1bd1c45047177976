"""Dense weight to factors and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import Tensor

from monarch_rocm import autocast
from monarch_rocm.shape import MonarchShape


def project(
    weight: Tensor,
    nblocks: int | Sequence[int],
    rank: int | None = None,
    *,
    layout: str = "interleaved",
) -> tuple[Tensor, Tensor]:
    """The Monarch factors nearest to a dense weight in the Frobenius norm.

    In-block k and out-block l meet in one sub-block of the weight, which the factors can make any
    matrix of the rank that the hidden features they share allow, whatever the other sub-blocks
    are. So each sub-block takes its own truncated SVD, with the singular values' square roots in
    either factor: large weights in half precision stay within range.

    Args:
        weight (Tensor): `(out_features, in_features)`, floating or complex. Half precisions are
            decomposed in float32.
        nblocks (int or (int, int)): K = L, or (K, L).
        rank (int, optional): rank of each sub-block. Default: fly's sizes (`MonarchShape`).
        layout (str): "interleaved" (default) or "blocked".

    Returns:
        (Tensor, Tensor): `blkdiag1 (K, Q, P)` and `blkdiag2 (L, S, R)`, in the weight's dtype and on
        its device, without a graph.

    Raises:
        TypeError: a weight that is neither floating nor complex, or a size that is no int.
        ValueError: a weight that is not 2-D, not finite or on the meta device, an unknown layout, a
            size below 1.

    Source: Dao et al., "Monarch", 2022, section 3.3 and theorem 1, there for rank 1 and K = L.

    Example:
        >>> weight = torch.randn(12, 8)
        >>> w1, w2 = project(weight, nblocks=2, rank=4)
        >>> torch.allclose(monarch_weight(w1, w2), weight, atol=1e-5)
        True
    """
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight must be a torch.Tensor, but it is a {type(weight).__name__}")
    if weight.is_meta:
        raise ValueError("weight is on the meta device and has no values to project")
    if weight.ndim != 2:
        raise ValueError(f"weight must be 2-D, but it is {tuple(weight.shape)}")
    shape = MonarchShape(weight.shape[1], weight.shape[0], nblocks, rank, layout)
    return project_to(weight, shape)


@torch.no_grad()
def project_to(weight: Tensor, shape: MonarchShape) -> tuple[Tensor, Tensor]:
    """`project` onto a geometry computed before."""
    blocks = check_weight(weight)
    blocks = F.pad(
        blocks,
        (0, shape.K * shape.P - shape.in_features, 0, shape.L * shape.S - shape.out_features),
    )
    order = "(s l) (k p) -> l k s p" if shape.layout == "interleaved" else "(l s) (k p) -> l k s p"
    blocks = rearrange(blocks, order, l=shape.L, k=shape.K)
    if blocks.dtype == torch.complex64:
        # In which LAPACK's fails on some blocks of rank 1, and loses digits on others.
        blocks = blocks.to(torch.complex128)
    u, sigma, vh = torch.linalg.svd(blocks, full_matrices=False)
    root = sigma.sqrt()
    left = u * root[..., None, :]
    right = root[..., :, None] * vh

    k, l, t, r, q = hidden_features(shape, weight.device)
    kept = t < sigma.shape[-1]  # a rank above the sub-block's own leaves zeros
    k, l, t, r, q = (index[kept] for index in (k, l, t, r, q))
    blkdiag1 = right.new_zeros(shape.factor1)
    blkdiag1[k, q] = right[l, k, t]
    blkdiag2 = left.new_zeros(shape.factor2)
    blkdiag2[l, :, r] = left[l, k, :, t]
    return blkdiag1.to(weight.dtype), blkdiag2.to(weight.dtype)


def check_weight(weight: Tensor) -> Tensor:
    """The weight, detached, in a dtype that `torch.linalg` knows; raises where it cannot be projected."""
    if not (weight.is_floating_point() or weight.is_complex()):
        raise TypeError(f"weight must be floating or complex, but it is {weight.dtype}")
    weight = weight.detach()
    if weight.is_complex():
        weight = weight.to(torch.promote_types(weight.dtype, torch.complex64))
    elif weight.dtype != torch.float64:
        weight = weight.float()
    if not weight.isfinite().all():
        bad = int((~weight.isfinite()).sum())
        raise ValueError(f"weight has {bad} entries that are not finite, of {weight.numel()}")
    return weight


def monarch_weight(blkdiag1: Tensor, blkdiag2: Tensor, *, layout: str = "interleaved") -> Tensor:
    """The dense weight of two factors, differentiable.

    Args:
        blkdiag1 (Tensor): `(K, Q, P)`.
        blkdiag2 (Tensor): `(L, S, R)` with `K*Q == L*R`.
        layout (str): "interleaved" (default) or "blocked".

    Returns:
        Tensor: `(L*S, K*P)`, padding included.

    Raises:
        ValueError: factors that do not fit each other, an unknown layout.
        RuntimeError: factors of different dtypes or devices.

    Example:
        >>> eye = torch.eye(3).expand(4, 3, 3)
        >>> torch.equal(monarch_weight(eye, torch.eye(4).expand(3, 4, 4)), torch.eye(12))
        True
    """
    shape = MonarchShape.from_factors(blkdiag1.shape, blkdiag2.shape, layout=layout)
    for what in ("dtype", "device"):
        one, two = getattr(blkdiag1, what), getattr(blkdiag2, what)
        if one != two:
            raise RuntimeError(
                f"the factors must have one {what}, but blkdiag1 has {one} and blkdiag2 has {two}"
            )
    left, right = unpack(blkdiag1, blkdiag2, shape)
    with autocast.off(left):
        blocks = einsum(left, right, "l k t s, l k t p -> l k s p")
    order = "l k s p -> (s l) (k p)" if layout == "interleaved" else "l k s p -> (l s) (k p)"
    return rearrange(blocks, order)


def change(weight: Tensor, factors: tuple[Tensor, Tensor], shape: MonarchShape) -> Tensor:
    """What two factors change of a weight `(out_features, in_features)`, in a dtype for `torch.linalg`."""
    weight = check_weight(weight)
    one, two = (factor.to(weight.dtype) for factor in factors)
    monarch = monarch_weight(one, two, layout=shape.layout)
    return monarch[: shape.out_features, : shape.in_features] - weight


def unpack(blkdiag1: Tensor, blkdiag2: Tensor, shape: MonarchShape) -> tuple[Tensor, Tensor]:
    """What joins out-block l and in-block k: `left (L, K, depth, S)` and `right (L, K, depth, P)`, with
    zeros for hidden features that do not exist. Differentiable.
    """
    k, l, t, r, q = hidden_features(shape, blkdiag1.device)
    depth = -(-shape.Q // shape.L)  # the most hidden features that one sub-block owns
    right = blkdiag1.new_zeros(shape.L, shape.K, depth, shape.P)
    right = right.index_put((l, k, t), blkdiag1[k, q])
    left = blkdiag2.new_zeros(shape.L, shape.K, depth, shape.S)
    return left.index_put((l, k, t), blkdiag2[l, :, r]), right


def pack(left: Tensor, right: Tensor, shape: MonarchShape) -> tuple[Tensor, Tensor]:
    """The inverse of `unpack`: `blkdiag1` and `blkdiag2`."""
    k, l, t, r, q = hidden_features(shape, left.device)
    blkdiag1 = right.new_zeros(shape.factor1)
    blkdiag1[k, q] = right[l, k, t]
    blkdiag2 = left.new_zeros(shape.factor2)
    blkdiag2[l, :, r] = left[l, k, t]
    return blkdiag1, blkdiag2


def hidden_features(shape: MonarchShape, device: torch.device) -> tuple[Tensor, ...]:
    """Where each hidden feature belongs: five index vectors of length K*Q.

    Feature j joins in-block `k` and out-block `l`, as number `t` of those that do; it is row `q` of
    block k in the first factor and column `r` of block l in the second.
    """
    j = torch.arange(shape.K * shape.Q, device=device)
    k, q = j // shape.Q, j % shape.Q
    return k, j % shape.L, q // shape.L, j // shape.L, q
