"""LDS: reads and writes of all widths, exchanges, races between waves, and the model of its banks."""

import numpy as np
import pytest

from cdna import banks
from cdna.bits import EmulationError
from cdna.snippet import edges, run, vector

LANE = np.arange(64)
WIDTHS = {"32": 1, "64": 2, "96": 3, "128": 4}
WAIT = "\ns_waitcnt lgkmcnt(0)\n"


def registers(first, count):
    return f"v[{first}:{first + count - 1}]" if count > 1 else f"v{first}"


@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_written_is_read(width):
    """Lane l writes place l and reads place 63 - l."""
    count = WIDTHS[width]
    values = {8 + k: edges(k) for k in range(count)}
    text = f"ds_write_b{width} v0, {registers(8, count)} offset:16{WAIT}"
    text += f"ds_read_b{width} {registers(20, count)}, v1 offset:16"
    at = LANE * 4 * count
    m = run(text, vectors={0: at, 1: at[::-1], **values}, lds=2048)
    for k in range(count):
        assert (vector(m, 20 + k) == values[8 + k][::-1]).all()


@pytest.mark.parametrize(("width", "step"), [("b32", 4), ("b64", 8), ("st64_b32", 256), ("st64_b64", 512)])
def test_two_places_at_once(width, step):
    count = 2 if width.endswith("64") else 1
    size = 4 * count
    values = {8 + k: edges(k) for k in range(2 * count)}
    one, two = (step, 3 * step) if "st64" in width else (64 * step, 130 * step)
    stride, kind = ("st64", width[5:]) if "st64" in width else ("", width)
    places = f"offset0:{one // step} offset1:{two // step}"
    text = f"ds_write2{stride}_{kind} v0, {registers(8, count)}, {registers(8 + count, count)} {places}{WAIT}"
    places = f"offset0:{two // step} offset1:{one // step}"
    text += f"ds_read2{stride}_{kind} {registers(20, 2 * count)}, v0 {places}"
    m = run(text, vectors={0: LANE * size, **values}, lds=4096)
    for k in range(count):
        assert (vector(m, 20 + k) == values[8 + count + k]).all()
        assert (vector(m, 20 + count + k) == values[8 + k]).all()


def test_narrow_reads_and_writes():
    a = edges(0)
    start = f"ds_write_b32 v0, v8{WAIT}"
    given = {"vectors": {0: LANE * 4, 8: a, 9: [0x55555555] * 64}, "lds": 256}
    for text, expected in {
        "ds_read_u16 v9, v0 offset:2": a >> 16,
        "ds_read_i16 v9, v0": a.astype(np.uint16).view(np.int16).astype(np.int32).view(np.uint32),
        "ds_read_u8 v9, v0 offset:1": a >> 8 & 255,
        "ds_read_i8 v9, v0 offset:3": (a.view(np.int32) >> 24).view(np.uint32),
        "ds_read_u16_d16 v9, v0": a & 0xFFFF | 0x55550000,
        "ds_read_u16_d16_hi v9, v0": a << 16 | 0x5555,
    }.items():
        assert (vector(run(start + text, **given), 9) == expected).all(), text
    for text, expected in {
        "ds_write_b16 v0, v9 offset:2": a & 0xFFFF | 0x55550000,
        "ds_write_b16_d16_hi v0, v9": a & 0xFFFF0000 | 0x5555,
        "ds_write_b8 v0, v9 offset:1": a & 0xFFFF00FF | 0x5500,
    }.items():
        m = run(start + text + WAIT + "ds_read_b32 v10, v0", **given)
        assert (vector(m, 10) == expected).all(), text


def test_a_transposing_read():
    """gfx950: 16 lanes hold the addresses of a tile of 4 rows and 16 columns, and get its columns."""
    tile = np.arange(4 * 64, dtype=np.uint16).reshape(4, 4, 16)  # groups of lanes, rows, columns
    words = tile.reshape(64, 4).view(np.uint32)
    text = f"ds_write_b64 v0, v[8:9]{WAIT}ds_read_b64_tr_b16 v[10:11], v0"
    m = run(text, vectors={0: LANE * 8, 8: words[:, 0], 9: words[:, 1]}, lds=512, arch="gfx950")
    got = np.stack([vector(m, 10), vector(m, 11)], 1).copy().view(np.uint16)
    for lane in range(64):
        assert got[lane].tolist() == tile[lane // 16, :, lane % 16].tolist()


def test_exchanges_between_lanes():
    a, active = edges(0), LANE % 5 != 2
    to = np.random.default_rng(0).permutation(64)
    m = run("ds_bpermute_b32 v9, v0, v1", vectors={0: 4 * to, 1: a, 9: [7] * 64}, active=active)
    assert (vector(m, 9) == np.where(active, np.where(active[to], a[to], 0), 7)).all()
    m = run("ds_permute_b32 v9, v0, v1", vectors={0: 4 * to, 1: a})
    assert (vector(m, 9)[to] == a).all()
    for pattern, source in {
        "swizzle(SWAP,16)": LANE ^ 16,
        "swizzle(REVERSE,8)": LANE ^ 7,
        "swizzle(QUAD_PERM,3,0,1,2)": LANE // 4 * 4 + (LANE - 1) % 4,
        "swizzle(BROADCAST,8,3)": LANE // 8 * 8 + 3,
        "0x401f": LANE ^ 16,
    }.items():
        m = run(f"ds_swizzle_b32 v9, v1 offset:{pattern}", vectors={1: a})
        assert (vector(m, 9) == a[source]).all(), pattern


def test_bounds_and_addresses_that_wrap():
    """An address below zero is brought back by the offset; the last byte must lie within."""
    m = run(f"ds_write_b32 v0, v0 offset:512{WAIT}", vectors={0: (LANE * 4 - 512) & 0xFFFFFFFF}, lds=256)
    assert (m.lds.bytes[0].view(np.uint32) == (LANE * 4 - 512) & 0xFFFFFFFF).all()
    for text in ("ds_write_b32 v0, v0", "ds_read_b32 v1, v0"):
        with pytest.raises(EmulationError, match="outside the LDS"):
            run(text, vectors={0: LANE * 4}, lds=252)
    with pytest.raises(EmulationError, match="misaligned"):
        run("ds_read_b32 v1, v0", vectors={0: LANE * 4 + 2}, lds=512)


# Two waves: each writes its place, then reads the other's.
WRITE, READ = "ds_write_b32 v0, v8", "ds_read_b32 v9, v1"
PLACES = {
    0: np.arange(128).reshape(2, 64) * 4,
    1: np.arange(128).reshape(2, 64)[::-1] * 4,
    8: np.arange(128).reshape(2, 64),
}


def exchange(*lines, arch="gfx942"):
    return run("\n".join(line.strip() for line in lines), vectors=PLACES, lds=512, waves=2, arch=arch)


def test_waves_exchange_values_across_a_barrier():
    m = exchange(WRITE, WAIT, "s_barrier", READ)
    assert (m.registers.vector_file[9] == PLACES[8][::-1]).all()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((WRITE, WAIT, READ), "race, a read of what another wave wrote"),
        ((READ, "s_waitcnt lgkmcnt(0)", WRITE), "race, a write to what another wave read"),
        (("ds_write_b32 v0, v8", WAIT, "ds_write_b32 v1, v8"), "write different values"),
        ((WRITE, "s_barrier", READ), "read before the write was waited for"),
        ((READ, "s_barrier", WRITE), "another wave's read is not waited for"),
        # A wait behind the barrier is one that the other wave knows nothing of.
        ((WRITE, "s_barrier", WAIT, READ), "read before the write was waited for"),
        ((READ, "s_barrier", WAIT, WRITE), "another wave's read is not waited for"),
        (("v_mov_b32_e32 v0, 0", WRITE), "write different values"),
    ],
)
def test_races_raise(lines, message):
    with pytest.raises(EmulationError, match=message):
        exchange(*lines)


def test_lanes_may_write_the_same_value_to_one_place():
    exchange("v_mov_b32_e32 v0, 0", "v_mov_b32_e32 v8, 5", WRITE)


def test_a_wave_may_read_what_it_wrote_itself():
    exchange(WRITE, "ds_read_b32 v9, v0")


def test_half_words_of_two_waves_do_not_collide():
    places = {0: np.arange(128).reshape(64, 2).T * 2, 8: PLACES[8]}
    text = f"ds_write_b16 v0, v8{WAIT}ds_read_u16 v9, v0"
    m = run(text, vectors=places, lds=256, waves=2)
    assert (m.registers.vector_file[9] == PLACES[8]).all()


def test_a_wave_that_has_ended_keeps_nobody_waiting():
    m = run(
        "s_cmp_eq_u32 s2, 0\ns_cbranch_scc1 end\ns_barrier\ns_mov_b32 s3, 7\nend:\ns_nop 0",
        scalars={2: [0, 1], 3: [0, 0]},
        waves=2,
    )
    assert m.registers.scalar_file[3].tolist() == [0, 7]


def test_reading_what_no_wave_wrote_gives_nan():
    m = run("ds_read_b32 v9, v0", vectors={0: LANE * 4}, lds=256)
    assert np.isnan(vector(m, 9, np.float32)).all()


@pytest.mark.parametrize(
    ("size", "arch", "address", "factor"),
    [
        (4, "gfx942", LANE * 4, 1),
        (4, "gfx942", LANE * 0, 1),  # one word for all
        (4, "gfx942", LANE * 8, 2),
        (4, "gfx942", LANE * 128, 32),
        (4, "gfx950", LANE * 128, 32),
        (4, "gfx950", LANE * 256, 64),
        (8, "gfx942", LANE * 8, 1),
        (8, "gfx942", LANE * 64, 8),
        (16, "gfx942", LANE * 16, 1),
        (16, "gfx950", LANE * 16, 1),
        (16, "gfx942", LANE * 128, 8),
        (2, "gfx942", LANE * 2, 1),
    ],
)
def test_banks(size, arch, address, factor):
    """How much longer an access takes than one without conflicts."""
    every = np.ones((1, 64), bool)
    clocks, least = banks.clocks(address[None], every, size, 64 if arch == "gfx950" else 32)
    assert clocks == factor * least


def test_every_lane_is_served_once():
    for size in (2, 4, 8, 12, 16):
        for count in (32, 64):
            assert sorted(np.concatenate(banks.groups(size, count))) == list(range(64))


@pytest.mark.parametrize(
    "text", ["ds_add_u32 v0, v1", "ds_read_b64_tr_b8 v[0:1], v2", "ds_read_b32 v0, v1 gds"]
)
def test_what_is_not_known_raises_by_name(text):
    with pytest.raises(EmulationError, match=text.split()[0]):
        run(text, lds=256)
