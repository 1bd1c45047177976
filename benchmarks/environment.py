"""Where and with what a benchmark ran, for its results file."""

import platform
import time
from pathlib import Path

import torch

import monarch_rocm


def environment(device):
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else _processor(),
        "device_type": device,
        "threads": torch.get_num_threads(),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "monarch_rocm": monarch_rocm.__version__,
    }


def _processor():
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()
