"""Files that are never seen half written, nor read when they are not whole."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


@contextmanager
def written(file: Path) -> Iterator[Path]:
    """A path beside `file` to write to, which becomes `file` once all went well.

    Example:
        >>> with written(Path("numbers.txt")) as draft:  # doctest: +SKIP
        ...     _ = draft.write_text("1 2 3")
    """
    draft = file.with_name(file.name + ".new")
    yield draft
    os.replace(draft, file)


def loaded(file: Path) -> Any:
    """What `torch.save` wrote, on the CPU. Runs nothing that the file holds.

    Raises:
        OSError, ValueError, and what `torch.load` raises: a file that is missing, damaged, or no such file.

    Example:
        >>> loaded(Path("state.pt"))  # doctest: +SKIP
    """
    try:
        with zipfile.ZipFile(file) as parts:  # whose sums torch does not compare
            broken = parts.testzip()
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise ValueError(f"it was not written by torch.save, or is damaged: {error}") from error
    if broken is not None:
        raise ValueError(f"it is damaged, in {broken}")
    return torch.load(file, map_location="cpu", weights_only=True)
