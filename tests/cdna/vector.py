"""Vector instructions that treat each lane alone; `packed` and `across` hold the others.

`decode` returns the function `(machine, waves)` that executes an instruction.
"""

import dataclasses
import re

import numpy as np

from cdna import bits
from cdna.bits import F16, F32, F64, I16, I32, I64, LOW, U16, U32, U64, EmulationError, signed
from cdna.forms import Form


def _shift(amount, width=32):
    return amount & U32(width - 1)


def _shift_arithmetic16(amount, x):
    return (signed(bits.sign_extended(x, 16)) >> signed(_shift(amount, 16))).view(U32) & LOW


def _low24(x):
    return x & U32(0xFFFFFF)


def _signed24(x):
    return signed(x << U32(8)) >> 8


def _permute(a, b, selector):
    """Each byte of the result is one of the eight bytes of `a` and `b`, a sign of them, or constant."""
    both = bits.join(b, a)
    out = np.zeros_like(selector)
    for i in range(4):
        select = (selector >> U32(8 * i)) & U32(255)
        byte = (both >> ((select & U32(7)).astype(U64) * U64(8))).astype(U32) & U32(255)
        # 8 to 11 repeat the sign of bytes 1, 3, 5, 7
        sign = (both >> (U64(16) * ((select - U32(8)) & U32(3)).astype(U64) + U64(15))).astype(U32) & U32(1)
        choices = [select < 8, select < 12, select == 12]
        out |= np.select(choices, [byte, sign * U32(255), U32(0)], U32(255)).astype(U32) << U32(8 * i)
    return out


def _aligned(step, limit):
    def call(a, b, c):
        return (bits.join(b, a) >> ((c & U32(limit)).astype(U64) * U64(step))).astype(U32)

    return call


def _bit_operation(a, b, c, table):
    out = np.zeros_like(a)
    for row in range(8):
        if table >> row & 1:
            out |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return out


def _to_unsigned(x):
    return np.where(np.isnan(x), 0, np.clip(np.trunc(x.astype(F64)), 0, 2**32 - 1)).astype(U32)


def _to_signed(x):
    whole = np.where(np.isnan(x), 0, np.clip(np.trunc(x.astype(F64)), -(2**31), 2**31 - 1))
    return whole.astype(I32).view(U32)


def _minimum_signed(a, b):
    return np.minimum(signed(a), signed(b)).view(U32)


def _maximum_signed(a, b):
    return np.maximum(signed(a), signed(b)).view(U32)


def multiply_add(a, b, c):
    """A product and a sum with one rounding, but for a last bit once in 2**29."""
    return (a.astype(F64) * b.astype(F64) + c.astype(F64)).astype(F32)


def _precise(function):
    return lambda x: function(x.astype(F64)).astype(F32)


INTEGER = {
    "v_mov_b32": lambda a: a,
    "v_accvgpr_read_b32": lambda a: a,
    "v_accvgpr_write_b32": lambda a: a,
    "v_accvgpr_mov_b32": lambda a: a,
    "v_not_b32": lambda a: ~a,
    "v_bfrev_b32": bits.reversed_bits,
    "v_ffbh_u32": bits.first_high,
    "v_ffbl_b32": bits.first_low,
    "v_bcnt_u32_b32": lambda a, b: np.bitwise_count(a).astype(U32) + b,
    "v_add_u32": lambda a, b: a + b,
    "v_sub_u32": lambda a, b: a - b,
    "v_subrev_u32": lambda a, b: b - a,
    "v_add_i32": lambda a, b: a + b,
    "v_sub_i32": lambda a, b: a - b,
    "v_mul_lo_u32": lambda a, b: a * b,
    "v_mul_hi_u32": bits.high_product,
    "v_mul_hi_i32": bits.high_product_signed,
    "v_mul_u32_u24": lambda a, b: _low24(a) * _low24(b),
    "v_mul_hi_u32_u24": lambda a, b: bits.high_product(_low24(a), _low24(b)),
    "v_mul_i32_i24": lambda a, b: (_signed24(a) * _signed24(b)).view(U32),
    "v_mad_u32_u24": lambda a, b, c: _low24(a) * _low24(b) + c,
    "v_mad_i32_i24": lambda a, b, c: (_signed24(a) * _signed24(b)).view(U32) + c,
    "v_and_b32": lambda a, b: a & b,
    "v_or_b32": lambda a, b: a | b,
    "v_xor_b32": lambda a, b: a ^ b,
    "v_xnor_b32": lambda a, b: ~(a ^ b),
    "v_lshlrev_b32": lambda a, b: b << _shift(a),
    "v_lshrrev_b32": lambda a, b: b >> _shift(a),
    "v_ashrrev_i32": lambda a, b: (signed(b) >> signed(_shift(a))).view(U32),
    "v_min_u32": np.minimum,
    "v_max_u32": np.maximum,
    "v_min_i32": _minimum_signed,
    "v_max_i32": _maximum_signed,
    "v_min3_u32": lambda a, b, c: np.minimum(np.minimum(a, b), c),
    "v_max3_u32": lambda a, b, c: np.maximum(np.maximum(a, b), c),
    "v_min3_i32": lambda a, b, c: _minimum_signed(_minimum_signed(a, b), c),
    "v_max3_i32": lambda a, b, c: _maximum_signed(_maximum_signed(a, b), c),
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_lshl_add_u32": lambda a, b, c: (a << _shift(b)) + c,
    "v_add_lshl_u32": lambda a, b, c: (a + b) << _shift(c),
    "v_lshl_or_b32": lambda a, b, c: (a << _shift(b)) | c,
    "v_and_or_b32": lambda a, b, c: (a & b) | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_bfe_u32": lambda a, b, c: bits.field(a, _shift(b), _shift(c)),
    "v_bfe_i32": lambda a, b, c: bits.field_signed(a, _shift(b), _shift(c)),
    "v_bfi_b32": lambda a, b, c: (a & b) | (~a & c),
    "v_bfm_b32": lambda a, b: ((U32(1) << _shift(a)) - U32(1)) << _shift(b),
    "v_perm_b32": _permute,
    "v_alignbit_b32": _aligned(1, 31),
    "v_alignbyte_b32": _aligned(8, 3),
    "v_cvt_f32_u32": lambda a: bits.from_float(a.astype(F32)),
    "v_cvt_f32_i32": lambda a: bits.from_float(signed(a).astype(F32)),
    "v_cvt_f32_bf16": lambda a: a << U32(16),
    "v_cvt_f32_f16": lambda a: bits.from_float(bits.half(a)),
    # 16 bits in, 16 bits out, and zeros above
    "v_lshlrev_b16": lambda a, b: (b << _shift(a, 16)) & LOW,
    "v_lshrrev_b16": lambda a, b: (b & LOW) >> _shift(a, 16),
    "v_ashrrev_i16": _shift_arithmetic16,
    "v_add_u16": lambda a, b: (a + b) & LOW,
    "v_sub_u16": lambda a, b: (a - b) & LOW,
    "v_subrev_u16": lambda a, b: (b - a) & LOW,
    "v_mad_legacy_u16": lambda a, b, c: (a * b + c) & LOW,
    "v_mul_lo_u16": lambda a, b: (a * b) & LOW,
}
INTEGER |= {
    f"v_cvt_f32_ubyte{i}": lambda a, i=i: bits.from_float(((a >> U32(8 * i)) & U32(255)).astype(F32))
    for i in range(4)
}
FLOAT = {
    "v_add_f32": lambda a, b: a + b,
    "v_sub_f32": lambda a, b: a - b,
    "v_subrev_f32": lambda a, b: b - a,
    "v_mul_f32": lambda a, b: a * b,
    "v_max_f32": np.fmax,
    "v_min_f32": np.fmin,
    "v_max3_f32": lambda a, b, c: np.fmax(np.fmax(a, b), c),
    "v_min3_f32": lambda a, b, c: np.fmin(np.fmin(a, b), c),
    "v_med3_f32": lambda a, b, c: np.fmax(np.fmin(a, b), np.fmin(np.fmax(a, b), c)),
    "v_fma_f32": multiply_add,
    "v_fmamk_f32": multiply_add,
    "v_fmaak_f32": multiply_add,
    "v_rcp_f32": _precise(np.reciprocal),
    "v_rcp_iflag_f32": _precise(np.reciprocal),
    "v_rsq_f32": _precise(lambda x: 1 / np.sqrt(x)),
    "v_sqrt_f32": _precise(np.sqrt),
    "v_exp_f32": _precise(np.exp2),
    "v_log_f32": _precise(np.log2),
    "v_rndne_f32": np.rint,
    "v_floor_f32": np.floor,
    "v_ceil_f32": np.ceil,
    "v_trunc_f32": np.trunc,
    "v_fract_f32": lambda a: a - np.floor(a),
}
HALF = {
    "v_add_f16": lambda a, b: a + b,
    "v_sub_f16": lambda a, b: a - b,
    "v_mul_f16": lambda a, b: a * b,
    "v_max_f16": np.fmax,
    "v_min_f16": np.fmin,
    "v_fma_f16": lambda a, b, c: a.astype(F64) * b + c,
}
# Float in, bits out.
CONVERT = {
    "v_cvt_u32_f32": _to_unsigned,
    "v_cvt_i32_f32": _to_signed,
    "v_cvt_f16_f32": bits.from_half,
    "v_cvt_pk_bf16_f32": lambda a, b: bits.from_bfloat(a) | (bits.from_bfloat(b) << U32(16)),
    "v_cvt_pk_f16_f32": lambda a, b: bits.from_half(a) | (bits.from_half(b) << U32(16)),
    "v_cvt_pkrtz_f16_f32": lambda a, b: (
        bits.from_half_toward_zero(a) | (bits.from_half_toward_zero(b) << U32(16))
    ),
}
COMPARE = {
    "f": lambda a, b: np.zeros(a.shape, bool),
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "ne": np.not_equal,
    "lg": lambda a, b: (a < b) | (a > b),
    "neq": lambda a, b: ~(a == b),
    "nlt": lambda a, b: ~(a < b),
    "nle": lambda a, b: ~(a <= b),
    "ngt": lambda a, b: ~(a > b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
}
TYPES = {
    ("f", "16"): F16,
    ("f", "32"): F32,
    ("i", "16"): I16,
    ("u", "16"): U16,
    ("i", "32"): I32,
    ("u", "32"): U32,
    ("i", "64"): I64,
    ("u", "64"): U64,
}
CARRIES = {  # sign of the second operand and of the carry, whether the operands change places
    "v_add_co_u32": (1, False),
    "v_addc_co_u32": (1, False),
    "v_sub_co_u32": (-1, False),
    "v_subb_co_u32": (-1, False),
    "v_subrev_co_u32": (-1, True),
    "v_subbrev_co_u32": (-1, True),
}


def decode(ins):
    base = Form.split(ins.opcode)[0]
    if base in INTEGER:
        return _integer(ins, INTEGER[base])
    if base in FLOAT:
        return _float(ins, FLOAT[base])
    if base in HALF:
        return _half(ins, HALF[base])
    if base in CONVERT:
        return _convert(ins, CONVERT[base])
    if base in CARRIES:
        return _with_carry(ins, *CARRIES[base])
    if found := re.fullmatch(r"v_cmp(x?)_(\w+?)_([fiu])(16|32|64)", base):
        return _compare(ins, *found.groups())
    return OTHERS[base](ins) if base in OTHERS else None


def _integer(ins, function):
    form = Form(ins)
    return lambda m, g: form.write(m, g, function(*form.read_all(m, g)))


def _float(ins, function):
    form = Form(ins, kind="f32", modifiers=("clamp", "mul", "div"))

    def run(m, g):
        result = function(*(x.view(F32) for x in form.read_all(m, g)))
        result = result * F32(ins.modifiers.get("mul", 1)) / F32(ins.modifiers.get("div", 1))
        if "clamp" in ins.modifiers:
            result = np.clip(result, F32(0), F32(1))
        form.write(m, g, bits.from_float(result))

    return run


def _half(ins, function):
    form = Form(ins, kind="f16")
    return lambda m, g: form.write(
        m, g, bits.from_half(function(*(bits.half(x) for x in form.read_all(m, g))))
    )


def _convert(ins, function):
    form = Form(ins, kind="f32")
    return lambda m, g: form.write(m, g, function(*(x.view(F32) for x in form.read_all(m, g))))


def _accumulate(ins):
    form = Form(ins, kind="f32")

    def run(m, g):
        a, b = (x.view(F32) for x in form.read_all(m, g))
        old = m.registers.lanes(form.out, g).view(F32)
        form.write(m, g, bits.from_float(multiply_add(a, b, old)))

    return run


def _with_carry(ins, sign, reverse):
    form = Form(ins, outputs=2)
    carry = ins.operands[1]

    def run(m, g):
        r = m.registers
        a, b = (form.read(m, g, i).astype(I64) for i in (0, 1))
        if reverse:
            a, b = b, a
        given = bits.lanes_of(r.scalar64(form.sources[2], g)) if len(form.sources) == 3 else 0
        exact = a + sign * (b + given)
        form.write(m, g, exact.astype(U32))
        r.set_mask(carry, g, (exact >> 32) != 0)

    return run


def _compare(ins, to_exec, relation, kind, width):
    form = Form(ins, kind=f"f{width}" if kind == "f" else "b32")
    dtype = TYPES.get((kind, width))
    if dtype is None or relation not in COMPARE or to_exec:
        raise ins.unknown()

    def run(m, g):
        if width == "64":
            a, b = (m.registers.lanes64(source, g) for source in form.sources)
        else:
            a, b = form.read_all(m, g)
        if width == "16":
            a, b = (a & LOW).astype(U16), (b & LOW).astype(U16)
        m.registers.set_mask(form.out, g, COMPARE[relation](a.view(dtype), b.view(dtype)))

    return run


def _conditional(ins):
    form = Form(ins, kind="f32")

    def run(m, g):
        chosen = bits.lanes_of(m.registers.scalar64(form.sources[2], g))
        form.write(m, g, np.where(chosen, form.read(m, g, 1), form.read(m, g, 0)))

    return run


def _scale_exponent(ins):
    form = Form(ins)

    def run(m, g):
        x, exponent = form.read(m, g, 0, "f32").view(F32), signed(form.read(m, g, 1))
        form.write(m, g, bits.from_float(np.ldexp(x, np.clip(exponent, -300, 300))))

    return run


def _table(ins):
    form = Form(ins, modifiers=("bitop3",))
    return lambda m, g: form.write(m, g, _bit_operation(*form.read_all(m, g), ins.modifiers["bitop3"]))


def _table16(ins):
    """Like other instructions that may take either half, it keeps the half that it does not write."""
    form = Form(ins, modifiers=("bitop3",))

    def run(m, g):
        result = _bit_operation(*form.read_all(m, g), ins.modifiers["bitop3"])
        form.write(m, g, (m.registers.lanes(form.out, g) & ~LOW) | (result & LOW))

    return run


def _mixed_multiply_add(ins):
    """Each operand is a float32 or, where `op_sel_hi` says so, a half of its register."""
    form = Form(ins, modifiers=("op_sel", "op_sel_hi"))
    high = ins.modifiers.get("op_sel", [0, 0, 0])
    is_half = ins.modifiers.get("op_sel_hi", [0, 0, 0])

    def operand(m, g, i):
        source = form.sources[i]
        if not is_half[i]:
            return form.read(m, g, i, "f32").view(F32)
        plain = dataclasses.replace(source, negate=False, absolute=False)
        x = m.registers.lanes(plain, g, "f16")
        value = bits.half(x >> U32(16 * high[i])).astype(F32)
        value = np.abs(value) if source.absolute else value
        return -value if source.negate else value

    def run(m, g):
        form.write(m, g, bits.from_float(multiply_add(*(operand(m, g, i) for i in range(3)))))

    return run


def _shift64(how):
    def decode_shift(ins):
        form = Form(ins)

        def run(m, g):
            amount = (form.read(m, g, 0) & U32(63)).astype(U64)
            x = m.registers.lanes64(form.sources[1], g)
            if how == "left":
                result = x << amount
            else:
                result = x >> amount if how == "right" else (signed(x) >> signed(amount)).view(U64)
            m.registers.set_lanes64(form.out.index, g, result)

        return run

    return decode_shift


def _shift_add64(ins):
    form = Form(ins)

    def run(m, g):
        r, (a, amount, b) = m.registers, form.sources
        shifted = r.lanes64(a, g) << (r.lanes(amount, g) & U32(7)).astype(U64)
        r.set_lanes64(form.out.index, g, shifted + r.lanes64(b, g))

    return run


def _move64(ins):
    form = Form(ins)
    return lambda m, g: m.registers.set_lanes64(form.out.index, g, m.registers.lanes64(form.sources[0], g))


def _multiply_add64(ins):
    form = Form(ins, outputs=2)

    def run(m, g):
        r = m.registers
        product = form.read(m, g, 0).astype(U64) * form.read(m, g, 1)
        result = product + r.lanes64(form.sources[2], g)
        r.set_lanes64(form.out.index, g, result)
        r.set_mask(ins.operands[1], g, result < product)

    return run


def _multiply_add_signed64(ins):
    form = Form(ins, outputs=2)

    def run(m, g):
        r = m.registers
        product = (signed(form.read(m, g, 0)).astype(I64) * signed(form.read(m, g, 1))).view(U64)
        c = r.lanes64(form.sources[2], g)
        result = product + c
        r.set_lanes64(form.out.index, g, result)
        r.set_mask(ins.operands[1], g, signed(~(product ^ c) & (product ^ result)) < 0)

    return run


def _division_scale(ins):
    """Scaling is for quotients that leave the normal range, which is refused."""
    form = Form(ins, outputs=2, kind="f32")

    def run(m, g):
        exponents = [(x >> U32(23)) & U32(255) for x in form.read_all(m, g)[1:]]
        if any(((e < 64) | (e > 190))[m.registers.active[g]].any() for e in exponents):
            raise EmulationError(f"a division far from 1 is not modelled: {ins.text}")
        form.write(m, g, form.read(m, g, 0))
        m.registers.set_scalar64(ins.operands[1].index, g, np.zeros(m.registers.count(g), U64))

    return run


def _division_end(ins):
    """The quotient of the last two operands; what came before has only approached it."""
    form = Form(ins, kind="f32")

    def run(m, g):
        _, denominator, numerator = (x.view(F32).astype(F64) for x in form.read_all(m, g))
        form.write(m, g, bits.from_float((numerator / denominator).astype(F32)))

    return run


OTHERS = {
    "v_fmac_f32": _accumulate,
    "v_cndmask_b32": _conditional,
    "v_ldexp_f32": _scale_exponent,
    "v_bitop3_b32": _table,
    "v_bitop3_b16": _table16,
    "v_fma_mix_f32": _mixed_multiply_add,
    "v_lshlrev_b64": _shift64("left"),
    "v_lshrrev_b64": _shift64("right"),
    "v_ashrrev_i64": _shift64("arithmetic"),
    "v_lshl_add_u64": _shift_add64,
    "v_mov_b64": _move64,
    "v_mad_u64_u32": _multiply_add64,
    "v_mad_i64_i32": _multiply_add_signed64,
    "v_div_scale_f32": _division_scale,
    "v_div_fmas_f32": lambda ins: _float(ins, multiply_add),
    "v_div_fixup_f32": _division_end,
}
