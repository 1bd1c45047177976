"""How hidden features lie in memory: the one thing that all paths of a layer must agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def new_hidden(x: Tensor, lead: Sequence[Any], features: int) -> Tensor:
    """An uninitialised `(*lead, features)` of the dtype and device of `x`, with tokens contiguous.

    Both products then read and write strided matrices, and nothing is permuted.
    """
    if len(lead) == 1 and type(lead[0]) is int:  # no view, which autograd would have to look after
        return x.new_empty_strided((lead[0], features), (1, max(1, lead[0])))
    return x.new_empty(features, *lead).movedim(0, -1)
