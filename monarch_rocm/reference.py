"""The maths in einops, readable and slow: the oracle that every other path is tested against.

It knows nothing of kernels or of registered ops, so autograd here is PyTorch's own, forward mode
included, for any dtype that `torch.einsum` multiplies, complex ones too.
"""

from __future__ import annotations

import torch.nn.functional as F
from einops import einsum, rearrange
from torch import Tensor

from monarch_rocm.shape import MonarchShape


def monarch_linear(
    x: Tensor, blkdiag1: Tensor, blkdiag2: Tensor, bias: Tensor | None, shape: MonarchShape
) -> Tensor:
    """`x` times the transposed Monarch matrix.

    Args:
        x (Tensor): `(..., in_features)`.
        blkdiag1 (Tensor): `(K, Q, P)`.
        blkdiag2 (Tensor): `(L, S, R)`.
        bias (Tensor, optional): `(out_features,)`.
        shape (MonarchShape): the geometry.

    Returns:
        Tensor: `(..., out_features)`, contiguous.

    Source: DESIGN section 2; Dao et al. 2022, section 3.

    Example:
        >>> shape = MonarchShape(8, 12, nblocks=2)
        >>> x, w1, w2 = torch.randn(3, 8), torch.randn(shape.factor1), torch.randn(shape.factor2)
        >>> monarch_linear(x, w1, w2, None, shape).shape
        torch.Size([3, 12])
    """
    x = F.pad(x, (0, shape.K * shape.P - shape.in_features))
    x = rearrange(x, "... (k p) -> ... k p", k=shape.K)
    h = einsum(blkdiag1, x, "k q p, ... k p -> ... k q")
    h = rearrange(rearrange(h, "... k q -> ... (k q)"), "... (r l) -> ... l r", l=shape.L)
    z = einsum(blkdiag2, h, "l s r, ... l r -> ... l s")
    order = "... l s -> ... (s l)" if shape.layout == "interleaved" else "... l s -> ... (l s)"
    y = rearrange(z, order)[..., : shape.out_features].contiguous()
    return y if bias is None else y + bias
