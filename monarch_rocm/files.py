"""Files that are never seen half written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
