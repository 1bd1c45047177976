"""The local memory of each workgroup, and who touched it since the last barrier.

A race is a write and another wave's access with no barrier between them; two waves that write the same
value to one place are not one, since Triton lets lanes that hold the same number all write it.
"""

import numpy as np

from cdna.bits import I64, U16, U32, EmulationError

NOBODY, SEVERAL = -1, -2
FILL = 0xFF  # NaN in every float format, so that what no wave has written shows


class Lds:
    def __init__(self, machine, workgroups, size, unit):
        """`size` bytes for each workgroup, followed in pieces of `unit`, the smallest access."""
        self.machine, self.size, self.unit = machine, size, unit
        self.bytes = np.full((workgroups, -(-max(size, 4) // 4) * 4), FILL, np.uint8)
        self.pieces = self.bytes.view({1: np.uint8, 2: U16, 4: U32}[unit])
        shape = self.pieces.shape
        self.epoch = np.zeros(workgroups, I64)  # barriers passed
        self.writer = np.full(shape, NOBODY, np.int32)
        self.written = np.full(shape, -1, I64)  # in which epoch
        self.reader = np.full(shape, NOBODY, np.int32)
        self.read = np.full(shape, -1, I64)
        # The last reader and its number of that read, which another wave's write must not overtake.
        self.last_reader = np.zeros(shape, np.int32)
        self.read_number = np.zeros(shape, I64)
        # When the write has arrived: a number of the writer's, counted by vmcnt for a copy from memory.
        self.arrival = np.zeros(shape, I64)
        self.copied = np.zeros(shape, bool)

    def _where(self, g, address, live, size, what):
        """Workgroups, pieces and waves of an access, each `(accesses, pieces)`."""
        if (live & ((address < 0) | (address + size > self.size))).any():
            raise EmulationError(f"outside the LDS of the workgroup: {what}")
        if (live & (address % min(size, 4) != 0)).any():
            raise EmulationError(f"misaligned in LDS: {what}")
        waves = np.broadcast_to(np.arange(self.machine.waves)[g][:, None], live.shape)[live]
        pieces = address[live][:, None] // self.unit + np.arange(size // self.unit)
        return self.machine.workgroup[waves][:, None], pieces, waves[:, None]

    def _late(self, group, piece, wave):
        """Where a write has been issued of which it is not known that it has arrived."""
        writer = np.maximum(self.writer[group, piece], 0)
        waits, copied = self.machine.registers.waits, self.copied[group, piece]
        known = np.where(copied, waits.known["vmcnt"][writer], waits.known["lgkmcnt"][writer])
        # A wave's own accesses come in order, but for copies, which it must have waited for.
        own = np.where(copied, waits.done["vmcnt"][writer], np.inf)
        return self.arrival[group, piece] > np.where(writer == wave, own, known)

    def _unread(self, group, piece, wave):
        """Where another wave had not waited for its read when it came to the barrier."""
        reader = self.last_reader[group, piece]
        known = self.machine.registers.waits.known["lgkmcnt"][reader]
        return (reader != wave) & (self.read_number[group, piece] > known)

    def load(self, g, address, live, size, what):
        """The words at each lane's address, zero where a lane takes no part; lgkmcnt has counted the read."""
        out = np.zeros((max(1, size // 4), *live.shape), U32)
        if live.any():
            group, piece, wave = self._where(g, address, live, size, what)
            epoch = self.epoch[group]
            if ((self.written[group, piece] == epoch) & (self.writer[group, piece] != wave)).any():
                raise EmulationError(f"LDS race, a read of what another wave wrote, no barrier: {what}")
            if self._late(group, piece, wave).any():
                raise EmulationError(f"LDS read before the write was waited for: {what}")
            self._mark_read(group, piece, wave, epoch)
            out[:, live] = self._words(self.pieces[group, piece])
        return list(out)

    def _words(self, pieces):
        if self.unit == 4:
            return pieces.T
        if pieces.shape[1] * self.unit < 4:
            shifts = 8 * self.unit * np.arange(pieces.shape[1], dtype=U32)
            return (pieces.astype(U32) << shifts).sum(1, dtype=U32)[None]
        return np.ascontiguousarray(pieces).view(U32).T

    def _mark_read(self, group, piece, wave, epoch):
        other = (self.read[group, piece] == epoch) & (self.reader[group, piece] != wave)
        wave = np.broadcast_to(wave, piece.shape)
        self.reader[group, piece] = np.where(other, SEVERAL, wave)
        self.read[group, piece] = epoch
        self.last_reader[group, piece] = wave
        self.read_number[group, piece] = self.machine.registers.waits.issued["lgkmcnt"][wave]
        # Waves of this very access may share a piece, of which the line above kept one.
        lost = (self.reader[group, piece] != wave) & (self.reader[group, piece] != SEVERAL)
        shared_group = np.broadcast_to(group, piece.shape)[lost]
        self.reader[shared_group, piece[lost]] = SEVERAL

    def store(self, g, address, live, words, size, what, counter):
        """Write each lane's words; `counter` has counted the operation."""
        if not live.any():
            return
        group, piece, wave = self._where(g, address, live, size, what)
        epoch = self.epoch[group]
        if ((self.read[group, piece] == epoch) & (self.reader[group, piece] != wave)).any():
            raise EmulationError(f"LDS race, a write to what another wave read, no barrier: {what}")
        if self._unread(group, piece, wave).any():
            raise EmulationError(f"LDS write while another wave's read is not waited for: {what}")
        if (self.copied[group, piece] & self._late(group, piece, wave)).any():
            raise EmulationError(f"LDS write over a copy that was not waited for: {what}")
        data = np.stack([np.broadcast_to(word, live.shape)[live] for word in words], 1)
        if size < 4:
            data = data & U32((1 << 8 * size) - 1)
        new = np.ascontiguousarray(data).view(self.pieces.dtype)[:, : size // self.unit]
        clash = (self.written[group, piece] == epoch) & (self.writer[group, piece] != wave)
        differs = (clash & (self.pieces[group, piece] != new)).any()
        self.pieces[group, piece] = new
        if differs or (self.pieces[group, piece] != new).any():
            raise EmulationError(f"LDS race, two lanes write different values to one place: {what}")
        self.writer[group, piece] = wave
        self.written[group, piece] = epoch
        self.arrival[group, piece] = self.machine.registers.waits.issued[counter][wave]
        self.copied[group, piece] = counter == "vmcnt"
