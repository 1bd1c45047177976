"""Loads and stores: widths, addresses, bounds of buffers, red zones, and what workgroups may share."""

import numpy as np
import pytest

from cdna.bits import EmulationError
from cdna.snippet import edges, run, stored, vector

LANE = np.arange(64)
WORDS = np.arange(512, dtype=np.uint32) * 0x01010101 + 7
WIDTHS = {"dword": 1, "dwordx2": 2, "dwordx3": 3, "dwordx4": 4}


def buffer(size):
    """Scalar registers s[4:7] of a buffer at s[0:1] with so many bytes."""
    return f"s_mov_b32 s4, s0\ns_mov_b32 s5, s1\ns_mov_b32 s6, {size}\ns_mov_b32 s7, 0\n"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["scalar base", "vector address", "buffer"])
def test_loads_of_every_width(width, kind):
    count = WIDTHS[width]
    registers = f"v[8:{7 + count}]" if count > 1 else "v8"
    load = {
        "scalar base": f"global_load_{width} {registers}, v0, s[0:1] offset:16",
        "vector address": f"""v_mov_b32_e32 v3, s1
            v_add_co_u32_e32 v2, vcc, s0, v0
            v_addc_co_u32_e32 v3, vcc, 0, v3, vcc
            global_load_{width} {registers}, v[2:3], off offset:16""",
        "buffer": f"s_mov_b32 s8, 12\n{buffer(2048)}"
        f"buffer_load_{width} {registers}, v0, s[4:7], s8 offen offset:4",
    }[kind]
    at = LANE[::-1] * 4 * count
    m = run(load, vectors={0: at}, memory=WORDS)
    for k in range(count):
        assert (vector(m, 8 + k) == WORDS[(at + 16) // 4 + k]).all()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["global", "buffer"])
def test_stores_of_every_width(width, kind):
    count, active = WIDTHS[width], LANE % 3 != 0
    values = {8 + k: edges(k) for k in range(count)}
    registers = f"v[8:{7 + count}]" if count > 1 else "v8"
    text = f"global_store_{width} v0, {registers}, s[0:1]"
    if kind == "buffer":
        text = buffer(2048) + f"buffer_store_{width} {registers}, v0, s[4:7], 0 offen"
    m = run(text, vectors={0: LANE * 4 * count, **values}, memory=WORDS, active=active)
    expected = WORDS.copy()
    for lane in np.flatnonzero(active):
        expected[lane * count : (lane + 1) * count] = [values[8 + k][lane] for k in range(count)]
    assert (stored(m)[:512] == expected).all()


def test_half_words():
    """They fill the low half and clear the other, or one half and keep the other; with a sign or not."""
    halves = (np.arange(128) * 517 + 0x7F00).astype(np.uint16)
    for text, expected in {
        "global_load_ushort v8, v0, s[0:1]": halves[:64].astype(np.uint32),
        "global_load_sshort v8, v0, s[0:1]": halves[:64].view(np.int16).astype(np.int32).view(np.uint32),
        "global_load_short_d16 v8, v0, s[0:1]": halves[:64].astype(np.uint32) | 0x55550000,
        "global_load_short_d16_hi v8, v0, s[0:1]": (halves[:64].astype(np.uint32) << 16) | 0x5555,
        buffer(256) + "buffer_load_ushort v8, v0, s[4:7], 0 offen": halves[:64].astype(np.uint32),
    }.items():
        m = run(text, vectors={0: 2 * LANE, 8: [0x55555555] * 64}, memory=halves)
        assert (vector(m, 8) == expected).all(), text
    for text, shift in {
        "global_store_short v0, v1, s[0:1]": 0,
        "global_store_short_d16_hi v0, v1, s[0:1]": 16,
        buffer(256) + "buffer_store_short_d16_hi v1, v0, s[4:7], 0 offen": 16,
    }.items():
        m = run(text, vectors={0: 2 * LANE, 1: edges(0)}, memory=halves)
        assert (stored(m, np.uint16)[:64] == (edges(0) >> shift).astype(np.uint16)).all(), text
        assert (stored(m, np.uint16)[64:128] == halves[64:]).all()


def test_words_at_even_addresses():
    halves = np.arange(200, dtype=np.uint16)
    m = run("global_load_dword v8, v0, s[0:1] offset:2", vectors={0: 4 * LANE}, memory=halves)
    assert (vector(m, 8) == (2 * LANE + 1) | ((2 * LANE + 2) << 16)).all()
    m = run("global_store_dword v0, v0, s[0:1] offset:2", vectors={0: 4 * LANE}, memory=halves)
    assert (stored(m, np.uint16)[1:129:2] == 4 * LANE).all()
    with pytest.raises(EmulationError, match="misaligned"):
        run("global_load_dword v8, v0, s[0:1]", vectors={0: 4 * LANE + 1}, memory=halves)


def test_past_the_end_of_a_buffer_reads_zero_and_writes_nothing():
    """The bound counts from the base, offsets of lanes, wave and instruction together."""
    load = buffer(128) + "s_mov_b32 s8, 64\nbuffer_load_dword v8, v0, s[4:7], s8 offen offset:4"
    m = run(load, vectors={0: LANE * 4}, memory=WORDS)
    inside = LANE * 4 + 68 < 128
    assert (vector(m, 8) == np.where(inside, WORDS[LANE + 17], 0)).all()
    store = buffer(128) + "buffer_store_dword v0, v0, s[4:7], 0 offen"
    m = run(store, vectors={0: LANE * 4}, memory=WORDS)
    assert (stored(m)[:32] == LANE[:32] * 4).all()
    assert (stored(m)[32:512] == WORDS[32:]).all()


def test_a_masked_lane_may_hold_any_address():
    """As Triton masks a lane of a buffer: with an offset that is past every end."""
    at = np.where(LANE % 2, 0x80000000, LANE * 4)
    m = run(buffer(0x7FFFFFFE) + "buffer_load_dword v8, v0, s[4:7], 0 offen", vectors={0: at}, memory=WORDS)
    assert (vector(m, 8) == np.where(LANE % 2, 0, WORDS[:64])).all()
    m = run(
        "global_load_dword v8, v0, s[0:1]",
        vectors={0: at, 8: [5] * 64},
        memory=WORDS,
        active=LANE % 2 == 0,
    )
    assert (vector(m, 8) == np.where(LANE % 2, 5, WORDS[:64])).all()


def test_an_access_across_the_end_of_a_buffer_is_refused():
    with pytest.raises(EmulationError, match="across the end"):
        run(
            buffer(8) + "buffer_load_dwordx4 v[8:11], v0, s[4:7], 0 offen",
            vectors={0: [0] * 64},
            memory=WORDS,
        )


ADDRESS = "v_mov_b32_e32 v2, s0\nv_add_u32_e32 v2, v2, v0\nv_mov_b32_e32 v3, s1\n"


@pytest.mark.parametrize("first", [-4, 4, 10**6])
@pytest.mark.parametrize(
    "text",
    [
        ADDRESS + "global_load_dword v8, v[2:3], off",
        ADDRESS + "global_store_dword v[2:3], v0, off",
        buffer(0x7FFFFFFE) + "s_add_u32 s4, s4, s2\nbuffer_load_dword v8, v1, s[4:7], 0 offen",
        buffer(0x7FFFFFFE) + "s_add_u32 s4, s4, s2\nbuffer_store_dword v0, v1, s[4:7], 0 offen",
    ],
)
def test_red_zones_around_a_tensor(text, first):
    """One lane outside is enough, in front or behind, however wide the buffer claims to be."""
    vectors = {0: (LANE * 4 + first) & 0xFFFFFFFF, 1: LANE * 4}
    with pytest.raises(EmulationError, match="outside the tensors"):
        run(text, vectors=vectors, scalars={2: first}, memory=WORDS[:64])
    run(text, vectors={0: LANE * 4, 1: LANE * 4}, scalars={2: 0}, memory=WORDS[:64])


@pytest.mark.parametrize(
    "text",
    [
        "v_mov_b32_e32 v1, s2\nglobal_store_dword v0, v1, s[0:1]",
        """
        s_cmp_eq_u32 s2, 0
        s_cbranch_scc0 all
        global_store_dword v0, v0, s[0:1]
        all:
        global_load_dword v1, v0, s[0:1]
        """,
    ],
    ids=["two write", "one writes, the other reads"],
)
def test_a_workgroup_may_not_touch_what_another_wrote(text):
    given = {"vectors": {0: LANE * 4}, "memory": WORDS}
    if "load" in text:  # within one it may, after a barrier
        with pytest.raises(EmulationError, match="another wave wrote, no barrier"):
            run(text, waves=2, scalars={2: [0, 1]}, **given)
        text = text.replace("global_load", "s_barrier\nglobal_load")
    run(text, waves=2, scalars={2: [0, 1]}, **given)
    with pytest.raises(EmulationError, match="another workgroup"):
        run(text, groups=2, scalars={2: [0, 1]}, **given)


@pytest.mark.parametrize(
    "text",
    [
        "global_atomic_add_f32 v0, v1, s[0:1]",
        "scratch_load_dword v0, off, off",
        "buffer_load_dword v0, v1, s[4:7], 0 idxen",
        "global_load_dword v0, v1, s[0:1] offset:4 unheard",
        "flat_load_dword v0, v[2:3]",
        "global_load_ubyte v0, v1, s[0:1]",
    ],
)
def test_what_is_not_known_raises_by_name(text):
    with pytest.raises(EmulationError, match=text.split()[0]):
        run(text, memory=WORDS)
