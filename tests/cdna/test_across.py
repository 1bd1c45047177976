"""Values that move between lanes, and between vector and scalar registers."""

import numpy as np
import pytest

from cdna.bits import EmulationError
from cdna.snippet import edges, run, scalar, vector

LANE = list(range(64))
# control: source lane, or None where it lies outside the row
MOVES = {
    "quad_perm:[3,2,1,0]": lambda lane: lane // 4 * 4 + 3 - lane % 4,
    "row_shl:1": lambda lane: lane + 1 if lane % 16 < 15 else None,
    "row_shr:4": lambda lane: lane - 4 if lane % 16 >= 4 else None,
    "row_ror:8": lambda lane: lane // 16 * 16 + (lane - 8) % 16,
    "row_mirror": lambda lane: lane // 16 * 16 + 15 - lane % 16,
    "row_half_mirror": lambda lane: lane // 8 * 8 + 7 - lane % 8,
    "row_newbcast:5": lambda lane: lane // 16 * 16 + 5,
    "row_bcast:15": lambda lane: lane // 16 * 16 - 1 if lane >= 16 else None,
    "row_bcast:31": lambda lane: 31 if lane >= 32 else None,
}


@pytest.mark.parametrize("control", MOVES)
@pytest.mark.parametrize("zeros", [False, True])
def test_moves_within_rows(control, zeros):
    """A lane without a source reads zero where the instruction says so, else it is not written."""
    active = np.arange(64) % 7 != 3
    text = f"v_add_u32_dpp v9, v0, v1 {control} row_mask:0xf bank_mask:0xf" + " bound_ctrl:0" * zeros
    m = run(text, vectors={0: np.arange(64) + 100, 1: [1000] * 64, 9: [7] * 64}, active=active)
    expected = []
    for lane in LANE:
        source = MOVES[control](lane)
        source = source if source is not None and active[source] else None
        if not active[lane] or (source is None and not zeros):
            expected.append(7)
        else:
            expected.append(1000 + (0 if source is None else source + 100))
    assert vector(m, 9).tolist() == expected


def test_rows_and_banks_that_are_masked_are_not_written():
    text = "v_mov_b32_dpp v9, v0 row_mirror row_mask:0xa bank_mask:0x5"
    m = run(text, vectors={0: np.arange(64), 9: [7] * 64})
    written = [lane // 16 in (1, 3) and lane // 4 % 4 in (0, 2) for lane in LANE]
    mirrored = [lane // 16 * 16 + 15 - lane % 16 for lane in LANE]
    assert vector(m, 9).tolist() == [lane if yes else 7 for lane, yes in zip(mirrored, written, strict=True)]


def test_first_active_lane_and_a_chosen_one():
    given = {"vectors": {0: edges(0)}, "scalars": {2: 70}}
    m = run("v_readfirstlane_b32 s4, v0\nv_readlane_b32 s5, v0, s2", active=np.arange(64) >= 9, **given)
    assert scalar(m, 4) == edges(0)[9]
    assert scalar(m, 5) == edges(0)[6]  # counted modulo 64
    m = run("v_readfirstlane_b32 s4, v0", active=[False] * 64, **given)
    assert scalar(m, 4) == edges(0)[0]


def test_one_lane_is_written_active_or_not():
    m = run("v_writelane_b32 v9, s2, 5", vectors={9: [7] * 64}, scalars={2: 11}, active=[False] * 64)
    assert vector(m, 9).tolist() == [11 if lane == 5 else 7 for lane in LANE]


def test_ones_below_the_lane():
    low, high = 0xF0F0F0F1, 0x8000FFFF
    text = "v_mbcnt_lo_u32_b32 v8, s2, 3\nv_mbcnt_hi_u32_b32 v9, s3, v8"
    m = run(text, scalars={2: low, 3: high})
    mask = low | high << 32
    assert vector(m, 9).tolist() == [3 + (mask & ((1 << lane) - 1)).bit_count() for lane in LANE]


@pytest.mark.parametrize("size", [16, 32])
def test_odd_rows_change_places_with_even_rows(size):
    m = run(
        f"v_permlane{size}_swap_b32 v0, v1",
        vectors={0: np.arange(64), 1: np.arange(64) + 100},
        arch="gfx950",
    )
    one, two = [], []
    for lane in LANE:
        odd = lane // size % 2
        one.append(lane - size + 100 if odd else lane)
        two.append(lane + 100 if odd else lane + size)
    assert vector(m, 0).tolist() == one
    assert vector(m, 1).tolist() == two


def test_unknown_moves_raise():
    with pytest.raises(EmulationError, match="wave_shl"):
        run("v_mov_b32_dpp v9, v0 wave_shl:1 row_mask:0xf bank_mask:0xf")
