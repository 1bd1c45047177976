"""The user's own tables, written: by atomic replacement, under locks that processes share."""

from __future__ import annotations

import json
import os
from pathlib import Path

from filelock import BaseFileLock, FileLock

from monarch_rocm.kernels import tuning


def measuring(arch: str) -> BaseFileLock:
    """The lock to hold while launches are timed for `arch`, so that one process at a time does.

    Example:
        >>> with measuring("sm90"):  # doctest: +SKIP
        ...     pass
    """
    folder = tuning.cache_dir() / arch
    folder.mkdir(parents=True, exist_ok=True)
    # An object a use: threads of one process then wait for each other as processes do.
    return FileLock(folder / "measuring.lock")


def save(kernel: str, arch: str, itemsize: int, row: tuning.Row) -> Path:
    """Put a measured row into the user's table of `kernel`, and let lookups see it.

    It replaces the row of the same shape and goes before rows that serve ranges; a file that is
    broken or foreign is replaced whole.

    Args:
        kernel, arch (str): whose table.
        itemsize (int): bytes of a number, 2 or 4.
        row (dict): `{"at": {"out": int, "in": int, "tokens": int}, "config": dict, "wins": bool}`.

    Returns:
        Path: the file, which is never seen half written.

    Raises:
        OSError: it cannot be written there.
        ValueError: the row is none.
    """
    tuning.check_row(row, kernel)
    file = tuning.own_file(kernel, arch)
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_suffix(".lock")):
        try:
            table = tuning.read(file, kernel)
        except (FileNotFoundError, ValueError, RecursionError):
            table = {"2": [], "4": []}
        rows = [each for each in table[str(itemsize)] if each.get("at") != row["at"]]
        measured = sorted([row, *(each for each in rows if "at" in each)], key=_order)
        table[str(itemsize)] = measured + [each for each in rows if "at" not in each]
        whole = file.with_suffix(".new")
        whole.write_text(_text(table), encoding="utf-8")
        os.replace(whole, file)
    tuning.refresh()
    return file


def _order(row: tuning.Row) -> tuple[int, ...]:
    return tuple(row["at"][name] for name in ("tokens", "out", "in"))


def _text(table: tuning.Table) -> str:
    """A row a line, as the shipped tables have."""
    parts = []
    for itemsize, rows in table.items():
        lines = ",\n".join("  " + json.dumps(row) for row in rows)
        parts.append(f' "{itemsize}": [\n{lines}\n ]' if rows else f' "{itemsize}": []')
    return "{\n" + ",\n".join(parts) + "\n}\n"
