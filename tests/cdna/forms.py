"""The encodings of vector instructions: how operands are read and a result is written.

SDWA takes bytes or words of its operands, DPP takes its first operand from another lane of the row.
"""

import re

import numpy as np

from cdna import bits
from cdna.bits import LANES, U32

SELECTIONS = {"DWORD": (0, 32), "WORD_0": (0, 16), "WORD_1": (16, 16)}
SELECTIONS |= {f"BYTE_{i}": (8 * i, 8) for i in range(4)}
MODIFIERS = {
    "sdwa": ("dst_sel", "dst_unused", "src0_sel", "src1_sel"),
    "dpp": (
        *("quad_perm", "row_shl", "row_shr", "row_ror", "row_mirror", "row_half_mirror"),
        *("row_newbcast", "row_bcast", "row_mask", "bank_mask", "bound_ctrl"),
    ),
}


def moved_lanes(ins):
    """Which lane each lane reads, and whether that lane is one of its row."""
    modifiers, lane = ins.modifiers, LANES
    row, inside = lane & ~15, np.ones(64, bool)
    if "quad_perm" in modifiers:
        return (lane & ~3) | np.array(modifiers["quad_perm"])[lane & 3], inside
    if "row_shl" in modifiers:
        return lane + modifiers["row_shl"], (lane & 15) + modifiers["row_shl"] < 16
    if "row_shr" in modifiers:
        return lane - modifiers["row_shr"], (lane & 15) >= modifiers["row_shr"]
    if "row_ror" in modifiers:
        return row | ((lane - modifiers["row_ror"]) & 15), inside
    if "row_mirror" in modifiers:
        return row | (15 - (lane & 15)), inside
    if "row_half_mirror" in modifiers:
        return (lane & ~7) | (7 - (lane & 7)), inside
    if "row_newbcast" in modifiers:
        return row | modifiers["row_newbcast"], inside
    if modifiers.get("row_bcast") == 15:
        return row - 1, lane >= 16
    if modifiers.get("row_bcast") == 31:
        return np.full(64, 31), lane >= 32
    raise ins.unknown("move of lanes")


class Form:
    """The operands of one vector instruction, `outputs` of which come before its sources."""

    def __init__(self, ins, outputs=1, kind="b32", modifiers=()):
        self.ins, self.kind = ins, kind
        self.out, self.sources = ins.operands[0], ins.operands[outputs:]
        self.base, self.encoding = self.split(ins.opcode)
        ins.allow(*MODIFIERS.get(self.encoding, ()), *modifiers)
        if self.encoding == "dpp":
            lane, inside = moved_lanes(ins)
            self.lane, self.inside = np.clip(lane, 0, 63), inside
            rows, banks = ins.modifiers.get("row_mask", 15), ins.modifiers.get("bank_mask", 15)
            self.enabled = ((rows >> (LANES >> 4)) & (banks >> ((LANES >> 2) & 3)) & 1) == 1

    @staticmethod
    def split(opcode):
        """(name, encoding)."""
        found = re.fullmatch(r"(.*)_(e32|e64|sdwa|dpp)", opcode)
        return (found[1], found[2]) if found else (opcode, "")

    def read_all(self, m, g, kind=None):
        return [self.read(m, g, i, kind) for i in range(len(self.sources))]

    def read(self, m, g, i, kind=None):
        x = m.registers.lanes(self.sources[i], g, kind or self.kind)
        if self.encoding == "sdwa" and i < 2:
            return self._selected(x, i)
        if self.encoding == "dpp" and i == 0:
            x = x[:, self.lane]
            return np.where(self._valid(m, g), x, U32(0)) if "bound_ctrl" in self.ins.modifiers else x
        return x

    def write(self, m, g, value):
        old = m.registers.vector_file[self.out.index]
        if self.encoding == "sdwa":
            value = self._placed(value, lambda: m.registers.lanes(self.out, g))
        if self.encoding == "dpp":
            written = self.enabled
            if "bound_ctrl" not in self.ins.modifiers:
                written = written & self._valid(m, g)
            value = np.where(written, value, old[g])
        m.registers.set_lanes(self.out.index, g, value)

    def _valid(self, m, g):
        """Lanes whose source lies in their row and is active."""
        return self.inside & m.registers.active[g][:, self.lane]

    def _selected(self, x, i):
        source = self.sources[i]
        offset, width = SELECTIONS[self.ins.modifiers.get(f"src{i}_sel", "DWORD")]
        if width == 32:
            return x
        if source.negate or source.absolute:
            raise self.ins.unknown("sign of a part")
        x = (x >> U32(offset)) & U32((1 << width) - 1)
        return bits.sign_extended(x, width) if source.extend else x

    def _placed(self, value, old):
        offset, width = SELECTIONS[self.ins.modifiers.get("dst_sel", "DWORD")]
        if width == 32:
            return value
        mask = U32(((1 << width) - 1) << offset)
        placed = (value << U32(offset)) & mask
        unused = self.ins.modifiers.get("dst_unused")
        if unused == "UNUSED_PAD":
            return placed
        if unused == "UNUSED_PRESERVE":
            return placed | (old() & ~mask)
        raise self.ins.unknown("use of the rest")
