"""Which config a kernel runs with: tables of JSON, one file an architecture and kernel.

A file lists rows under the dtype's size in bytes; the first row whose limits hold is taken, so a
lookup is a pure function of shape and device and all ranks of a job choose alike.
"""

from __future__ import annotations

import json
import os
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]
Table = dict[str, list[Row]]
# What a config of each kernel must have: tile sizes, other numbers, the smallest tile.
PARAMETERS: dict[str, tuple[tuple[str, ...], tuple[str, ...], int]] = {
    "bdmm": (("BT", "BO", "BI"), (), 16),
    "bdmm_wgrad": (("BT", "BO", "BI"), ("PROGRAMS", "MIN_STEPS"), 16),
    "bdmv": (("BT", "BO", "BI"), (), 1),
    "fused": (("BT",), (), 16),
    "interleave": (("BT", "BR", "BC"), (), 1),
}
AMD_OPTIONS = {"waves_per_eu", "matrix_instr_nonkdim", "kpack"}
CONFIGS = Path(__file__).parent / "configs"


def cache_dir() -> Path:
    """Where this user's own configs lie, `<arch>/<kernel>.json`; they go before the shipped ones."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("MONARCH_ROCM_CACHE_DIR") or Path(base) / "monarch-rocm").expanduser()


@cache
def architecture(device: torch.device) -> str:
    """Such as "gfx942" on ROCm, "sm90" on CUDA, "default" elsewhere."""
    if device.type != "cuda":
        return "default"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm{properties.major}{properties.minor}"


@cache
def table(kernel: str, arch: str) -> tuple[Path, Table]:
    """The file that serves `kernel` on `arch`, and its rows."""
    own = cache_dir() / arch / f"{kernel}.json"
    if own.is_file():
        try:
            return own, _read(own, kernel)
        except (OSError, ValueError) as error:
            warnings.warn(f"{own} is ignored: {error}", stacklevel=2)
    return shipped(kernel, arch)


@cache
def shipped(kernel: str, arch: str) -> tuple[Path, Table]:
    """What `table` finds where the user has no file of their own."""
    file = CONFIGS / arch / f"{kernel}.json"
    if not file.is_file():
        file = CONFIGS / "default" / f"{kernel}.json"
    return file, _read(file, kernel)


def _read(file: Path, kernel: str) -> Table:
    rows = json.loads(file.read_text())
    if not isinstance(rows, dict) or set(rows) != {"2", "4"}:
        raise ValueError('it must hold rows under "2" and "4", the bytes of a number')
    for part in rows.values():
        if not isinstance(part, list) or not part or not all(map(_is_row, part)):
            raise ValueError(
                'a row must be {"max": {limit: number}, "config": {parameter: number}, "wins": bool}'
            )
        if part[-1]["max"]:
            raise ValueError("its last row must serve every shape")
        for row in part:
            _check_config(row["config"], kernel)
    return rows


def _is_row(row: object) -> bool:
    return (
        isinstance(row, dict)
        and set(row) == {"max", "config", "wins"}
        and isinstance(row["wins"], bool)
        and all(isinstance(row[part], dict) for part in ("max", "config"))
        and set(row["max"]) <= {"out", "in", "tokens"}
        and all(type(number) is int for part in ("max", "config") for number in row[part].values())
    )


def _check_config(config: dict[str, int], kernel: str) -> None:
    tiles, others, smallest = PARAMETERS[kernel]
    wanted = {*tiles, *others, "num_warps", "num_stages"}
    if not wanted <= set(config) <= wanted | AMD_OPTIONS:
        raise ValueError(f"a config of {kernel} must have {sorted(wanted)}, unlike {config}")
    for name in (*tiles, "num_warps"):
        least = 1 if name == "num_warps" else smallest
        if config[name] < least or config[name] & (config[name] - 1):
            raise ValueError(f"{name} must be a power of two from {least}, unlike {config[name]}")
    if any(config[name] < 1 for name in (*others, "num_stages")):
        raise ValueError(f"numbers must be positive, unlike {config}")


@cache
def _lookup(kernel: str, arch: str, itemsize: int, n_out: int, n_in: int, bucket: int) -> Row:
    return pick(table(kernel, arch)[1], itemsize, n_out, n_in, bucket)


def pick(table: Table, itemsize: int, n_out: int, n_in: int, bucket: int) -> Row:
    """The first row whose limits hold."""
    asked = {"out": n_out, "in": n_in, "tokens": bucket}
    for row in table[str(itemsize)]:
        if all(asked[name] <= limit for name, limit in row["max"].items()):
            return row
    raise LookupError(f"no config for {asked}")


def bucket(tokens: int) -> int:
    """Tokens count by the next power of two, so that few configs are ever compiled."""
    return 1 << max(0, tokens - 1).bit_length()


def lookup(kernel: str, device: torch.device, dtype: torch.dtype, n_out: int, n_in: int, tokens: int) -> Row:
    """The row for blocks of `(n_out, n_in)` and that many tokens: launch parameters under "config",
    and under "wins" whether they were faster than PyTorch's own products when that was measured.
    """
    return _lookup(kernel, architecture(device), dtype.itemsize, n_out, n_in, bucket(tokens))


def is_wide(*tensors: torch.Tensor) -> bool:
    """Whether an offset into one of the tensors can pass 2**31."""
    for tensor in tensors:
        # No view reaches past its storage, so that most need no look at their strides.
        if tensor.untyped_storage().nbytes() >= 2**31:
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            if sum((size - 1) * stride for size, stride in steps) >= 2**31:
                return True
    return False


def interprets() -> bool:
    """Whether the kernels were decorated for Triton's interpreter."""
    from monarch_rocm.kernels import bdmm

    return type(bdmm.bdmm_kernel).__name__ == "InterpretedFunction"
