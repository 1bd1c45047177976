"""Vector instructions on two numbers at once: pairs of registers, and halves of one."""

import re

import numpy as np

from cdna import bits
from cdna.bits import F32, F64, LOW, U32
from cdna.forms import Form
from cdna.vector import multiply_add

PAIRS = {
    "v_pk_add_f32": lambda a, b: a + b,
    "v_pk_mul_f32": lambda a, b: a * b,
    "v_pk_fma_f32": multiply_add,
}
HALVES = {
    "v_pk_add_f16": lambda a, b: a + b,
    "v_pk_mul_f16": lambda a, b: a * b,
    "v_pk_fma_f16": lambda a, b, c: a.astype(F64) * b + c,
    "v_pk_max_f16": np.fmax,
    "v_pk_min_f16": np.fmin,
}
SHORTS = {
    "v_pk_add_u16": lambda a, b: a + b,
    "v_pk_sub_u16": lambda a, b: a - b,
    "v_pk_sub_i16": lambda a, b: a - b,
    "v_pk_mul_lo_u16": lambda a, b: a * b,
    "v_pk_mad_u16": lambda a, b, c: a * b + c,
    "v_pk_lshlrev_b16": lambda a, b: b << (a & U32(15)),
    "v_pk_lshrrev_b16": lambda a, b: b >> (a & U32(15)),
    "v_pk_max_u16": np.maximum,
    "v_pk_min_u16": np.minimum,
}
# Which half each operand gives to the low result and to the high one, and their signs.
SELECT = ("op_sel", "op_sel_hi", "neg_lo", "neg_hi")


def decode(ins):
    base = Form.split(ins.opcode)[0]
    if base in PAIRS:
        return _pairs(ins, PAIRS[base])
    if base in HALVES or base in SHORTS:
        return _halves(ins, HALVES.get(base), SHORTS.get(base))
    if base == "v_pk_mov_b32":
        return _move_pair(ins)
    return _pack(ins) if re.fullmatch(r"v_pack_b32_f16", base) else None


def _choices(ins):
    count = len(ins.operands) - 1
    get = ins.modifiers.get
    low = zip(get("op_sel", [0] * count), get("neg_lo", [0] * count), strict=True)
    high = zip(get("op_sel_hi", [1] * count), get("neg_hi", [0] * count), strict=True)
    return list(low), list(high)


def _word(m, g, operand, word, ins):
    """One register of a pair."""
    if operand.kind == "constant" and word and operand.value:
        raise ins.unknown("high word of a constant")
    return m.registers.lanes(operand, g, "f32", word)


def _pairs(ins, function):
    form = Form(ins, kind="f32", modifiers=SELECT)
    choices = _choices(ins)

    def run(m, g):
        results = []
        for choice in choices:
            words = [_word(m, g, s, word, ins) for s, (word, _) in zip(form.sources, choice, strict=True)]
            signs = [F32(-1 if negative else 1) for _, negative in choice]
            values = [word.view(F32) * sign for word, sign in zip(words, signs, strict=True)]
            results.append(bits.from_float(function(*values)))
        for word, result in enumerate(results):
            m.registers.set_lanes(form.out.index + word, g, result)

    return run


def _halves(ins, half, short):
    form = Form(ins, kind="f16" if half else "b32", modifiers=SELECT if half else SELECT[:2])
    choices = _choices(ins)

    def run(m, g):
        operands = form.read_all(m, g)
        results = []
        for choice in choices:
            picked = [(x >> U32(16 * high)) & LOW for x, (high, _) in zip(operands, choice, strict=True)]
            if half:
                signs = [U32(0x8000 * negative) for _, negative in choice]
                values = [bits.half(x ^ sign) for x, sign in zip(picked, signs, strict=True)]
                results.append(bits.from_half(half(*values)))
            else:
                results.append(short(*picked) & LOW)
        form.write(m, g, results[0] | (results[1] << U32(16)))

    return run


def _move_pair(ins):
    form = Form(ins, modifiers=SELECT[:2])
    low, high = ins.modifiers.get("op_sel", [0, 0])

    def run(m, g):
        words = [_word(m, g, s, word, ins).copy() for s, word in zip(form.sources, (low, high), strict=True)]
        for word, value in enumerate(words):
            m.registers.set_lanes(form.out.index + word, g, value)

    return run


def _pack(ins):
    form = Form(ins, modifiers=SELECT[:1])
    low, high, _ = ins.modifiers.get("op_sel", [0, 0, 0])

    def run(m, g):
        a, b = form.read_all(m, g, "f16")
        one, two = (a >> U32(16 * low)) & LOW, (b >> U32(16 * high)) & LOW
        form.write(m, g, one | (two << U32(16)))

    return run
