"""Monarch linear layers for PyTorch on AMD Instinct, with a path on every other device."""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as _error:
    if _error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "monarch_rocm needs PyTorch, which it never installs itself, so that it cannot replace a ROCm "
        "build. Install the one for your machine first, from https://pytorch.org/get-started/locally:\n"
        "  ROCm: pip install torch --index-url https://download.pytorch.org/whl/rocm6.4\n"
        "  CUDA: pip install torch\n"
        "  CPU:  pip install torch numpy --index-url https://download.pytorch.org/whl/cpu",
        name="torch",
    ) from None

from monarch_rocm.allocation import Budget
from monarch_rocm.config import MonarchConfig
from monarch_rocm.convert import monarchize
from monarch_rocm.functional import monarch_linear
from monarch_rocm.healing import heal
from monarch_rocm.linear import MonarchLinear
from monarch_rocm.planning import plan
from monarch_rocm.projection import monarch_weight, project
from monarch_rocm.shape import MonarchShape
from monarch_rocm.structure import restructure, structure

__version__ = "0.1.0"
__all__ = [
    "Budget",
    "MonarchConfig",
    "MonarchLinear",
    "MonarchShape",
    "heal",
    "monarch_linear",
    "monarch_weight",
    "monarchize",
    "plan",
    "project",
    "restructure",
    "structure",
]
