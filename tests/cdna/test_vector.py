"""Vector instructions, lane by lane, against Python's integers and numpy's floats."""

import struct

import numpy as np
import pytest

from cdna import vector as family
from cdna.bits import EmulationError
from cdna.snippet import edges, floats, run, scalar64, vector

M32, M64 = 2**32 - 1, 2**64 - 1


def signed(x, bits=32):
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def field(x, offset, width, sign=False):
    offset, width = offset & 31, width & 31
    value = x >> offset & ((1 << width) - 1)
    return signed(value, width) if sign and width else value


def permute(a, b, selector):
    bytes_ = list(struct.pack("<II", b, a))
    out = 0
    for i in range(4):
        select = selector >> (8 * i) & 255
        if select < 8:
            byte = bytes_[select]
        elif select < 12:
            byte = 255 * (bytes_[2 * (select - 8) + 1] >> 7)
        else:
            byte = 0 if select == 12 else 255
        out |= byte << (8 * i)
    return out


def float_bits(x):
    return int(np.float32(x).view(np.uint32))


def half_value(x):
    return np.uint16(x & 0xFFFF).view(np.float16)


INTEGER = {
    "v_mov_b32": lambda a: a,
    "v_accvgpr_read_b32": lambda a: a,
    "v_accvgpr_write_b32": lambda a: a,
    "v_accvgpr_mov_b32": lambda a: a,
    "v_not_b32": lambda a: ~a,
    "v_bfrev_b32": lambda a: int(f"{a:032b}"[::-1], 2),
    "v_ffbh_u32": lambda a: 32 - a.bit_length() if a else -1,
    "v_ffbl_b32": lambda a: (a & -a).bit_length() - 1,
    "v_bcnt_u32_b32": lambda a, b: a.bit_count() + b,
    "v_add_u32": lambda a, b: a + b,
    "v_sub_u32": lambda a, b: a - b,
    "v_subrev_u32": lambda a, b: b - a,
    "v_add_i32": lambda a, b: a + b,
    "v_sub_i32": lambda a, b: a - b,
    "v_mul_lo_u32": lambda a, b: a * b,
    "v_mul_hi_u32": lambda a, b: a * b >> 32,
    "v_mul_hi_i32": lambda a, b: signed(a) * signed(b) >> 32,
    "v_mul_u32_u24": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "v_mul_hi_u32_u24": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 32,
    "v_mul_i32_i24": lambda a, b: signed(a, 24) * signed(b, 24),
    "v_mad_u32_u24": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c,
    "v_mad_i32_i24": lambda a, b, c: signed(a, 24) * signed(b, 24) + c,
    "v_and_b32": lambda a, b: a & b,
    "v_or_b32": lambda a, b: a | b,
    "v_xor_b32": lambda a, b: a ^ b,
    "v_xnor_b32": lambda a, b: ~(a ^ b),
    "v_lshlrev_b32": lambda a, b: b << (a & 31),
    "v_lshrrev_b32": lambda a, b: b >> (a & 31),
    "v_ashrrev_i32": lambda a, b: signed(b) >> (a & 31),
    "v_min_u32": lambda a, b: min(a, b),
    "v_max_u32": lambda a, b: max(a, b),
    "v_min_i32": lambda a, b: min(signed(a), signed(b)),
    "v_max_i32": lambda a, b: max(signed(a), signed(b)),
    "v_min3_u32": lambda a, b, c: min(a, b, c),
    "v_max3_u32": lambda a, b, c: max(a, b, c),
    "v_min3_i32": lambda a, b, c: min(map(signed, (a, b, c))),
    "v_max3_i32": lambda a, b, c: max(map(signed, (a, b, c))),
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_lshl_add_u32": lambda a, b, c: (a << (b & 31)) + c,
    "v_add_lshl_u32": lambda a, b, c: (a + b & M32) << (c & 31),
    "v_lshl_or_b32": lambda a, b, c: a << (b & 31) | c,
    "v_and_or_b32": lambda a, b, c: a & b | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_bfe_u32": lambda a, b, c: field(a, b, c),
    "v_bfe_i32": lambda a, b, c: field(a, b, c, sign=True),
    "v_bfi_b32": lambda a, b, c: a & b | ~a & c,
    "v_bfm_b32": lambda a, b: ((1 << (a & 31)) - 1) << (b & 31),
    "v_perm_b32": permute,
    "v_alignbit_b32": lambda a, b, c: (a << 32 | b) >> (c & 31),
    "v_alignbyte_b32": lambda a, b, c: (a << 32 | b) >> (8 * (c & 3)),
    "v_cvt_f32_u32": lambda a: float_bits(a),
    "v_cvt_f32_i32": lambda a: float_bits(signed(a)),
    "v_cvt_f32_bf16": lambda a: a << 16,
    "v_cvt_f32_f16": lambda a: float_bits(half_value(a)),
    "v_cvt_f32_ubyte0": lambda a: float_bits(a & 255),
    "v_cvt_f32_ubyte1": lambda a: float_bits(a >> 8 & 255),
    "v_cvt_f32_ubyte2": lambda a: float_bits(a >> 16 & 255),
    "v_cvt_f32_ubyte3": lambda a: float_bits(a >> 24),
    "v_lshlrev_b16": lambda a, b: b << (a & 15) & 0xFFFF,
    "v_lshrrev_b16": lambda a, b: (b & 0xFFFF) >> (a & 15),
    "v_ashrrev_i16": lambda a, b: signed(b, 16) >> (a & 15) & 0xFFFF,
    "v_add_u16": lambda a, b: a + b & 0xFFFF,
    "v_sub_u16": lambda a, b: a - b & 0xFFFF,
    "v_subrev_u16": lambda a, b: b - a & 0xFFFF,
    "v_mad_legacy_u16": lambda a, b, c: a * b + c & 0xFFFF,
    "v_mul_lo_u16": lambda a, b: a * b & 0xFFFF,
}
FLOAT = {
    "v_add_f32": lambda a, b: a + b,
    "v_sub_f32": lambda a, b: a - b,
    "v_subrev_f32": lambda a, b: b - a,
    "v_mul_f32": lambda a, b: a * b,
    "v_max_f32": lambda a, b: np.fmax(a, b),
    "v_min_f32": lambda a, b: np.fmin(a, b),
    "v_max3_f32": lambda a, b, c: np.fmax(a, np.fmax(b, c)),
    "v_min3_f32": lambda a, b, c: np.fmin(a, np.fmin(b, c)),
    "v_fma_f32": lambda a, b, c: a * b + c,
    "v_fmamk_f32": lambda a, b, c: a * b + c,
    "v_fmaak_f32": lambda a, b, c: a * b + c,
    "v_rcp_f32": lambda a: 1 / a,
    "v_rcp_iflag_f32": lambda a: 1 / a,
    "v_rsq_f32": lambda a: 1 / np.sqrt(a),
    "v_sqrt_f32": lambda a: np.sqrt(a),
    "v_exp_f32": lambda a: np.exp2(a),
    "v_log_f32": lambda a: np.log2(a),
    "v_rndne_f32": lambda a: np.rint(a),
    "v_floor_f32": lambda a: np.floor(a),
    "v_ceil_f32": lambda a: np.ceil(a),
    "v_trunc_f32": lambda a: np.trunc(a),
    "v_fract_f32": lambda a: a - np.floor(a),
}


def test_every_opcode_of_the_tables_is_tested():
    assert set(INTEGER) == set(family.INTEGER)
    assert {*FLOAT, "v_med3_f32"} == set(family.FLOAT)


@pytest.mark.parametrize("op", INTEGER)
def test_integers(op):
    count = INTEGER[op].__code__.co_argcount
    operands = [edges(seed) for seed in range(count)]
    m = run(f"{op} v9, " + ", ".join(f"v{i}" for i in range(count)), vectors=dict(enumerate(operands)))
    lanes = zip(*(operand.tolist() for operand in operands), strict=True)
    assert vector(m, 9).tolist() == [INTEGER[op](*lane) & M32 for lane in lanes]


@pytest.mark.parametrize("op", FLOAT)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_floats(op):
    """In float64 and then rounded once, which is what one operation must give."""
    count = FLOAT[op].__code__.co_argcount
    operands = [floats(seed) for seed in range(count)]
    m = run(f"{op} v9, " + ", ".join(f"v{i}" for i in range(count)), vectors=dict(enumerate(operands)))
    expected = FLOAT[op](*(x.astype(np.float64) for x in operands)).astype(np.float32)
    np.testing.assert_array_equal(vector(m, 9, np.float32), expected)


def test_the_middle_of_three():
    a, b, c = (np.random.default_rng(i).standard_normal(64).astype(np.float32) for i in range(3))
    m = run("v_med3_f32 v9, v0, v1, v2", vectors={0: a, 1: b, 2: c})
    np.testing.assert_array_equal(vector(m, 9, np.float32), np.median([a, b, c], axis=0))


def test_signs_clamps_and_multipliers():
    a, b = (np.random.default_rng(i).standard_normal(64).astype(np.float32) for i in range(2))
    for text, expected in {
        "v_add_f32_e64 v9, -v0, |v1|": np.abs(b) - a,
        "v_mul_f32_e64 v9, -|v0|, v1 clamp": np.clip(-np.abs(a) * b, 0, 1),
        "v_add_f32_e64 v9, v0, v1 mul:4": (a + b) * 4,
        "v_mul_f32_e64 v9, v0, v1 div:2": a * b / 2,
        "v_add_f32_e32 v9, -4.0, v0": a - 4,
        "v_mul_f32_e32 v9, 0x40490fdb, v0": a * np.float32(np.pi),
    }.items():
        m = run(text, vectors={0: a, 1: b})
        np.testing.assert_array_equal(vector(m, 9, np.float32), expected, err_msg=text)


def test_accumulation_rounds_once():
    a, b, c = (np.random.default_rng(i).standard_normal(64).astype(np.float32) for i in range(3))
    exact = a.astype(np.float64) * b + c
    m = run("v_fmac_f32_e32 v2, v0, v1", vectors={0: a, 1: b, 2: c})
    np.testing.assert_array_equal(vector(m, 2, np.float32), exact.astype(np.float32))


ROUNDED = {  # float32 -> bfloat16: halfway cases go to the even neighbour
    0x3F808000: 0x3F80,
    0x3F818000: 0x3F82,
    0x3F808001: 0x3F81,
    0x3F807FFF: 0x3F80,
    0x7F7FFFFF: 0x7F80,
    0x7F800000: 0x7F80,
    0xFF800000: 0xFF80,
    0x80000000: 0x8000,
    0x00000001: 0x0000,
}


def test_bfloat16_is_rounded_to_nearest_even():
    values = np.resize(np.array(list(ROUNDED), np.uint32), 64)
    m = run("v_cvt_pk_bf16_f32 v9, v0, v1", vectors={0: values, 1: values[::-1]}, arch="gfx950")
    expected = np.array([ROUNDED[int(v)] for v in values])
    assert (vector(m, 9) & 0xFFFF).tolist() == expected.tolist()
    assert (vector(m, 9) >> 16).tolist() == expected[::-1].tolist()
    m = run("v_cvt_pk_bf16_f32 v9, v0, v0", vectors={0: np.full(64, np.nan, np.float32)})
    assert np.isnan((vector(m, 9) << 16).view(np.float32)).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_float16_is_rounded_to_nearest_even_or_toward_zero():
    one, ulp = 1.0, 2.0**-10
    values = [one + ulp / 2, one + 1.5 * ulp, one + 0.75 * ulp, -one - 0.75 * ulp, 65504, 65519, 65520, 1e9]
    values += [2.0**-25, 2.0**-24 * 1.5, 0.0, -0.0, np.inf]
    values = np.resize(np.array(values, np.float32), 64)
    m = run("v_cvt_f16_f32_e32 v9, v0", vectors={0: values})
    assert vector(m, 9).tolist() == values.astype(np.float16).view(np.uint16).tolist()
    m = run("v_cvt_pkrtz_f16_f32 v9, v0, v0", vectors={0: values})
    low = (vector(m, 9) & 0xFFFF).astype(np.uint16).view(np.float16)
    magnitude, exact = np.abs(low.astype(np.float64)), np.abs(values.astype(np.float64))
    finite = np.isfinite(values)
    assert (magnitude[finite] <= exact[finite]).all()
    following = np.nextafter(low, np.where(low < 0, -np.inf, np.inf).astype(np.float16))
    assert (np.abs(following.astype(np.float64))[finite] > exact[finite]).all()
    m = run("v_cvt_pk_f16_f32 v9, v0, v0", vectors={0: values}, arch="gfx950")
    assert (vector(m, 9) >> 16).tolist() == values.astype(np.float16).view(np.uint16).tolist()


def test_conversions_to_integers_saturate():
    values = np.array([0.9, -0.9, 3e9, -3e9, 5e9, np.nan, 7.5, -7.5], np.float32)
    m = run("v_cvt_u32_f32_e32 v9, v0\nv_cvt_i32_f32_e32 v8, v0", vectors={0: np.resize(values, 64)})
    assert vector(m, 9)[:8].tolist() == [0, 0, 3000000000, 0, M32, 0, 7, 0]
    assert vector(m, 8, np.int32)[:8].tolist() == [0, 0, 2**31 - 1, -(2**31), 2**31 - 1, 0, 7, -7]


@pytest.mark.parametrize(
    ("op", "function"),
    [
        ("v_add_f16_e32 v9, v0, v1", lambda a, b: a + b),
        ("v_sub_f16_e32 v9, v0, v1", lambda a, b: a - b),
        ("v_mul_f16_e32 v9, v0, v1", lambda a, b: a * b),
        ("v_max_f16_e32 v9, v0, v1", np.fmax),
        ("v_min_f16_e32 v9, v0, v1", np.fmin),
        ("v_add_f16_e64 v9, -v0, |v1|", lambda a, b: np.abs(b) - a),
        ("v_add_f16_e32 v9, 0.5, v1", lambda a, b: b + np.float16(0.5)),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_float16_fills_the_low_half_and_clears_the_other(op, function):
    a, b = floats(0, np.float16), floats(1, np.float16)
    junk = np.uint32(0xABCD0000)
    m = run(op, vectors={0: a.view(np.uint16) | junk, 1: b.view(np.uint16) | junk})
    assert not (vector(m, 9) >> 16).any()
    got = vector(m, 9).astype(np.uint16).view(np.float16)
    np.testing.assert_array_equal(got, function(a, b).astype(np.float16))


def test_fused_float16_rounds_once():
    a, b, c = (np.random.default_rng(i).standard_normal(64).astype(np.float16) for i in range(3))
    m = run("v_fma_f16 v9, v0, v1, v2", vectors={i: x.view(np.uint16) for i, x in enumerate((a, b, c))})
    exact = a.astype(np.float64) * b + c
    np.testing.assert_array_equal(vector(m, 9).astype(np.uint16).view(np.float16), exact.astype(np.float16))


def test_carry_chains():
    """Sums and differences of 64 bits, the carry of every lane in a mask."""
    a, b = ((edges(i).astype(object) << 32) + edges(i + 9).astype(object) for i in range(2))
    low, high = (lambda x: [int(v) & M32 for v in x]), (lambda x: [int(v) >> 32 for v in x])
    given = {0: low(a), 1: high(a), 2: low(b), 3: high(b)}
    for first, then, function in (
        ("v_add_co_u32_e32 v8, vcc, v0, v2", "v_addc_co_u32_e32 v9, vcc, v1, v3, vcc", lambda a, b: a + b),
        (
            "v_sub_co_u32_e64 v8, s[4:5], v0, v2",
            "v_subb_co_u32_e64 v9, vcc, v1, v3, s[4:5]",
            lambda a, b: a - b,
        ),
        (
            "v_subrev_co_u32_e32 v8, vcc, v0, v2",
            "v_subbrev_co_u32_e32 v9, vcc, v1, v3, vcc",
            lambda a, b: b - a,
        ),
    ):
        m = run(f"{first}\n{then}", vectors=given)
        exact = [function(int(x), int(y)) for x, y in zip(a, b, strict=True)]
        got = [lo | hi << 32 for lo, hi in zip(vector(m, 8).tolist(), vector(m, 9).tolist(), strict=True)]
        assert got == [x & M64 for x in exact]
        assert scalar64(m, "vcc") == sum(((x >> 64) & 1) << lane for lane, x in enumerate(exact))


def test_64_bit_arithmetic():
    a, amount = edges(0), edges(1)
    both = [int(lo) | int(hi) << 32 for lo, hi in zip(a, edges(2), strict=True)]
    given = {0: a, 1: edges(2), 2: amount, 4: edges(3), 5: edges(4)}
    third = [int(lo) | int(hi) << 32 for lo, hi in zip(given[4], given[5], strict=True)]
    for text, expected in {
        "v_lshlrev_b64 v[8:9], v2, v[0:1]": [x << (int(n) & 63) for x, n in zip(both, amount, strict=True)],
        "v_lshrrev_b64 v[8:9], v2, v[0:1]": [x >> (int(n) & 63) for x, n in zip(both, amount, strict=True)],
        "v_ashrrev_i64 v[8:9], v2, v[0:1]": [
            signed(x, 64) >> (int(n) & 63) for x, n in zip(both, amount, strict=True)
        ],
        "v_lshl_add_u64 v[8:9], v[0:1], 3, v[4:5]": [(x << 3) + y for x, y in zip(both, third, strict=True)],
        "v_mov_b64_e32 v[8:9], v[0:1]": both,
        "v_mad_u64_u32 v[8:9], vcc, v0, v2, v[4:5]": [
            int(x) * int(y) + z for x, y, z in zip(a, amount, third, strict=True)
        ],
        "v_mad_i64_i32 v[8:9], vcc, v0, v2, v[4:5]": [
            signed(int(x)) * signed(int(y)) + z for x, y, z in zip(a, amount, third, strict=True)
        ],
    }.items():
        m = run(text, vectors=given)
        got = [lo | hi << 32 for lo, hi in zip(vector(m, 8).tolist(), vector(m, 9).tolist(), strict=True)]
        assert got == [x & M64 for x in expected], text
        if "mad_u64" in text:
            assert scalar64(m, "vcc") == sum((x >> 64 & 1) << lane for lane, x in enumerate(expected))


RELATIONS = {
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


@pytest.mark.parametrize("relation", RELATIONS)
def test_comparisons_write_zero_for_lanes_that_are_not_active(relation):
    a, b, active = edges(0), edges(0)[::-1], np.arange(64) % 3 != 0
    for kind, dtype in (("u32", np.uint32), ("i32", np.int32)):
        m = run(f"v_cmp_{relation}_{kind}_e32 vcc, v0, v1", vectors={0: a, 1: b}, active=active)
        expected = RELATIONS[relation](a.view(dtype), b.view(dtype)) & active
        assert scalar64(m, "vcc") == sum(int(bit) << lane for lane, bit in enumerate(expected))
    high = {1: edges(5), 3: edges(6)}
    m = run(f"v_cmp_{relation}_i64_e64 s[4:5], v[0:1], v[2:3]", vectors={0: a, 2: b, **high})
    wide = [
        RELATIONS[relation](signed(int(p) | int(q) << 32, 64), signed(int(r) | int(s) << 32, 64))
        for p, q, r, s in zip(a, high[1], b, high[3], strict=True)
    ]
    assert scalar64(m, 4) == sum(bit << lane for lane, bit in enumerate(wide))


@pytest.mark.parametrize("relation", [*RELATIONS, "lg"])
@pytest.mark.parametrize("opposite", [False, True])
def test_comparisons_with_nan(relation, opposite):
    """The opposite of a relation, "nlt" for one, holds for NaN."""
    a, b = floats(0), floats(1)
    function = {**RELATIONS, "lg": lambda a, b: (a < b) | (a > b)}[relation]
    name = {"eq": "neq"}.get(relation, f"n{relation}") if opposite else relation
    m = run(f"v_cmp_{name}_f32_e32 vcc, v0, v1", vectors={0: a, 1: b})
    expected = function(a, b) ^ opposite
    assert scalar64(m, "vcc") == sum(int(bit) << lane for lane, bit in enumerate(expected))


def test_ordered_and_unordered():
    a = floats(0)
    m = run("v_cmp_o_f32_e64 s[4:5], v0, v0\nv_cmp_u_f32_e64 s[6:7], v0, v0", vectors={0: a})
    assert scalar64(m, 6) == 1 << int(np.flatnonzero(np.isnan(a))[0])
    assert scalar64(m, 4) == M64 ^ scalar64(m, 6)


def test_choice_by_mask():
    mask = 0xF0F0F0F00F0F0F0F
    m = run("v_cndmask_b32_e64 v9, v0, -1, s[2:3]", vectors={0: edges(0)}, scalars={2: mask, 3: mask >> 32})
    chosen = [M32 if mask >> lane & 1 else int(x) for lane, x in enumerate(edges(0))]
    assert vector(m, 9).tolist() == chosen


def test_tables_of_three_bits():
    a, b, c = (edges(i) for i in range(3))
    m = run("v_bitop3_b32 v9, v0, v1, v2 bitop3:0xe8", vectors={0: a, 1: b, 2: c}, arch="gfx950")
    assert vector(m, 9).tolist() == ((a & b) | (a & c) | (b & c)).tolist()  # the majority

    m = run("v_bitop3_b16 v9, v0, v1, 7 bitop3:0xc8", vectors={0: a, 1: b, 9: c}, arch="gfx950")
    assert vector(m, 9).tolist() == ((c & 0xFFFF0000) | (b & (a | 7) & 0xFFFF)).tolist()


def test_products_of_mixed_precision():
    """`op_sel_hi` marks the halves, `op_sel` says which."""
    halves = [np.random.default_rng(i).standard_normal(64).astype(np.float16) for i in range(4)]
    one, two = (
        a.view(np.uint16) | (b.view(np.uint16).astype(np.uint32) << 16) for a, b in (halves[:2], halves[2:])
    )
    c = np.random.default_rng(9).standard_normal(64).astype(np.float32)
    a, b = halves[1].astype(np.float64), halves[2].astype(np.float64)
    for text, expected in {
        "v_fma_mix_f32 v9, v0, v1, v2 op_sel:[1,0,0] op_sel_hi:[1,1,0]": a * b + c,
        "v_fma_mix_f32 v9, -v0, |v1|, v2 op_sel:[1,0,0] op_sel_hi:[1,1,0]": -a * np.abs(b) + c,
        "v_fma_mix_f32 v9, v0, 1.0, v2 op_sel:[1,0,0] op_sel_hi:[1,1,0]": a + c,
        "v_fma_mix_f32 v9, v2, v1, neg(0) op_sel_hi:[0,1,0]": c * b,
    }.items():
        m = run(text, vectors={0: one, 1: two, 2: c})
        np.testing.assert_array_equal(vector(m, 9, np.float32), expected.astype(np.float32), err_msg=text)


def test_exponents_are_shifted():
    x, n = np.resize(np.float32([1.5, -3.0, 0.1]), 64), np.resize(np.array([4, -3, 0]), 64)
    m = run("v_ldexp_f32 v9, v0, v1", vectors={0: x, 1: n & M32})
    np.testing.assert_array_equal(vector(m, 9, np.float32), x * np.float32(2.0) ** n.astype(np.float32))


def test_division_as_the_compiler_writes_it():
    a, b = (np.random.default_rng(i).uniform(0.5, 2, 64).astype(np.float32) for i in range(2))
    text = """
    v_div_scale_f32 v2, s[4:5], v1, v1, v0
    v_rcp_f32_e32 v3, v2
    v_div_scale_f32 v4, vcc, v0, v1, v0
    v_div_fmas_f32 v5, v3, v3, v3
    v_div_fixup_f32 v6, v5, v1, v0
    """
    np.testing.assert_array_equal(vector(run(text, vectors={0: a, 1: b}), 6, np.float32), a / b)
    with pytest.raises(EmulationError, match="division"):
        run(text, vectors={0: a, 1: b * np.float32(1e30)})


def test_parts_of_registers():
    """SDWA: bytes and words in and out, signs, and what happens to the rest of the result."""
    a, b = edges(0), edges(1)
    low, high = a.astype(object) & 0xFFFF, a.astype(object) >> 16
    for text, expected in {
        "v_add_u32_sdwa v9, v0, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:BYTE_2": (
            high + (b.astype(object) >> 16 & 255)
        ),
        "v_lshlrev_b32_sdwa v9, v2, v0 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:WORD_0": (
            low << 4
        ),
        "v_mov_b32_sdwa v9, v0 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:WORD_0": low << 16,
        "v_mov_b32_sdwa v9, v0 dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_3": (
            (a.astype(object) >> 24 << 8) | 0x55550055
        ),
        "v_mov_b32_sdwa v9, sext(v0) dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_0": (
            np.array([signed(int(x), 8) for x in a], object)
        ),
    }.items():
        m = run(text, vectors={0: a, 1: b, 2: [4] * 64, 9: [0x55555555] * 64})
        assert vector(m, 9).tolist() == [int(x) & M32 for x in expected], text


def test_inactive_lanes_keep_what_they_hold():
    active = np.arange(64) % 2 == 0
    m = run("v_add_u32_e32 v1, 1, v0", vectors={0: np.arange(64), 1: [7] * 64}, active=active)
    assert vector(m, 1).tolist() == [lane + 1 if lane % 2 == 0 else 7 for lane in range(64)]


@pytest.mark.parametrize(
    "text",
    [
        "v_sin_f32_e32 v0, v1",
        "v_add_u32_e64 v0, v1, v2 clamp",
        "v_add_u16 v0, v1, v2 op_sel:[1,0,0]",
        "v_cmpx_lt_u32_e32 exec, v0, v1",
        "v_and_b32_e64 v0, -v1, v2",
    ],
)
def test_what_is_not_known_raises_by_name(text):
    with pytest.raises(EmulationError, match=r"v_|v1"):
        run(text)
