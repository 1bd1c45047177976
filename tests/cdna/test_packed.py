"""Two numbers in one instruction: which half of each operand goes where."""

import numpy as np
import pytest

from cdna import packed as family
from cdna.bits import EmulationError
from cdna.snippet import edges, run, vector


def normal(seed, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(64).astype(dtype)


PAIRS = {
    "v_pk_add_f32": lambda a, b: a + b,
    "v_pk_mul_f32": lambda a, b: a * b,
    "v_pk_fma_f32": lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32),
}


@pytest.mark.parametrize("op", PAIRS)
def test_pairs_of_registers(op):
    function = PAIRS[op]
    count = function.__code__.co_argcount
    values = {i: normal(i) for i in range(2 * count)}
    pairs = [(values[2 * i], values[2 * i + 1]) for i in range(count)]
    operands = ", ".join(f"v[{2 * i}:{2 * i + 1}]" for i in range(count))
    m = run(f"{op} v[8:9], {operands}", vectors=values)
    for word in (0, 1):
        expected = function(*(pair[word] for pair in pairs))
        np.testing.assert_array_equal(vector(m, 8 + word, np.float32), expected)
    # Both results from the first operand's low word and the second's high one, negated in the high result.
    rest = [1] * (count - 2)
    zeros = [0] * (count - 2)
    text = (
        f"{op} v[8:9], {operands} op_sel:{[0, 1, *zeros]} op_sel_hi:{[0, 1, *rest]} neg_hi:{[0, 1, *zeros]}"
    )
    m = run(text.replace(", 1", ",1").replace(", 0", ",0"), vectors=values)
    low, high = pairs[0][0], pairs[1][1]
    np.testing.assert_array_equal(
        vector(m, 8, np.float32), function(low, high, *(pair[0] for pair in pairs[2:]))
    )
    np.testing.assert_array_equal(
        vector(m, 9, np.float32), function(low, -high, *(pair[1] for pair in pairs[2:]))
    )


def test_a_constant_serves_its_low_word():
    values = {0: normal(0), 1: normal(1)}
    m = run("v_pk_mul_f32 v[8:9], v[0:1], 2.0 op_sel_hi:[1,0]", vectors=values)
    np.testing.assert_array_equal(vector(m, 9, np.float32), 2 * values[1])
    with pytest.raises(EmulationError, match="high word"):
        run("v_pk_mul_f32 v[8:9], v[0:1], 2.0", vectors=values)


def test_moves_of_pairs():
    values = {i: edges(i) for i in range(4)}
    m = run("v_pk_mov_b32 v[8:9], v[0:1], v[2:3] op_sel:[1,0]", vectors=values)
    assert (vector(m, 8) == values[1]).all()
    assert (vector(m, 9) == values[2]).all()
    m = run("v_pk_mov_b32 v[0:1], v[0:1], v[0:1] op_sel:[1,0]", vectors=values)  # an exchange
    assert (vector(m, 0) == values[1]).all()
    assert (vector(m, 1) == values[0]).all()


HALVES = {
    "v_pk_add_f16": lambda a, b: a + b,
    "v_pk_mul_f16": lambda a, b: a * b,
    "v_pk_fma_f16": lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float16),
    "v_pk_max_f16": lambda a, b: np.fmax(a, b),
    "v_pk_min_f16": lambda a, b: np.fmin(a, b),
}
SHORTS = {
    "v_pk_add_u16": lambda a, b: a + b,
    "v_pk_sub_u16": lambda a, b: a - b,
    "v_pk_sub_i16": lambda a, b: a - b,
    "v_pk_mul_lo_u16": lambda a, b: a * b,
    "v_pk_mad_u16": lambda a, b, c: a * b + c,
    "v_pk_lshlrev_b16": lambda a, b: b << (a & 15),
    "v_pk_lshrrev_b16": lambda a, b: b >> (a & 15),
    "v_pk_max_u16": lambda a, b: np.maximum(a, b),
    "v_pk_min_u16": lambda a, b: np.minimum(a, b),
}


@pytest.mark.parametrize("op", [*HALVES, *SHORTS])
@pytest.mark.parametrize("crossed", [False, True])
def test_halves_of_registers(op, crossed):
    """Crossed, the first operand gives its high half to the low result and the other way round."""
    function, dtype = {**HALVES, **SHORTS}[op], np.float16 if op in HALVES else np.uint16
    count = function.__code__.co_argcount
    if op in HALVES:
        halves = [(normal(2 * i, dtype), normal(2 * i + 1, dtype)) for i in range(count)]
    else:
        halves = [(edges(i).astype(dtype), (edges(i) >> 16).astype(dtype)) for i in range(count)]
    bits = [low.view(np.uint16) | (high.view(np.uint16).astype(np.uint32) << 16) for low, high in halves]
    text = f"{op} v9, " + ", ".join(f"v{i}" for i in range(count))
    if crossed:
        zeros, ones = ",0" * (count - 1), ",1" * (count - 1)
        text += f" op_sel:[1{zeros}] op_sel_hi:[0{ones}]"
    m = run(text, vectors=dict(enumerate(bits)))
    for word in (0, 1):
        picked = [halves[0][1 - word if crossed else word], *(pair[word] for pair in halves[1:])]
        got = (vector(m, 9) >> (16 * word)).astype(np.uint16).view(dtype)
        np.testing.assert_array_equal(got, function(*picked).astype(dtype))


def test_every_opcode_of_the_tables_is_tested():
    assert set(PAIRS) == set(family.PAIRS)
    assert set(HALVES) == set(family.HALVES)
    assert set(SHORTS) == set(family.SHORTS)


def test_signs_of_halves():
    a = normal(0, np.float16).view(np.uint16).astype(np.uint32)
    m = run("v_pk_add_f16 v9, v0, v0 neg_lo:[0,1] neg_hi:[1,1]", vectors={0: a | (a << 16)})
    low, high = vector(m, 9) & 0xFFFF, (vector(m, 9) >> 16).astype(np.uint16).view(np.float16)
    assert not low.any()
    np.testing.assert_array_equal(high, -2 * a.astype(np.uint16).view(np.float16))


def test_two_halves_are_packed():
    a, b = edges(0), edges(1)
    m = run("v_pack_b32_f16 v9, v0, v1 op_sel:[1,0,0]", vectors={0: a, 1: b})
    assert vector(m, 9).tolist() == ((a >> 16) | (b << 16)).tolist()
