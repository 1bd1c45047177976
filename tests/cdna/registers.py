"""The registers of all waves, read and written by decoded operands.

`g` selects waves: a slice where all take part, else an array of their numbers. Values are arrays
`(waves, 64)` for vector operands and `(waves,)` for scalar ones.
"""

import numpy as np

from cdna.assembly import EXEC, M0, VCC
from cdna.bits import I16, I32, LOW, U32, EmulationError, join, lanes_of, mask_of, split
from cdna.waits import Waits

# NaN as float32 and as both halves, so that what no instruction has written shows.
UNWRITTEN = 0xFFC0FFC0


class Registers:
    def __init__(self, waves):
        self.vector_file = np.full((512, waves, 64), UNWRITTEN, U32)
        self.scalar_file = np.full((128, waves), UNWRITTEN, U32)
        self.scalar_file[VCC : VCC + 2] = 0
        self.scalar_file[EXEC : EXEC + 2] = 0xFFFFFFFF
        self.condition = np.zeros(waves, bool)
        self.active = np.ones((waves, 64), bool)
        self.all_active = True  # in the waves of the instruction that runs
        self.waits = Waits(waves)
        self.waves = waves

    def count(self, g):
        return self.waves if isinstance(g, slice) else len(g)

    # vector operands

    def lanes(self, operand, g, kind="b32", word=0):
        """An operand of a vector instruction, the register `word` places further on."""
        shape = (self.count(g), 64)
        if operand.kind == "constant":
            bits = operand.bits(kind) >> (32 * word) & 0xFFFFFFFF
            x = np.full((1, 1), bits, U32)
        elif operand.kind == "v":
            self.waits.check("v", operand.index + word, g)
            x = self.vector_file[operand.index + word][g]
        elif operand.kind == "s":
            self.waits.check("s", operand.index + word, g)
            x = self.scalar_file[operand.index + word][g][:, None]
        else:
            raise EmulationError(f"unknown operand: {operand.text}")
        sign = 0x8000 if kind == "f16" else 0x80000000
        if (operand.absolute or operand.negate) and kind not in ("f16", "f32"):
            raise EmulationError(f"a sign on {kind}: {operand.text}")
        if operand.absolute:
            x = x & U32(~sign & 0xFFFFFFFF)
        if operand.negate:
            x = x ^ U32(sign)
        return np.broadcast_to(x, shape)

    def lanes64(self, operand, g):
        return join(self.lanes(operand, g, "b64", 0), self.lanes(operand, g, "b64", 1))

    def set_lanes(self, index, g, value, everywhere=False):
        """Write a vector register in the active lanes, or `everywhere`."""
        self.waits.check("v", index, g)
        if self.all_active or everywhere:
            self.vector_file[index][g] = value
        else:
            self.vector_file[index][g] = np.where(self.active[g], value, self.vector_file[index][g])

    def set_lanes64(self, index, g, value):
        for word, part in enumerate(split(value)):
            self.set_lanes(index + word, g, part)

    # scalar operands

    def scalar(self, operand, g, word=0):
        if operand.kind == "s":
            self.waits.check("s", operand.index + word, g)
            return self.scalar_file[operand.index + word][g]
        if operand.text == "scc":
            return self.condition[g].astype(U32)
        return np.full(self.count(g), operand.bits("b64") >> (32 * word) & 0xFFFFFFFF, U32)

    def scalar64(self, operand, g):
        return join(self.scalar(operand, g, 0), self.scalar(operand, g, 1))

    def set_scalar(self, index, g, value):
        self.waits.check("s", index, g)
        self.scalar_file[index][g] = value
        if index in (EXEC, EXEC + 1):
            self.active[g] = lanes_of(self.exec_mask(g))

    def set_scalar64(self, index, g, value):
        for word, part in enumerate(split(value)):
            self.set_scalar(index + word, g, part)

    def m0(self, g):
        return self.scalar_file[M0][g]

    def exec_mask(self, g):
        return join(self.scalar_file[EXEC][g], self.scalar_file[EXEC + 1][g])

    def set_mask(self, operand, g, lanes):
        """Write a mask of lanes, zero where they are not active."""
        self.set_scalar64(operand.index, g, mask_of(lanes & self.active[g]))

    # what a load brings

    def load_lanes(self, index, g, value, half, counter):
        """Write a register when the load that `counter` counts comes back; `half` is what it fills."""
        if half is not None:
            # The other half stays, and may itself be on its way.
            old = self.vector_file[index][g]
            value = (old & ~LOW) | value if half == 0 else (old & LOW) | (value << U32(16))
        self.vector_file[index][g] = np.where(self.active[g], value, self.vector_file[index][g])
        self.waits.expect("v", index, g, counter)


def narrow(value, kind):
    """What a load of fewer than 32 bits puts into the register."""
    if kind == "i16":
        return value.astype(I16).astype(I32).view(U32)
    if kind == "i8":
        return value.astype(np.int8).astype(I32).view(U32)
    return value
