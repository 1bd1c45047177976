"""Which config a kernel runs with: tables of JSON, one file an architecture and kernel.

A file lists rows under the dtype's size in bytes; the first row that serves the shape is taken, the
user's file before the shipped one, so that a lookup is a pure function of shape, device and files,
and all ranks of a job choose alike.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
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
    "chained": (("BT", "BO", "BI"), ("PROGRAMS",), 16),
    "fused": (("BT",), (), 16),
    "interleave": (("BT", "BR", "BC"), (), 1),
}
FEW = 16  # tokens up to which a stage may run on the kernel made for generation, all of them at once
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


# Compute units of a chiplet (XCD) of each architecture whose GPUs have several, and how many chiplets
# the largest of those GPUs has. The others have one L2 for all programs.
CHIPLETS = {"gfx942": (38, 8), "gfx950": (32, 8)}


def chiplets(device: torch.device) -> int:
    """How many L2 caches the programs of a launch are dealt out over, for `order.on_chiplet`."""
    arch = architecture(device)
    return _chiplets(arch, device) if arch in CHIPLETS else 1


@cache
def _chiplets(arch: str, device: torch.device) -> int:
    units, most = CHIPLETS[arch]
    if device.type != "cuda":  # code that is made without the GPU
        return most
    # MI300A has fewer, and a partition of a GPU is a device with some of its chiplets.
    return max(1, torch.cuda.get_device_properties(device).multi_processor_count // units)


@cache
def table(kernel: str, arch: str) -> tuple[Path, Table]:
    """The shipped file that serves `kernel` on `arch`, and its rows."""
    shipped = CONFIGS / arch / f"{kernel}.json"
    if not shipped.is_file():
        shipped = CONFIGS / "default" / f"{kernel}.json"
    rows = read(shipped, kernel)
    if any(not part or part[-1].get("max") != {} for part in rows.values()):
        raise ValueError(f"the last rows of {shipped} must serve every shape")
    return shipped, rows


def own_file(kernel: str, arch: str) -> Path:
    """Where the user's own rows of `kernel` on `arch` lie, if there are any."""
    return cache_dir() / arch / f"{kernel}.json"


_ignored: set[Path] = set()


@cache
def own_table(kernel: str, arch: str) -> tuple[Path, Table]:
    """The user's file and its rows, none where it is missing or broken; a broken one warns once."""
    own = own_file(kernel, arch)
    try:
        return own, read(own, kernel)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError, RecursionError) as error:
        if own not in _ignored:
            _ignored.add(own)
            warnings.warn(f"{own} is ignored: {error}", stacklevel=2)
    return own, {"2": [], "4": []}


def read(file: Path, kernel: str) -> Table:
    """The rows of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no table of `kernel`; which row or value is wrong.
    """
    rows = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(rows, dict) or set(rows) != {"2", "4"}:
        raise ValueError('it must hold rows under "2" and "4", the bytes of a number')
    for part in rows.values():
        if not isinstance(part, list):
            raise ValueError(f"it must hold lists of rows, not {part!r}")
        for row in part:
            check_row(row, kernel)
    return rows


def check_row(row: object, kernel: str) -> None:
    """Raise a ValueError unless `row` is one of a table of `kernel`."""
    if not _is_row(row):
        raise ValueError(
            'a row must be {"max": {limit: number}, "config": {parameter: number}, "wins": bool}, or have '
            f'{{"at": {{"out": number, "in": number, "tokens": number}}}} for "max", unlike {row}'
        )
    config, served = row["config"], row.get("at", row.get("max"))  # type: ignore[index,attr-defined]
    check_config(config, kernel)
    tokens = min(served.get("tokens", FEW), FEW)
    if kernel == "bdmv" and config["BT"] < tokens:
        raise ValueError(
            f"a row of bdmv for up to {tokens} tokens must have a BT of as many, unlike {config}"
        )


def _is_row(row: object) -> bool:
    if not isinstance(row, dict) or len(row) != 3 or not isinstance(row.get("wins"), bool):
        return False
    served: Any = row.get("at", row.get("max"))
    return (
        all(isinstance(part, dict) for part in (served, row.get("config")))
        and set(served) <= {"out", "in", "tokens"}
        and (len(served) == 3 or "max" in row)
        and all(type(number) is int for part in (served, row["config"]) for number in part.values())
    )


def check_config(config: dict[str, int], kernel: str) -> None:
    """Raise a ValueError unless `kernel` can be launched with `config`."""
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


_without: set[str] = set()


@cache
def _lookup(kernel: str, arch: str, itemsize: int, n_out: int, n_in: int, bucket: int) -> Row:
    for _, rows in (own_table(kernel, arch), table(kernel, arch)):
        row = pick(rows, itemsize, n_out, n_in, bucket)
        if row is not None:
            return row | {"wins": False} if kernel in _without else row
    raise LookupError(f"no {kernel} config for ({n_out}, {n_in}) and {bucket} tokens on {arch}")


def pick(rows: Table, itemsize: int, n_out: int, n_in: int, bucket: int) -> Row | None:
    """The first row that serves a shape."""
    asked = {"out": n_out, "in": n_in, "tokens": bucket}
    for row in rows[str(itemsize)]:
        if row.get("at") == asked or (
            "max" in row and all(asked[name] <= limit for name, limit in row["max"].items())
        ):
            return row
    return None


generation = 0  # how often the files may have changed: what was derived from a lookup ages with it


def refresh() -> None:
    """Read the files anew at the next lookup, as after they were written."""
    global generation
    generation += 1
    for cached in (table, own_table, _lookup):
        cached.cache_clear()


@contextmanager
def without(kernel: str) -> Iterator[None]:
    """Let "auto" do without a kernel meanwhile, so that what it runs in its place can be measured."""
    _without.add(kernel)
    refresh()
    try:
        yield
    finally:
        _without.discard(kernel)
        refresh()


def exact(kernel: str, arch: str, itemsize: int, n_out: int, n_in: int, bucket: int) -> Row | None:
    """The row of the user's that was measured at just this shape, None where there is none."""
    at = {"out": n_out, "in": n_in, "tokens": bucket}
    rows = own_table(kernel, arch)[1][str(itemsize)]
    return next((row for row in rows if row.get("at") == at), None)


def file_of(kernel: str, arch: str, config: dict[str, int]) -> Path:
    """The file that a config of `lookup`'s came from."""
    for file, rows in (own_table(kernel, arch), table(kernel, arch)):
        if any(row["config"] is config for part in rows.values() for row in part):
            return file
    raise LookupError(f"{config} is in no file of {kernel} on {arch}")


def bucket_of(tokens: int) -> int:
    """The next power of two, by which tokens count, so that few configs are ever compiled."""
    return 1 << max(0, tokens - 1).bit_length()


def lookup(kernel: str, device: torch.device, dtype: torch.dtype, n_out: int, n_in: int, tokens: int) -> Row:
    """The row for blocks of `(n_out, n_in)` and that many tokens: launch parameters under "config",
    and under "wins" whether they were faster than PyTorch's own products when that was measured.

    Tokens count by bucket.
    """
    return _lookup(kernel, architecture(device), dtype.itemsize, n_out, n_in, bucket_of(tokens))


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
