"""The memory of a launch: its tensors, with red zones between them, and the kernel's arguments.

A tensor's numbers may be touched and nothing else: neither what lies between tensors nor, where a
tensor is a view, what its storage holds besides. What one workgroup writes no other may touch, and
what one of its waves writes the others may read after a barrier. Only what may be touched takes memory.
"""

import numpy as np

from cdna.bits import I64, U16, U32, U64, EmulationError

BASE = 0x7F0000000000
RED_ZONE = 4096
ARGUMENT_SPACE = 4096


class Heap:
    """Addresses are arrays `(waves, 64)`, `live` says which lanes take part."""

    def __init__(self, storages):
        """Make room for the storages, which are arrays of bytes; `allow` copies what tensors hold."""
        self.storages, self.held = storages, []
        self.starts, end = [], RED_ZONE
        for storage in storages:
            self.starts.append(end)
            end += -(-len(storage) // RED_ZONE) * RED_ZONE + RED_ZONE
        self.arguments_start = end
        self.bytes = np.zeros(end + ARGUMENT_SPACE, np.uint8)
        self.halves, self.words = self.bytes.view(U16), self.bytes.view(U32)
        self.allowed = np.zeros(len(self.halves), bool)
        self.writer = np.zeros(len(self.halves), np.int32)  # the last wave's number plus one
        self.written = np.zeros(len(self.halves), np.int32)  # after how many of its workgroup's barriers

    def allow(self, storage, where):
        """Let the program touch the half-words of a storage that have these numbers, an array or a slice."""
        there = self._place(storage, where)
        self.allowed[there] = True
        self.halves[there] = self.storages[storage].view(U16)[where]
        self.held.append((storage, where))

    def give_back(self):
        """Write what the program may have written into the storages."""
        for storage, where in self.held:
            self.storages[storage].view(U16)[where] = self.halves[self._place(storage, where)]

    def _place(self, storage, where):
        first = self.starts[storage] // 2
        if isinstance(where, slice):
            return slice(first + where.start, first + where.stop)
        return first + where

    def address(self, storage, offset):
        return BASE + self.starts[storage] + offset

    def contents(self, storage, size):
        return self.bytes[self.starts[storage] : self.starts[storage] + size]

    def set_arguments(self, data):
        if len(data) > ARGUMENT_SPACE:
            raise EmulationError("too many arguments")
        start = self.arguments_start
        self.bytes[start : start + len(data)] = np.frombuffer(data, np.uint8)
        return BASE + start

    def constants(self, address, count, what):
        """Words of the kernel's arguments, at addresses `(waves,)`."""
        offset = (address - U64(BASE)).astype(I64)
        if (offset < self.arguments_start).any() or (offset + 4 * count > len(self.bytes)).any():
            raise EmulationError(f"constants outside the arguments: {what}")
        return [self.words[offset // 4 + k] for k in range(count)]

    def offsets(self, address, live, size, wave, barriers, waves_per_group, reads, what):
        """Where in the heap the live lanes' `size` bytes lie, once they are known to be good.

        `wave` and `barriers`, which its workgroup has passed, are of each wave, `(waves, 1)`.
        """
        offset = address - U64(BASE)
        # HSA lets the hardware take words at any even address, which the compiler makes use of.
        bad = live & ((offset >= U64(self.arguments_start)) | ((offset & U64(1)) != 0))
        inside = np.where(live & ~bad, offset, U64(0)).astype(I64)
        for k in range(0, size, 2):
            bad |= live & ~self.allowed[(inside + k) // 2]
        if bad.any():
            wave, lane = np.argwhere(bad)[0]
            raise EmulationError(
                f"memory outside the tensors, or misaligned: {what} in lane {lane} of wave {wave} at heap "
                f"offset {int(offset[wave, lane].astype(I64)):#x}"
            )
        for k in range(0, size, 2):
            writer = self.writer[(inside + k) // 2] - 1
            other = live & (writer >= 0) & (writer != wave)
            if (other & (writer // waves_per_group != wave // waves_per_group)).any():
                raise EmulationError(f"memory that another workgroup wrote: {what}")
            if reads and (other & (self.written[(inside + k) // 2] == barriers)).any():
                raise EmulationError(f"memory that another wave wrote, no barrier: {what}")
        return inside

    def load(self, offset, live, size):
        """The words that `size` bytes fill, zero where a lane takes no part."""
        if size == 2:
            return [np.where(live, self.halves[offset // 2], 0).astype(U32)]
        if (offset % 4).any():
            parts = [self.halves[offset // 2 + k].astype(U32) for k in range(size // 2)]
            words = [low | (high << U32(16)) for low, high in zip(parts[::2], parts[1::2], strict=True)]
        else:
            words = [self.words[offset // 4 + k] for k in range(size // 4)]
        return [np.where(live, word, U32(0)) for word in words]

    def store(self, offset, live, words, size, wave, barriers, waves_per_group, what):
        where = offset[live]
        owner, passed = (np.broadcast_to(each, live.shape)[live] for each in (wave, barriers))
        for k in range(0, size, 2):
            there = (where + k) // 2
            self.writer[there], self.written[there] = owner + 1, passed
            if ((self.writer[there] - 1) // waves_per_group != owner // waves_per_group).any():
                raise EmulationError(f"memory that another workgroup writes: {what}")
        if size == 2:
            self.halves[where // 2] = words[0][live].astype(U16)
            return
        for k, word in enumerate(words):
            self.halves[where // 2 + 2 * k] = word[live].astype(U16)
            self.halves[where // 2 + 2 * k + 1] = (word[live] >> U32(16)).astype(U16)
