"""What `torch.compile` must know of this package's Python."""

from __future__ import annotations

from typing import Any


def constant(function: Any) -> Any:
    """Let `torch.compile` take the result as it is, as `torch.compiler.assume_constant_result` does,
    which imports all of Dynamo when it decorates.
    """
    function._dynamo_marked_constant = True
    return function
