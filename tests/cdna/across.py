"""Vector instructions that move values between lanes, and between vector and scalar registers."""

import numpy as np

from cdna.bits import LANES, U32, U64
from cdna.forms import Form


def decode(ins):
    base = Form.split(ins.opcode)[0]
    return FAMILY[base](ins) if base in FAMILY else None


def _first_lane(ins):
    form = Form(ins)

    def run(m, g):
        active = m.registers.active[g]
        lane = np.where(active.any(1), active.argmax(1), 0)
        m.registers.set_scalar(form.out.index, g, form.read(m, g, 0)[np.arange(len(lane)), lane])

    return run


def _read_lane(ins):
    form = Form(ins)

    def run(m, g):
        lane = m.registers.scalar(form.sources[1], g) & U32(63)
        m.registers.set_scalar(form.out.index, g, form.read(m, g, 0)[np.arange(len(lane)), lane])

    return run


def _write_lane(ins):
    form = Form(ins)

    def run(m, g):
        r = m.registers
        r.waits.check("v", form.out.index, g)
        value, lane = (r.scalar(source, g) for source in form.sources)
        r.vector_file[form.out.index][np.arange(r.waves)[g], lane & U32(63)] = value

    return run


def _swap_rows(size):
    """Odd rows of the first operand change places with even rows of the second."""

    def decode_swap(ins):
        one, two = ins.operands
        odd = (LANES // size) % 2 == 1

        def run(m, g):
            a, b = m.registers.lanes(one, g).copy(), m.registers.lanes(two, g).copy()
            m.registers.set_lanes(one.index, g, np.where(odd, np.roll(b, size, 1), a))
            m.registers.set_lanes(two.index, g, np.where(odd, b, np.roll(a, -size, 1)))

        return run

    return decode_swap


def _count_below(first):
    """How many ones of a mask's 32 bits from `first` on belong to lower lanes, and a sum."""
    ones = (U64(1) << np.clip(LANES - first, 0, 32).astype(U64)) - U64(1)

    def decode_count(ins):
        form = Form(ins)

        def run(m, g):
            mask, more = form.read_all(m, g)
            form.write(m, g, np.bitwise_count(mask & ones.astype(U32)).astype(U32) + more)

        return run

    return decode_count


FAMILY = {
    "v_readfirstlane_b32": _first_lane,
    "v_readlane_b32": _read_lane,
    "v_writelane_b32": _write_lane,
    "v_permlane16_swap_b32": _swap_rows(16),
    "v_permlane32_swap_b32": _swap_rows(32),
    "v_mbcnt_lo_u32_b32": _count_below(0),
    "v_mbcnt_hi_u32_b32": _count_below(32),
}
