"""Scalar instructions: arithmetic with the condition bit, masks, branches, constants from memory."""

import re

import numpy as np

from cdna import bits
from cdna.assembly import EXEC, VCC
from cdna.bits import I64, LOW, U32, U64, signed

IGNORED = {"s_nop", "s_setprio", "s_sleep", "s_sched_barrier"}
COMPARE = {
    "eq": np.equal,
    "lg": np.not_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
}
BRANCHES = {
    "s_branch": lambda m, g: np.ones(m.registers.count(g), bool),
    "s_cbranch_scc0": lambda m, g: ~m.registers.condition[g],
    "s_cbranch_scc1": lambda m, g: m.registers.condition[g],
    "s_cbranch_execz": lambda m, g: ~m.registers.active[g].any(1),
    "s_cbranch_execnz": lambda m, g: m.registers.active[g].any(1),
    "s_cbranch_vccz": lambda m, g: ~_vcc(m, g),
    "s_cbranch_vccnz": lambda m, g: _vcc(m, g),
}
LOADS = {"s_load_dword": 1, "s_load_dwordx2": 2, "s_load_dwordx4": 4}
LOADS |= {"s_load_dwordx8": 8, "s_load_dwordx16": 16}


def _vcc(m, g):
    return (m.registers.scalar_file[VCC][g] | m.registers.scalar_file[VCC + 1][g]) != 0


def _nonzero(function):
    """A result, and whether it is not zero."""

    def both(*operands):
        result = function(*operands)
        return result, result != 0

    return both


def _plain(function):
    """A result that leaves the condition bit alone."""
    return lambda *operands: (function(*operands), None)


def _add_signed(a, b):
    result = a + b
    return result, ((~(a ^ b) & (a ^ result)) >> U32(31)) == 1


def _subtract_signed(a, b):
    result = a - b
    return result, (((a ^ b) & (a ^ result)) >> U32(31)) == 1


def _shift(x, amount, how):
    amount = amount & U32(31)
    if how == "left":
        return x << amount
    return x >> amount if how == "right" else (signed(x) >> signed(amount)).view(U32)


def _shift64(x, amount, how):
    amount = (amount & U32(63)).astype(U64)
    if how == "left":
        return x << amount
    return x >> amount if how == "right" else (signed(x) >> signed(amount)).view(U64)


def _field64(x, control, how):
    """Bits from `control`'s low six on, as many as its bits 16 to 22 say, with a sign where so."""
    offset, width = (control & U32(63)).astype(U64), ((control >> U32(16)) & U32(127)).astype(U64)
    width = np.minimum(width, U64(64) - offset)
    up, down = U64(64) - offset - width, (U64(64) - width) & U64(63)
    found = x << (up & U64(63))
    found = (signed(found) >> signed(down)).view(U64) if how == "signed" else found >> down
    return np.where(width == 0, U64(0), found)


def _lesser(a, b):
    return np.minimum(a, b), a < b


def _greater(a, b):
    return np.maximum(a, b), a > b


def _as_signed(function):
    def call(a, b):
        result, condition = function(signed(a), signed(b))
        return result.view(U32), condition

    return call


def _bit_mask(width, offset):
    return ((U32(1) << (width & U32(31))) - U32(1)) << (offset & U32(31))


def _shift_and_add(n):
    def call(a, b):
        exact = (a.astype(U64) << U64(n)) + b
        return exact.astype(U32), exact >> U64(32) != 0

    return call


# Operands of 32 bits, to (result, condition bit or None).
BINARY = {
    "s_add_i32": _add_signed,
    "s_sub_i32": _subtract_signed,
    "s_add_u32": lambda a, b: (a + b, (a + b) < a),
    "s_sub_u32": lambda a, b: (a - b, b > a),
    "s_mul_i32": _plain(lambda a, b: a * b),
    "s_mul_hi_u32": _plain(bits.high_product),
    "s_mul_hi_i32": _plain(bits.high_product_signed),
    "s_and_b32": _nonzero(lambda a, b: a & b),
    "s_or_b32": _nonzero(lambda a, b: a | b),
    "s_xor_b32": _nonzero(lambda a, b: a ^ b),
    "s_andn2_b32": _nonzero(lambda a, b: a & ~b),
    "s_orn2_b32": _nonzero(lambda a, b: a | ~b),
    "s_lshl_b32": _nonzero(lambda a, b: _shift(a, b, "left")),
    "s_lshr_b32": _nonzero(lambda a, b: _shift(a, b, "right")),
    "s_ashr_i32": _nonzero(lambda a, b: _shift(a, b, "arithmetic")),
    "s_min_u32": _lesser,
    "s_max_u32": _greater,
    "s_min_i32": _as_signed(_lesser),
    "s_max_i32": _as_signed(_greater),
    "s_bfe_u32": _nonzero(lambda a, b: bits.field(a, b & U32(31), (b >> U32(16)) & U32(127))),
    "s_bfe_i32": _nonzero(lambda a, b: bits.field_signed(a, b & U32(31), (b >> U32(16)) & U32(127))),
    "s_bfm_b32": _plain(_bit_mask),
    "s_pack_ll_b32_b16": _plain(lambda a, b: (a & LOW) | (b << U32(16))),
    "s_pack_lh_b32_b16": _plain(lambda a, b: (a & LOW) | (b & ~LOW)),
    "s_pack_hh_b32_b16": _plain(lambda a, b: (a >> U32(16)) | (b & ~LOW)),
}
BINARY |= {f"s_lshl{n}_add_u32": _shift_and_add(n) for n in (1, 2, 3, 4)}
BINARY64 = {
    "s_and_b64": lambda a, b: a & b,
    "s_or_b64": lambda a, b: a | b,
    "s_xor_b64": lambda a, b: a ^ b,
    "s_andn2_b64": lambda a, b: a & ~b,
    "s_orn2_b64": lambda a, b: a | ~b,
    "s_nand_b64": lambda a, b: ~(a & b),
    "s_nor_b64": lambda a, b: ~(a | b),
    "s_xnor_b64": lambda a, b: ~(a ^ b),
}
SHIFTS64 = {"s_lshl_b64": "left", "s_lshr_b64": "right", "s_ashr_i64": "arithmetic"}
FIELDS64 = {"s_bfe_i64": "signed", "s_bfe_u64": "unsigned"}
UNARY = {
    "s_mov_b32": _plain(lambda a: a),
    "s_brev_b32": _plain(bits.reversed_bits),
    "s_not_b32": _nonzero(lambda a: ~a),
    "s_abs_i32": _nonzero(lambda a: np.abs(signed(a)).view(U32)),
    "s_sext_i32_i8": _plain(lambda a: bits.sign_extended(a, 8)),
    "s_sext_i32_i16": _plain(lambda a: bits.sign_extended(a, 16)),
    "s_ff1_i32_b32": _plain(bits.first_low),
    "s_flbit_i32_b32": _plain(bits.first_high),
    "s_bcnt1_i32_b32": _nonzero(lambda a: np.bitwise_count(a).astype(U32)),
}
SAVE = {  # of the mask given and the old exec mask
    "s_and_saveexec_b64": lambda mask, old: mask & old,
    "s_or_saveexec_b64": lambda mask, old: mask | old,
    "s_xor_saveexec_b64": lambda mask, old: mask ^ old,
    "s_andn2_saveexec_b64": lambda mask, old: mask & ~old,
}


def _short(operand):
    """A 16-bit constant, which is signed."""
    value = operand.bits() & 0xFFFF if operand.value >= 0 else operand.value
    return U32((value - 0x10000 if value >= 0x8000 else value) & 0xFFFFFFFF)


def decode(ins):
    """The function `(machine, waves)` that executes a scalar instruction."""
    op, operands = ins.opcode, ins.operands
    if op == "s_waitcnt":
        return _wait(ins)
    if op in LOADS:
        return _load(ins)
    ins.allow()
    if op in IGNORED:
        return lambda m, g: None
    if op == "s_endpgm":
        return lambda m, g: m.finish(g)
    if op == "s_barrier":
        return lambda m, g: m.arrive(g)
    if op in BRANCHES:
        return _branch(BRANCHES[op], operands[0].text)
    if op in UNARY:
        return _compute(UNARY[op], operands[0], operands[1:])
    if op in BINARY:
        return _compute(BINARY[op], operands[0], operands[1:])
    if op in BINARY64 or op in SHIFTS64 or op in FIELDS64:
        return _binary64(op, *operands)
    if op in SAVE:
        return _save(SAVE[op], *operands)
    if found := re.fullmatch(r"s_cmp(k?)_(\w\w)_([iu])(32|64)", op):
        return _compare(found, *operands)
    if op in OTHERS:
        return OTHERS[op](*operands)
    raise ins.unknown()


def _compute(function, out, sources):
    def run(m, g):
        result, condition = function(*(m.registers.scalar(source, g) for source in sources))
        m.registers.set_scalar(out.index, g, result)
        if condition is not None:
            m.registers.condition[g] = condition

    return run


def _binary64(op, out, one, two):
    def run(m, g):
        r = m.registers
        a = r.scalar64(one, g)
        if op in SHIFTS64:
            result = _shift64(a, r.scalar(two, g), SHIFTS64[op])
        elif op in FIELDS64:
            result = _field64(a, r.scalar(two, g), FIELDS64[op])
        else:
            result = BINARY64[op](a, r.scalar64(two, g))
        r.set_scalar64(out.index, g, result)
        r.condition[g] = result != 0

    return run


def _set_bit(one):
    """The bit of the destination with that number, set or cleared; the condition stays."""

    def make(out, number):
        def run(m, g):
            bit = U32(1) << (m.registers.scalar(number, g) & U32(31))
            old = m.registers.scalar(out, g)
            m.registers.set_scalar(out.index, g, old | bit if one else old & ~bit)

        return run

    return make


def _save(function, out, mask):
    def run(m, g):
        old, given = m.registers.exec_mask(g), m.registers.scalar64(mask, g)
        new = function(given, old)
        m.registers.set_scalar64(out.index, g, old)
        m.registers.set_scalar64(EXEC, g, new)
        m.registers.condition[g] = new != 0

    return run


def _compare(found, one, two):
    short, relation, sign, width = found.groups()

    def run(m, g):
        r = m.registers
        if width == "64":
            a, b = r.scalar64(one, g), r.scalar64(two, g)
        else:
            a, b = r.scalar(one, g), r.scalar(two, g)
            if short and sign == "i":
                b = np.full_like(a, _short(two))
        r.condition[g] = COMPARE[relation](*((signed(a), signed(b)) if sign == "i" else (a, b)))

    return run


def _branch(taken, label):
    def run(m, g):
        m.counter[g] = np.where(taken(m, g), m.program.labels[label], m.counter[g])

    return run


def _wait(ins):
    ins.allow("vmcnt", "lgkmcnt", "expcnt")

    def run(m, g):
        for counter in ("vmcnt", "lgkmcnt"):
            if counter in ins.modifiers:
                m.registers.waits.wait(counter, ins.modifiers[counter], g)

    return run


def _load(ins):
    ins.allow("glc")
    out, base, offset = ins.operands

    def run(m, g):
        r = m.registers
        address = r.scalar64(base, g) + r.scalar(offset, g).astype(U64)
        words = m.heap.constants(address, LOADS[ins.opcode], ins.text)
        r.waits.issue("lgkmcnt", g, constant=True)
        for k, word in enumerate(words):
            r.set_scalar(out.index + k, g, word)
            r.waits.expect("s", out.index + k, g, "lgkmcnt")

    return run


def _move64(out, source):
    return lambda m, g: m.registers.set_scalar64(out.index, g, m.registers.scalar64(source, g))


def _not64(out, source):
    def run(m, g):
        result = ~m.registers.scalar64(source, g)
        m.registers.set_scalar64(out.index, g, result)
        m.registers.condition[g] = result != 0

    return run


def _count64(out, source):
    def run(m, g):
        result = np.bitwise_count(m.registers.scalar64(source, g)).astype(U32)
        m.registers.set_scalar(out.index, g, result)
        m.registers.condition[g] = result != 0

    return run


def _carry(sign):
    def decode_carry(out, one, two):
        def run(m, g):
            r = m.registers
            a, b = r.scalar(one, g).astype(I64), r.scalar(two, g).astype(I64)
            exact = a + sign * (b + r.condition[g])
            r.set_scalar(out.index, g, exact.astype(U32))
            r.condition[g] = (exact >> 32) != 0

        return run

    return decode_carry


def _short_move(out, constant):
    return lambda m, g: m.registers.set_scalar(out.index, g, _short(constant))


def _short_add(out, constant):
    def run(m, g):
        a = m.registers.scalar(out, g)
        result, overflow = _add_signed(a, np.full_like(a, _short(constant)))
        m.registers.set_scalar(out.index, g, result)
        m.registers.condition[g] = overflow

    return run


def _short_multiply(out, constant):
    return lambda m, g: m.registers.set_scalar(out.index, g, m.registers.scalar(out, g) * _short(constant))


def _select(out, one, two):
    def run(m, g):
        r = m.registers
        r.set_scalar(out.index, g, np.where(r.condition[g], r.scalar(one, g), r.scalar(two, g)))

    return run


def _select64(out, one, two):
    def run(m, g):
        r = m.registers
        r.set_scalar64(out.index, g, np.where(r.condition[g], r.scalar64(one, g), r.scalar64(two, g)))

    return run


def _conditional_move(out, source):
    return _select(out, source, out)


def _test_bit(wanted):
    def decode_test(source, position):
        def run(m, g):
            bit = (m.registers.scalar(source, g) >> (m.registers.scalar(position, g) & U32(31))) & U32(1)
            m.registers.condition[g] = bit == wanted

        return run

    return decode_test


OTHERS = {
    "s_bitset0_b32": _set_bit(False),
    "s_bitset1_b32": _set_bit(True),
    "s_mov_b64": _move64,
    "s_not_b64": _not64,
    "s_bcnt1_i32_b64": _count64,
    "s_addc_u32": _carry(1),
    "s_subb_u32": _carry(-1),
    "s_movk_i32": _short_move,
    "s_addk_i32": _short_add,
    "s_mulk_i32": _short_multiply,
    "s_cselect_b32": _select,
    "s_cselect_b64": _select64,
    "s_cmov_b32": _conditional_move,
    "s_bitcmp0_b32": _test_bit(0),
    "s_bitcmp1_b32": _test_bit(1),
}
