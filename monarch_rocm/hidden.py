"""How hidden features lie in memory: the one thing that all paths of a layer must agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def new_hidden(x: Tensor, lead: Sequence[Any], features: int) -> Tensor:
    """An uninitialised `(*lead, features)` of the dtype and device of `x`, with tokens contiguous.

    Both products then read and write strided matrices, and nothing is permuted.
    """
    return x.new_empty(features, *lead).movedim(0, -1)
