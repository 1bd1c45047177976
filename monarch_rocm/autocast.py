"""Autocast as `nn.Linear` sees it: the active dtype decides, and inside a product nothing is cast again."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from monarch_rocm.tracing import constant


@constant
def _exists(device_type: str) -> bool:
    """Whether there is autocast for that kind of device; for the meta device there is none."""
    return torch.amp.is_autocast_available(device_type)


def active_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that autocast has active there, None where it is off."""
    if _exists(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """What autocast makes of an operand: float64 stays as it is."""
    if tensor.is_floating_point() and tensor.dtype != torch.float64:
        return tensor.to(dtype)
    return tensor


def off(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context in which operands on the tensor's device keep their dtype."""
    if active_dtype(tensor.device.type) is None:
        return contextlib.nullcontext()
    return torch.autocast(tensor.device.type, enabled=False)
