"""`s_waitcnt`: what a program may not touch until it has waited."""

import numpy as np
import pytest

from cdna.bits import EmulationError
from cdna.snippet import run, vector

LANE = np.arange(64)
WORDS = np.arange(512, dtype=np.uint32) + 1000
GIVEN = {"vectors": {0: LANE * 4, 5: [0] * 64}, "memory": WORDS}
LOAD = "global_load_dword v{}, v0, s[0:1] offset:{}"
# Copies of 256 bytes each, to the LDS at 0 and at 256.
COPIES = """
s_mov_b32 m0, 0
global_load_lds_dword v0, s[0:1]
s_mov_b32 m0, 0x100
global_load_lds_dword v0, s[0:1] offset:0
"""


def lines(*parts):
    return "\n".join(parts)


def test_loads_come_back_in_order():
    """With two under way, a wait for one is a wait for the first."""
    loads = lines(LOAD.format(8, 0), LOAD.format(9, 4))
    m = run(lines(loads, "s_waitcnt vmcnt(1)", "v_mov_b32_e32 v1, v8"), **GIVEN)
    assert (vector(m, 1) == WORDS[:64]).all()
    with pytest.raises(EmulationError, match=r"v9 is used before the load.*vmcnt"):
        run(lines(loads, "s_waitcnt vmcnt(1)", "v_mov_b32_e32 v1, v9"), **GIVEN)
    run(lines(loads, "s_waitcnt vmcnt(0)", "v_mov_b32_e32 v1, v9"), **GIVEN)


@pytest.mark.parametrize(
    "use",
    [
        "v_mov_b32_e32 v1, v8",
        "v_mov_b32_e32 v8, 0",
        "v_readfirstlane_b32 s4, v8",
        "global_store_dword v0, v8, s[0:1]",
        "v_mfma_f32_16x16x4_f32 v[20:23], v8, v5, 0",
        "v_mfma_f32_16x16x4_f32 v[8:11], v5, v5, 0",
    ],
)
def test_every_use_of_a_register_counts(use):
    with pytest.raises(EmulationError, match="v8 is used before"):
        run(lines(LOAD.format(8, 0), use), **GIVEN)
    run(lines(LOAD.format(8, 0), "s_waitcnt vmcnt(0)", use), **GIVEN)


def test_stores_count_among_loads():
    text = lines(
        LOAD.format(8, 0), "global_store_dword v0, v5, s[0:1] offset:1024", "{}", "v_mov_b32_e32 v1, v8"
    )
    run(text.format("s_waitcnt vmcnt(1)"), **GIVEN)
    with pytest.raises(EmulationError, match="v8 is used before"):
        run(text.format("s_waitcnt vmcnt(2)"), **GIVEN)


def test_reads_of_lds_count_by_themselves():
    text = lines("ds_read_b32 v8, v0", "ds_read_b32 v9, v0", LOAD.format(10, 0), "{}", "v_mov_b32_e32 v1, v8")
    run(text.format("s_waitcnt lgkmcnt(1)"), lds=256, **GIVEN)
    for wait in ("s_waitcnt lgkmcnt(2)", "s_waitcnt vmcnt(0)"):
        with pytest.raises(EmulationError, match=r"v8 is used before.*lgkmcnt"):
            run(text.format(wait), lds=256, **GIVEN)


def test_constants_come_back_in_any_order():
    """So that a wait for all but one says nothing."""
    text = lines("ds_read_b32 v8, v0", "s_load_dword s4, s[2:3], 0x0", "{}", "v_mov_b32_e32 v1, v8")
    machine = run("s_nop 0", **GIVEN)
    where = machine.heap.arguments_start + 0x7F0000000000
    given = {**GIVEN, "scalars": {2: where & 0xFFFFFFFF, 3: where >> 32}}
    run(text.format("s_waitcnt lgkmcnt(0)"), lds=256, **given)
    with pytest.raises(EmulationError, match="v8 is used before"):
        run(text.format("s_waitcnt lgkmcnt(1)"), lds=256, **given)
    with pytest.raises(EmulationError, match="s4 is used before"):
        run("s_load_dword s4, s[2:3], 0x0\ns_add_u32 s5, s4, 1", **given)


@pytest.mark.parametrize(("wait", "enough"), [(0, True), (1, True), (2, False)])
def test_copies_into_lds_are_waited_for(wait, enough):
    text = COPIES + f"s_waitcnt vmcnt({wait})\nds_read_b32 v8, v0"
    if enough:
        assert (vector(run(text, lds=512, **GIVEN), 8) == WORDS[:64]).all()
    else:
        with pytest.raises(EmulationError, match="read before the write was waited for"):
            run(text, lds=512, **GIVEN)


def test_copies_by_lane_and_instruction_offset():
    """Lanes lie side by side from M0 on, whatever they read, and those out of bounds bring zero."""
    text = """
    s_mov_b32 s4, s0
    s_mov_b32 s5, s1
    s_mov_b32 s6, 128
    s_mov_b32 s7, 0
    s_movk_i32 m0, 0x40
    buffer_load_dword v1, s[4:7], 0 offen lds
    s_waitcnt vmcnt(0)
    ds_read_b32 v8, v0 offset:64
    """
    backwards = {0: LANE * 4, 1: LANE[::-1] * 4}
    m = run(text, vectors=backwards, memory=WORDS, lds=512)
    assert (vector(m, 8) == np.where(LANE >= 32, WORDS[63 - LANE], 0)).all()


def test_a_copy_is_not_overwritten_before_it_arrives():
    with pytest.raises(EmulationError, match="copy that was not waited for"):
        run(COPIES + "ds_write_b32 v0, v0", lds=512, **GIVEN)


# Each of two waves reads a place and then copies to its own, which lies at s2.
OVERWRITE = "ds_read_b32 v9, v1\n{}\ns_mov_b32 m0, s2\nglobal_load_lds_dword v0, s[0:1]"


def overwrite(between, read):
    vectors = {0: LANE * 4, 1: np.arange(128).reshape(2, 64)[read] * 4}
    return run(
        OVERWRITE.format(between), vectors, {2: [0, 256]}, memory=WORDS, lds=512, waves=2, arch="gfx950"
    )


def test_a_copy_waits_at_a_barrier_for_what_another_wave_reads():
    others = [1, 0]
    overwrite("s_waitcnt lgkmcnt(0)\ns_barrier", others)
    with pytest.raises(EmulationError, match="race, a write to what another wave read, no barrier"):
        overwrite("s_waitcnt lgkmcnt(0)", others)
    with pytest.raises(EmulationError, match="another wave's read is not waited for"):
        overwrite("s_barrier", others)
    overwrite("s_waitcnt lgkmcnt(0)", [0, 1])  # each wave its own place


@pytest.mark.parametrize("text", ["s_waitcnt 0", "s_waitcnt foo(1)", "s_waitcnt_depctr 0xffe3"])
def test_unknown_waits_raise(text):
    with pytest.raises(EmulationError, match="s_waitcnt"):
        run(text)


def test_no_more_are_on_their_way_than_the_counter_counts():
    stores = ["global_store_dword v0, v5, s[0:1] offset:1024"] * 63
    text = lines(LOAD.format(8, 0), *stores, "v_mov_b32_e32 v1, v8")
    assert (vector(run(text, **GIVEN), 1) == WORDS[:64]).all()
    text = lines(LOAD.format(8, 0), *stores[1:], "v_mov_b32_e32 v1, v8")
    with pytest.raises(EmulationError, match="v8 is used before"):
        run(text, **GIVEN)
