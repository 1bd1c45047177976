"""Hugging Face transformers."""

from __future__ import annotations

import sys

from torch import nn


def is_conv1d(module: nn.Module) -> bool:
    """Whether `module` is transformers' `Conv1D`, a linear layer with its weight transposed.

    A module can be one only where transformers has been imported, so this imports nothing.
    """
    library = sys.modules.get("transformers.pytorch_utils")
    return library is not None and type(module) is library.Conv1D
