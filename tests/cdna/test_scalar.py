"""Scalar instructions against the meaning that the ISA documents give, in Python's integers."""

import pytest

from cdna import scalar as family
from cdna.bits import EmulationError
from cdna.snippet import EDGES, run, scalar, scalar64

M32, M64 = 2**32 - 1, 2**64 - 1
PAIRS = [(a, b) for a in EDGES for b in EDGES]


def signed(x, bits=32):
    return x - (1 << bits) if x >> (bits - 1) else x


def overflows(x):
    return not -(2**31) <= x < 2**31


def nonzero(x):
    return x & M32, x & M32 != 0


def field(x, control, sign):
    offset, width = control & 31, control >> 16 & 127
    value = x >> offset & ((1 << width) - 1)
    if sign and width and width < 32 and value >> (width - 1):
        value -= 1 << width
    return nonzero(value)


def shift_add(n):
    return lambda a, b: ((a << n) + b & M32, (a << n) + b > M32)


# op: (a, b) -> (result, condition bit or None where it stays)
BINARY = {
    "s_add_i32": lambda a, b: (a + b & M32, overflows(signed(a) + signed(b))),
    "s_sub_i32": lambda a, b: (a - b & M32, overflows(signed(a) - signed(b))),
    "s_add_u32": lambda a, b: (a + b & M32, a + b > M32),
    "s_sub_u32": lambda a, b: (a - b & M32, a < b),
    "s_mul_i32": lambda a, b: (a * b & M32, None),
    "s_mul_hi_u32": lambda a, b: (a * b >> 32, None),
    "s_mul_hi_i32": lambda a, b: (signed(a) * signed(b) >> 32 & M32, None),
    "s_and_b32": lambda a, b: nonzero(a & b),
    "s_or_b32": lambda a, b: nonzero(a | b),
    "s_xor_b32": lambda a, b: nonzero(a ^ b),
    "s_andn2_b32": lambda a, b: nonzero(a & ~b),
    "s_orn2_b32": lambda a, b: nonzero(a | ~b),
    "s_lshl_b32": lambda a, b: nonzero(a << (b & 31)),
    "s_lshr_b32": lambda a, b: nonzero(a >> (b & 31)),
    "s_ashr_i32": lambda a, b: nonzero(signed(a) >> (b & 31)),
    "s_min_u32": lambda a, b: (min(a, b), a < b),
    "s_max_u32": lambda a, b: (max(a, b), a > b),
    "s_min_i32": lambda a, b: (min(signed(a), signed(b)) & M32, signed(a) < signed(b)),
    "s_max_i32": lambda a, b: (max(signed(a), signed(b)) & M32, signed(a) > signed(b)),
    "s_bfe_u32": lambda a, b: field(a, b, False),
    "s_bfe_i32": lambda a, b: field(a, b, True),
    "s_bfm_b32": lambda a, b: (((1 << (a & 31)) - 1) << (b & 31) & M32, None),
    "s_pack_ll_b32_b16": lambda a, b: (a & 0xFFFF | (b & 0xFFFF) << 16, None),
    "s_pack_lh_b32_b16": lambda a, b: (a & 0xFFFF | (b >> 16) << 16, None),
    "s_pack_hh_b32_b16": lambda a, b: (a >> 16 | (b >> 16) << 16, None),
    "s_lshl1_add_u32": shift_add(1),
    "s_lshl2_add_u32": shift_add(2),
    "s_lshl3_add_u32": shift_add(3),
    "s_lshl4_add_u32": shift_add(4),
}
UNARY = {
    "s_mov_b32": lambda a: (a, None),
    "s_brev_b32": lambda a: (int(f"{a:032b}"[::-1], 2), None),
    "s_not_b32": lambda a: nonzero(~a),
    "s_abs_i32": lambda a: nonzero(abs(signed(a))),
    "s_sext_i32_i8": lambda a: (signed(a & 0xFF, 8) & M32, None),
    "s_sext_i32_i16": lambda a: (signed(a & 0xFFFF, 16) & M32, None),
    "s_ff1_i32_b32": lambda a: ((a & -a).bit_length() - 1 & M32, None),
    "s_flbit_i32_b32": lambda a: (32 - a.bit_length() if a else M32, None),
    "s_bcnt1_i32_b32": lambda a: nonzero(a.bit_count()),
}


def test_every_opcode_of_the_tables_is_tested():
    assert set(BINARY) == set(family.BINARY)
    assert set(UNARY) == set(family.UNARY)


@pytest.mark.parametrize("op", BINARY)
def test_two_operands(op):
    a, b = zip(*PAIRS, strict=True)
    for before in (0, 1):
        m = run(f"{op} s4, s2, s3", scalars={2: a, 3: b, "scc": before}, groups=len(PAIRS))
        expected = [BINARY[op](*pair) for pair in PAIRS]
        assert m.registers.scalar_file[4].tolist() == [result for result, _ in expected]
        conditions = [before if condition is None else condition for _, condition in expected]
        assert m.registers.condition.tolist() == conditions


@pytest.mark.parametrize("op", UNARY)
def test_one_operand(op):
    m = run(f"{op} s4, s2", scalars={2: EDGES, "scc": 1}, groups=len(EDGES))
    expected = [UNARY[op](a) for a in EDGES]
    assert m.registers.scalar_file[4].tolist() == [result for result, _ in expected]
    assert m.registers.condition.tolist() == [condition is None or condition for _, condition in expected]


@pytest.mark.parametrize(
    ("op", "function"),
    {
        "s_and_b64": lambda a, b: a & b,
        "s_or_b64": lambda a, b: a | b,
        "s_xor_b64": lambda a, b: a ^ b,
        "s_andn2_b64": lambda a, b: a & ~b,
        "s_orn2_b64": lambda a, b: a | ~b,
        "s_nand_b64": lambda a, b: ~(a & b),
        "s_nor_b64": lambda a, b: ~(a | b),
        "s_xnor_b64": lambda a, b: ~(a ^ b),
        "s_lshl_b64": lambda a, b: a << (b & 63),
        "s_lshr_b64": lambda a, b: a >> (b & 63),
        "s_ashr_i64": lambda a, b: signed(a, 64) >> (b & 63),
    }.items(),
    ids=lambda part: part if isinstance(part, str) else "",
)
@pytest.mark.parametrize("a", [0, M64, 0x8000000012345678, 0x00000001FFFFFFFF])
@pytest.mark.parametrize("b", [0, M64, 35, 0x8000000012345678])
def test_64_bits(op, function, a, b):
    m = run(f"{op} s[6:7], s[2:3], s[4:5]", scalars={2: a, 3: a >> 32, 4: b, 5: b >> 32})
    assert scalar64(m, 6) == function(a, b) & M64
    assert m.registers.condition[0] == (function(a, b) & M64 != 0)


@pytest.mark.parametrize("a", [M64, 0x8000000012345678, 0x00000001FFFFFFFF])
@pytest.mark.parametrize("offset", [0, 5, 31, 40, 63])
@pytest.mark.parametrize("width", [0, 1, 8, 32, 33, 64])
def test_fields_of_64_bits(a, offset, width):
    value = a >> offset & (1 << min(width, 64 - offset)) - 1
    sign = min(width, 64 - offset) - 1
    extended = value - (value >> sign << sign + 1) if width else 0
    for op, expected in (("s_bfe_u64", value), ("s_bfe_i64", extended)):
        m = run(f"{op} s[6:7], s[2:3], s4", scalars={2: a, 3: a >> 32, 4: width << 16 | offset, "scc": 1})
        assert scalar64(m, 6) == expected & M64
        assert m.registers.condition[0] == (expected != 0)


@pytest.mark.parametrize("old", [0, M32, 0x12345678])
@pytest.mark.parametrize("number", [0, 12, 31, 33])
def test_one_bit_set_or_cleared(old, number):
    bit = 1 << (number & 31)
    for op, expected in (("s_bitset1_b32", old | bit), ("s_bitset0_b32", old & ~bit)):
        m = run(f"{op} s4, s2", scalars={2: number, 4: old, "scc": 1})
        assert (scalar(m, 4), m.registers.condition[0]) == (expected, True)


def test_carry_chains():
    """A 64-bit sum and difference in two instructions each."""
    a, b = 0x12345678FFFFFFFF, 0x0FEDCBA900000001
    both = {2: a, 3: a >> 32, 4: b, 5: b >> 32}
    m = run("s_add_u32 s6, s2, s4\ns_addc_u32 s7, s3, s5", scalars=both)
    assert scalar64(m, 6) == a + b
    assert not m.registers.condition[0]
    m = run("s_sub_u32 s6, s4, s2\ns_subb_u32 s7, s5, s3", scalars=both)
    assert scalar64(m, 6) == b - a & M64
    assert m.registers.condition[0]  # the borrow that is left


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("kind", ["i", "u"])
def test_comparisons(kind, width):
    relations = {
        "eq": "__eq__",
        "lg": "__ne__",
        "gt": "__gt__",
        "ge": "__ge__",
        "lt": "__lt__",
        "le": "__le__",
    }
    pairs = PAIRS if width == 32 else [(M64, 1), (1, M64), (7, 7)]
    a, b = zip(*pairs, strict=True)
    one, two = ("s2", "s4") if width == 32 else ("s[2:3]", "s[4:5]")
    given = {2: a, 3: [x >> 32 for x in a], 4: b, 5: [x >> 32 for x in b]}
    for relation, name in relations.items():
        m = run(f"s_cmp_{relation}_{kind}{width} {one}, {two}", scalars=given, groups=len(pairs))
        meant = [(signed(x, width), signed(y, width)) if kind == "i" else (x, y) for x, y in pairs]
        assert m.registers.condition.tolist() == [getattr(x, name)(y) for x, y in meant], relation


def test_short_constants_are_signed_unless_compared_unsigned():
    assert scalar(run("s_movk_i32 s4, 0xff80"), 4) == -128 & M32
    assert scalar(run("s_movk_i32 s4, 0x7fff"), 4) == 0x7FFF
    assert scalar(run("s_mulk_i32 s4, 0xfffe", scalars={4: 21}), 4) == -42 & M32
    m = run("s_addk_i32 s4, 0x1", scalars={4: 0x7FFFFFFF})
    assert scalar(m, 4) == 0x80000000
    assert m.registers.condition[0]
    assert run("s_cmpk_eq_i32 s4, 0xff80", scalars={4: -128}).registers.condition[0]
    assert run("s_cmpk_eq_u32 s4, 0xff80", scalars={4: 0xFF80}).registers.condition[0]


def test_choices_follow_the_condition_bit():
    for condition, chosen in ((1, 7), (0, 9)):
        given = {2: 7, 3: 1, 4: 9, 5: 2, "scc": condition}
        assert scalar(run("s_cselect_b32 s6, s2, s4", scalars=given), 6) == chosen
        wide = run("s_cselect_b64 s[6:7], s[2:3], s[4:5]", scalars=given)
        assert scalar64(wide, 6) == (0x100000007 if condition else 0x200000009)
        assert scalar(run("s_cmov_b32 s4, s2", scalars=given), 4) == chosen


def test_single_bits_and_counts():
    assert run("s_bitcmp1_b32 s2, 5", scalars={2: 0x20}).registers.condition[0]
    assert not run("s_bitcmp0_b32 s2, 37", scalars={2: 0x20}).registers.condition[0]
    m = run("s_bcnt1_i32_b64 s4, s[2:3]", scalars={2: 0xF0F, 3: 0x1})
    assert scalar(m, 4) == 9
    m = run("s_not_b64 s[4:5], s[2:3]", scalars={2: 0, 3: M32})
    assert scalar64(m, 4) == M32
    assert scalar64(run("s_mov_b64 s[4:5], -1"), 4) == M64
    assert scalar64(run("s_mov_b64 s[4:5], 0xffffffff"), 4) == M32


@pytest.mark.parametrize(
    ("op", "function"),
    [
        ("and", lambda mask, old: mask & old),
        ("or", lambda mask, old: mask | old),
        ("xor", lambda mask, old: mask ^ old),
        ("andn2", lambda mask, old: mask & ~old),
    ],
)
def test_masks_are_saved_and_changed(op, function):
    mask, old = 0xFF00FF00FF00FF00, 0x0FF00FF00FF00FF0
    active = [bool(old >> lane & 1) for lane in range(64)]
    m = run(
        f"s_{op}_saveexec_b64 s[6:7], s[2:3]\nv_mov_b32_e32 v1, 5",
        vectors={1: [0] * 64},
        scalars={2: mask, 3: mask >> 32},
        active=active,
    )
    new = function(mask, old) & M64
    assert scalar64(m, 6) == old
    assert scalar64(m, "exec") == new
    assert m.registers.vector_file[1][0].tolist() == [5 if new >> lane & 1 else 0 for lane in range(64)]


def test_loops_and_branches_run_for_each_wave_by_itself():
    """Wave w goes round w + 1 times."""
    m = run(
        """
        s_mov_b32 s5, 0
        top:
        s_add_u32 s5, s5, 10
        s_sub_u32 s4, s4, 1
        s_cmp_lg_u32 s4, 0
        s_cbranch_scc1 top
        s_branch end
        s_mov_b32 s5, 0
        end:
        s_nop 0
        """,
        scalars={4: [1, 2, 3, 4]},
        waves=4,
    )
    assert m.registers.scalar_file[5].tolist() == [10, 20, 30, 40]


@pytest.mark.parametrize(
    ("branch", "active", "vcc", "taken"),
    [
        ("execz", False, 0, True),
        ("execz", True, 0, False),
        ("execnz", True, 0, True),
        ("vccz", True, 0, True),
        ("vccz", True, 1 << 40, False),
        ("vccnz", True, 1 << 40, True),
        ("scc0", True, 0, True),
    ],
)
def test_branches_on_masks(branch, active, vcc, taken):
    text = f"s_mov_b32 s4, 1\ns_cbranch_{branch} end\ns_mov_b32 s4, 0\nend:\ns_nop 0"
    assert scalar(run(text, scalars={"vcc": vcc}, active=[active] * 64), 4) == taken


@pytest.mark.parametrize("text", ["s_getreg_b32 s0, hwreg(HW_REG_MODE)", "s_swappc_b64 s[0:1], s[2:3]"])
def test_unknown_opcodes_raise_by_name(text):
    with pytest.raises(EmulationError, match=text.split()[0]):
        run(text)
