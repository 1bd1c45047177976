"""Matrix instructions: one product of two small matrices, spread over the lanes of a wave.

For `v_mfma_f32_MxNxK`, with K split over the 64/M groups of M lanes:

* A: lane `l` holds row `l % M`, and of its columns the `K*M/64` from `l // M * K*M/64` on;
* B: the same of column `l % N` and the rows;
* C and D: lane `l` holds column `l % N`, and in its register `k` row `4*(l//16) + k` where M is 16,
  `8*(k//4) + 4*(l//32) + k%4` where M is 32.

All lanes take part, active or not.
"""

import re

import numpy as np

from cdna import bits
from cdna.bits import F32, LANES, U32

ELEMENTS = {
    "f32": lambda x: [x.view(F32)],
    "f16": lambda x: [bits.half(x).astype(F32), bits.half(x >> U32(16)).astype(F32)],
    "bf16": lambda x: [bits.bfloat(x), (x & U32(0xFFFF0000)).view(F32)],
}


def rows_of(size, register):
    """Which row of the result each lane holds in that register."""
    if size == 16:
        return 4 * (LANES // 16) + register
    return 8 * (register // 4) + 4 * (LANES // 32) + register % 4


def decode(ins):
    found = re.fullmatch(r"v_mfma_f32_(16|32)x\1x(\d+)_?(bf16|f16|f32)(_1k)?", ins.opcode)
    if not found:
        raise ins.unknown()
    ins.allow()
    size, depth, kind = int(found[1]), int(found[2]), found[3]
    out, a, b, c = ins.operands
    per_lane = depth * size // 64
    registers = size * size // 64
    if a.count * len(ELEMENTS[kind](np.zeros(1, U32))) != per_lane or out.count != registers:
        raise ins.unknown("layout")  # such as several blocks in one instruction

    def matrix(m, g, operand):
        words = (m.registers.lanes(operand, g, word=word) for word in range(operand.count))
        values = np.stack([value for word in words for value in ELEMENTS[kind](word)], -1)
        grouped = values.reshape(-1, 64 // size, size, per_lane)
        return grouped.transpose(0, 2, 1, 3).reshape(-1, size, depth)

    def run(m, g):
        r = m.registers
        product = matrix(m, g, a) @ matrix(m, g, b).transpose(0, 2, 1)
        added = [r.lanes(c, g, "f32", k if c.kind == "v" else 0).view(F32).copy() for k in range(registers)]
        for k in range(registers):
            value = product[:, rows_of(size, k), LANES % size] + added[k]
            r.set_lanes(out.index + k, g, bits.from_float(value), everywhere=True)

    return run
