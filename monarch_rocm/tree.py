"""Modules exchanged for others in a model's tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


def replace(model: nn.Module, new: Mapping[Any, nn.Module]) -> nn.Module:
    """Put new modules in the place of others, wherever these stand in the tree.

    Args:
        model (nn.Module): changed in place.
        new (mapping): from modules of the model to what takes their place. A new module may keep the old
            one as its child.

    Returns:
        nn.Module: the model, or what takes its place.

    Example:
        >>> old = nn.ReLU()
        >>> replace(nn.Sequential(old, nn.Tanh(), old), {old: nn.GELU()})
        Sequential(
          (0): GELU(approximate='none')
          (1): Tanh()
          (2): GELU(approximate='none')
        )
    """
    added = set(new.values())
    for parent in [module for module in model.modules() if module not in added]:
        for name, child in parent._modules.items():
            if child is not None and child in new:
                parent._modules[name] = new[child]
    return new.get(model, model)
