"""Orders of programs for GPUs of several L2 caches: each tile is done once, and fewer are fetched.

How often tiles are fetched is a model: every chiplet has a cache of 4 MiB that keeps what was used
last, and its programs run in step, as many at once as it has compute units. Nothing here ran on
such a GPU.
"""

from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", minversion="3.4")
from support import DEVICE

from monarch_rocm.kernels import bdmm, bdmm_wgrad, bdmv, order, tuning

CHIPLETS = (1, 2, 3, 4, 6, 8)  # MI300X has 8, MI300A 6, partitions of either fewer
L2 = 4 * 2**20


@pytest.mark.parametrize("xcds", CHIPLETS)
def test_every_place_is_taken_once_and_a_chiplets_places_are_a_run(xcds, monkeypatch):
    """For each number of programs from 1 to 4096, those too that the chiplets do not divide."""
    monkeypatch.setattr(order, "min", np.minimum, raising=False)
    for programs in range(1, 4097):
        places = order.on_chiplet.fn(np.arange(programs), programs, xcds)
        assert (np.sort(places) == np.arange(programs)).all()
        for chiplet in range(xcds):
            assert (np.diff(places[chiplet::xcds]) == 1).all()


@pytest.mark.parametrize("columns", [1, 2, 3, 7, 8, 32, 100])
def test_groups_reach_every_tile_once(columns):
    """Any number of rows: none, one group, a rest that fills none."""
    for rows in (*range(1, 41), *range(41, 4096 // columns + 1, 37)):
        tiles = [order.in_groups.fn(place, rows, columns, 8) for place in range(rows * columns)]
        assert sorted(tiles) == [(row, column) for row in range(rows) for column in range(columns)]


def test_chiplets_come_from_the_architecture_in_one_place(monkeypatch):
    """Elsewhere than on MI300 and MI350 there is one, so that the code there has no order in it."""

    def count(arch, units=None):
        monkeypatch.setattr(tuning, "architecture", lambda device: arch)
        properties = SimpleNamespace(multi_processor_count=units)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        tuning._chiplets.cache_clear()
        return tuning.chiplets(torch.device("cpu" if units is None else "cuda:0"))

    assert [count(arch) for arch in ("default", "sm90", "gfx90a", "gfx942", "gfx950")] == [1, 1, 1, 8, 8]
    # MI300X, MI300A, and an MI300X whose every chiplet is a device of its own; MI355X.
    assert [count("gfx942", units) for units in (304, 228, 38)] == [8, 6, 1]
    assert count("gfx950", 256) == 8
    tuning._chiplets.cache_clear()


STAGE = {"BT": 16, "BO": 16, "BI": 16, "num_warps": 4, "num_stages": 1}
SUMS = STAGE | {"PROGRAMS": 40, "MIN_STEPS": 1}


def stage(launcher, tokens, out):
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*size, generator=generator).to(DEVICE) for size in ((tokens, 90), (3, out, 30)))
    return launcher(x, w, None, 3 * out, 1, out, False, STAGE)


def weight_gradient(tokens, out):
    generator = torch.Generator().manual_seed(0)
    g, a = (torch.randn(tokens, 3 * size, generator=generator).to(DEVICE) for size in (out, 30))
    return bdmm_wgrad.bdmm_wgrad(g, a, 3, out, 30, 1, 1, SUMS)


KERNELS = {
    "bdmm": lambda tokens, out: stage(bdmm.bdmm, tokens, out),
    "bdmv": lambda tokens, out: stage(bdmv.bdmv, min(tokens, 16), out),
    "bdmm_wgrad": weight_gradient,
}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("tokens", "out"), [(1, 40), (100, 40), (150, 40), (128, 10)])
def test_kernels_compute_the_same_in_any_order(kernel, tokens, out, monkeypatch, poison):
    """Whole groups of tiles, groups with a rest, too few rows for one; a tile a block and several."""
    plain = KERNELS[kernel](tokens, out)
    for xcds in (3, 8):
        monkeypatch.setattr(tuning, "chiplets", lambda device, xcds=xcds: xcds)
        assert torch.equal(KERNELS[kernel](tokens, out), plain)


def fetched(tiles_of, programs, xcds=8, at_once=38):
    """Bytes that all L2 caches fetch, where `tiles_of` gives a program's (tile, bytes), step by step."""
    total = 0
    for chiplet in range(xcds):
        mine, kept, size = range(chiplet, programs, xcds), OrderedDict(), 0
        for start in range(0, len(mine), at_once):
            for step in zip(*map(tiles_of, mine[start : start + at_once]), strict=True):
                for tile, bytes_ in (each for tiles in step for each in tiles):
                    if tile in kept:
                        kept.move_to_end(tile)
                        continue
                    kept[tile] = bytes_
                    total, size = total + bytes_, size + bytes_
                    while size > L2:
                        size -= kept.popitem(last=False)[1]
    return total


def stage_fetches(tokens, blocks, n_out, n_in, ordered):
    """Of a product of blocks in tiles of 128 by 128, over the bytes that must be read once."""
    rows, tiles, steps = -(-tokens // 128), -(-n_out // 128), range(0, n_in, 64)
    columns = blocks * tiles

    def tiles_of(pid):
        row, column = divmod(pid, columns)
        if ordered:
            place = order.on_chiplet.fn(pid, rows * columns, 8)
            row, column = order.in_groups.fn(place, rows, columns, 8)
        block, out = divmod(column, tiles)
        return [((("x", row, block, i), 2**14), (("w", block, out, i), 2**14)) for i in steps]

    least = (tokens * blocks * n_in + blocks * n_in * n_out) * 2
    return fetched(tiles_of, rows * columns) / least


def gradient_fetches(tokens, blocks, n_out, n_in, ordered):
    """Of a weight gradient in tiles of 128 by 128, its sums split as the launcher splits them."""
    outs, ins, steps = -(-n_out // 128), -(-n_in // 128), tokens // 64
    splits = max(1, 512 // (blocks * outs * ins))
    programs = blocks * outs * ins * splits

    def tiles_of(pid):
        place = order.on_chiplet.fn(pid, programs, 8) if ordered else pid
        i, o, b = place % ins, place // ins % outs, place // (ins * outs) % blocks
        first = place // (ins * outs * blocks) * (steps // splits)
        return [
            ((("g", b, o, first + t), 2**14), (("a", b, i, first + t), 2**14)) for t in range(steps // splits)
        ]

    return fetched(tiles_of, programs) / (tokens * blocks * (n_out + n_in) * 2)


# Blocks, outputs and inputs of a block: times the least that is fetched in plain order and in ours, by
# a product and by a weight gradient.
SHAPES = {
    (4, 1024, 1024): ((7.9, 2.4), (4.6, 1.6)),
    (8, 512, 512): ((4.2, 1.4), (3.0, 1.2)),
    (16, 256, 256): ((2.0, 1.2), (2.0, 1.0)),
    (4, 3584, 1024): ((13.2, 3.7), (6.6, 2.2)),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fewer_tiles_are_fetched(shape):
    """The table of docs/amd.md: 8192 tokens, bfloat16, eight chiplets of 38 compute units."""
    for model, expected in zip((stage_fetches, gradient_fetches), SHAPES[shape], strict=True):
        found = [model(8192, *shape, ordered) for ordered in (False, True)]
        assert found == pytest.approx(expected, abs=0.06)
