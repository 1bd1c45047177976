"""What is installed, what it runs on, and what `auto` would pick: text for a bug report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import torch

import monarch_rocm
from monarch_rocm import dispatch
from monarch_rocm.kernels import tuning

VARIABLES = (
    "MONARCH_ROCM_AUTOTUNE",
    "MONARCH_ROCM_BACKEND",
    "MONARCH_ROCM_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TRITON_INTERPRET",
)
OPTIONAL = ("transformers", "peft", "safetensors", "torchmonarch")


def facts() -> dict[str, str]:
    """Everything `monarch-rocm doctor` prints, by name."""
    found = {
        "monarch-rocm": f"{monarch_rocm.__version__} at {Path(monarch_rocm.__file__).parent}",
        "python": f"{platform.python_version()} on {platform.platform()}",
        "torch": torch.__version__,
        "triton": _triton(),
        "runtime": _runtime(),
    }
    for name in OPTIONAL:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    found |= _devices()
    found["shipped configs"] = str(tuning.CONFIGS)
    found["your own configs"] = str(tuning.cache_dir())
    found["triton cache"] = os.environ.get("TRITON_CACHE_DIR") or str(Path.home() / ".triton" / "cache")
    for name in VARIABLES:
        found[name] = os.environ.get(name) or "not set"
    return found


def _triton() -> str:
    return dispatch.triton_state()[0]


def _runtime() -> str:
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"


def _devices() -> dict[str, str]:
    found = {}
    count = torch.cuda.device_count()
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        arch = tuning.architecture(torch.device("cuda", index))
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        found[f"device {index}"] = f"{properties.name}, {arch}, {memory}"
    if not count:
        found["device"] = f"CPU, {torch.get_num_threads()} threads"
    for dtype in (torch.bfloat16, torch.float32):
        try:
            picked = "{} ({})".format(*dispatch.choose("auto", dtype, "cuda" if count else "cpu"))
        except (RuntimeError, ValueError) as error:
            picked = f"nothing: {error}"
        found[f"auto in {str(dtype).removeprefix('torch.')}"] = picked
    return found
