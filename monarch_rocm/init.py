"""Initial factors whose layer starts as `nn.Linear` would."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from monarch_rocm.shape import MonarchShape


@torch.no_grad()
def uniform_(blkdiag1: Tensor, blkdiag2: Tensor, bias: Tensor | None, shape: MonarchShape) -> None:
    """Fill the factors so that outputs vary as those of `nn.Linear`'s default: 1/3 for unit inputs.

    The variances of the factors' entries must have the product `1 / (3 * paths)`, where `paths` is
    how many pairs of entries join an output to the inputs, on average over the outputs and without
    the padding. The first factor takes the share `1 / (sqrt(3) * in_features/K)`, so that hidden
    features vary by `1/sqrt(3)`, and the second the rest. A uniform draw within `±b` has variance
    `b**2 / 3`, hence `b = 3**(1/4) / sqrt(fan_in)`.

    Args:
        blkdiag1 (Tensor): `(K, Q, P)`, changed in place.
        blkdiag2 (Tensor): `(L, S, R)`, changed in place.
        bias (Tensor, optional): `(out_features,)`, changed in place, drawn as `nn.Linear` draws it.
        shape (MonarchShape): the geometry.

    Example:
        >>> shape = MonarchShape(1024, 1024, nblocks=32)
        >>> w1, w2 = torch.empty(shape.factor1), torch.empty(shape.factor2)
        >>> uniform_(w1, w2, None, shape)
        >>> round(float(3 * monarch_weight(w1, w2).var() * 1024), 1)
        1.0
    """
    for factor, bound in zip((blkdiag1, blkdiag2), bounds(shape), strict=True):
        factor.uniform_(-bound, bound)
    if bias is not None:
        bound = 1 / math.sqrt(shape.in_features)
        bias.uniform_(-bound, bound)


def bounds(shape: MonarchShape) -> tuple[float, float]:
    """Largest entries of the two new factors (`uniform_`)."""
    fan_in1 = shape.in_features / shape.K
    one, two = (3**0.25 / math.sqrt(fan_in) for fan_in in (fan_in1, _mean_paths(shape) / fan_in1))
    return one, two


def _mean_paths(shape: MonarchShape) -> float:
    """Pairs of entries that join an output to the inputs, on average over the outputs."""
    if shape.in_features == shape.K * shape.P and shape.out_features == shape.L * shape.S:
        return shape.R * shape.P
    inputs = _unpadded(shape.in_features, shape.K, shape.P, interleaved=False)
    outputs = _unpadded(shape.out_features, shape.L, shape.S, shape.layout == "interleaved")
    features = range(shape.K * shape.Q)
    return sum(inputs[j // shape.Q] * outputs[j % shape.L] for j in features) / shape.out_features


def _unpadded(features: int, blocks: int, size: int, interleaved: bool) -> list[int]:
    """How many features of each block are no padding."""
    if interleaved:
        return [-(-(features - b) // blocks) if b < features else 0 for b in range(blocks)]
    return [min(size, max(0, features - b * size)) for b in range(blocks)]
