"""The step that a process is in, in memory that outlives it: how the end of a killed worker is dated."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import sys

_NUMBER = struct.Struct("q")  # 0 before the first step, then one more than it


class Mark:
    """Written by a worker, at no cost.

    Attributes:
        file (int): its descriptor, by which another process finds it; -1 where that cannot be (no Linux).

    Example:
        >>> import os
        >>> mark = Mark()
        >>> seen = MarkOf(os.getpid(), mark.file)
        >>> seen.step()                                       # none yet
        >>> mark.set(7)
        >>> seen.step()
        7
    """

    def __init__(self) -> None:
        self.file = -1
        if sys.platform == "linux":
            self.file = os.memfd_create("monarch-rocm-step")
            os.ftruncate(self.file, _NUMBER.size)
        self._memory = mmap.mmap(self.file, _NUMBER.size)

    def set(self, step: int) -> None:
        """Enter a step."""
        _NUMBER.pack_into(self._memory, 0, step + 1)


class MarkOf:
    """Reads the mark of a process of this machine, also when it has gone."""

    def __init__(self, pid: int, file: int) -> None:
        self._memory: mmap.mmap | None = None
        with contextlib.suppress(OSError), open(f"/proc/{pid}/fd/{file}", "rb") as found:
            self._memory = mmap.mmap(found.fileno(), _NUMBER.size, prot=mmap.PROT_READ)

    def step(self) -> int | None:
        """The step, None before the first and where it cannot be known (no Linux)."""
        if self._memory is None:
            return None
        (number,) = _NUMBER.unpack_from(self._memory)
        return int(number) - 1 if number else None
