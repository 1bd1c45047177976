"""How long a launch may take, from its compiled code and a chip's public rates: a model, no measurement.

A wave's clocks are added up by the pipe that they occupy: matrix and vector units of its SIMD, local memory
and vector memory of its compute unit. Three times then bound a launch from below:

- *pipes*: the fullest pipe of the compute unit with the most programs (this holds the tail, where programs
  do not divide by compute units);
- *latency*: as many rounds as programs need at this occupancy, each as long as one wave takes alone:
  all its instructions in order, its matrix instructions, and what of each load's latency the stages
  before do not hide;
- *memory*: each byte once from memory, each requested byte from the cache behind the units.

They overlap, but not wholly: the sum is that of powers of `P`, so that the largest decides and others
still count. Not modelled: caches' hits, clocks under load, hazards, other launches.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

P = 3.0
BARRIER = 40  # clocks that waves wait for each other
LDS_LATENCY = 64


@dataclass(frozen=True)
class Chip:
    """Rates of a device: `chips.json` says of what and from where."""

    name: str
    units: int
    simds: int
    lanes: int
    clock: float
    flops: dict[str, int]
    lds: int
    l1: int
    line: int
    l2: float
    memory: float
    fraction: float
    latency: int
    launch: float
    issue: int
    valu: int
    source: str


@cache
def chip(arch: str) -> Chip:
    """The one that stands for an architecture."""
    chips = json.loads((Path(__file__).parent / "chips.json").read_text())["chips"]
    return Chip(**chips[arch])


@dataclass(frozen=True)
class Part:
    """Instructions of one wave: by class, matrix instructions by name, and by bytes a lane moves."""

    classes: Mapping[str, int]
    mfma: Mapping[str, int]
    loads: Mapping[int, int]
    stores: Mapping[int, int]
    lds: Mapping[int, int]

    @property
    def instructions(self) -> int:
        return sum(self.classes.values())


@dataclass(frozen=True)
class Work:
    """One launch.

    `once` runs one time in each wave and `loop` `iterations` times; `resident` programs of `warps` waves
    fit on a compute unit; `stages` is how many steps are in flight; `bytes` is what the tensors hold;
    `conflicts` multiplies the clocks of local memory, and `lines` the requested bytes, where whole cache
    lines must be moved for parts of them.
    """

    programs: int
    warps: int
    resident: float
    once: Part
    loop: Part | None
    iterations: float
    stages: int
    itemsize: int
    bytes: int
    conflicts: float = 1.0
    lines: float = 1.0


@dataclass(frozen=True)
class Time:
    """Modelled microseconds, and the bounds that they are made of."""

    us: float
    pipes: float
    latency: float
    memory: float


def matrix_clocks(name: str, count: float, on: Chip, itemsize: int) -> float:
    """Clocks of a SIMD's matrix unit for `count` instructions such as v_mfma_f32_32x32x8_bf16."""
    found = re.search(r"(\d+)x(\d+)x(\d+)", name)
    if found is None:
        raise ValueError(f"what shape has {name}?")
    m, n, k = map(int, found.groups())
    return count * 2 * m * n * k / (on.flops[str(itemsize)] / on.simds)


def _clocks(part: Part, on: Chip, itemsize: int, conflicts: float) -> dict[str, float]:
    """What a wave occupies: matrix and vector pipes of its SIMD, the others of its compute unit."""
    moved = [*part.loads.items(), *part.stores.items()]
    # The address unit takes 16 lanes a clock, however narrow they are.
    narrowest = on.lanes / 16
    return {
        "matrix": sum(matrix_clocks(name, count, on, itemsize) for name, count in part.mfma.items()),
        "vector": on.valu * part.classes.get("valu", 0),
        "lds": conflicts
        * sum(count * max(2.0, on.lanes * width / on.lds) for width, count in part.lds.items()),
        "l1": sum(count * max(narrowest, on.lanes * width / on.l1) for width, count in moved),
    }


def _alone(part: Part, clocks: Mapping[str, float], on: Chip) -> float:
    """Clocks of a wave with a SIMD of its own, without the latency of memory."""
    waits = BARRIER * part.classes.get("barrier", 0)
    if part.lds:
        waits += LDS_LATENCY
    return on.issue * part.instructions + clocks["matrix"] + waits


def time(on: Chip, work: Work) -> Time:
    """The model."""
    once = _clocks(work.once, on, work.itemsize, work.conflicts)
    alone = _alone(work.once, once, on) + on.latency
    total = dict(once)
    requested = _moved(work.once)
    if work.loop is not None:
        step = _clocks(work.loop, on, work.itemsize, work.conflicts)
        total = {pipe: once[pipe] + work.iterations * step[pipe] for pipe in once}
        body = _alone(work.loop, step, on)
        exposed = max(0.0, on.latency - (work.stages - 1) * body) if work.loop.loads else 0.0
        alone += work.iterations * (body + exposed)
        requested += work.iterations * _moved(work.loop)
    fullest = -(-work.programs // on.units)
    waves = fullest * work.warps
    on_simd = -(-waves // on.simds)
    pipes = max(on_simd * max(total["matrix"], total["vector"]), waves * max(total["lds"], total["l1"]))
    rounds = -(-work.programs // max(1, int(on.units * work.resident)))
    lanes = work.programs * work.warps * on.lanes
    bounds = (
        pipes / on.clock,
        rounds * alone / on.clock,
        max(work.bytes / (on.memory * on.fraction), requested * lanes * work.lines / (on.l2 * on.fraction)),
    )
    us = sum(bound**P for bound in bounds) ** (1 / P) * 1e6 + on.launch
    return Time(us, *(bound * 1e6 for bound in bounds))


def _moved(part: Part) -> float:
    """Bytes that a lane loads and stores."""
    return sum(width * count for each in (part.loads, part.stores) for width, count in each.items())


# Neither rocBLAS nor hipBLASLt could be run or read: a batched product is assumed to reach this part of
# the roofline, about what cuBLAS reached of the H200's in 4 blocks (212 us where FLOPs alone take 174).
VENDOR = 0.8


def batched_product(on: Chip, flops: float, moved: float, itemsize: int) -> float:
    """Microseconds of a library's batched product, which is assumed to know its best tiles."""
    peak = on.units * on.clock * on.flops[str(itemsize)]
    return max(flops / (peak * VENDOR), moved / (on.memory * on.fraction)) * 1e6 + on.launch


def copy(on: Chip, moved: float) -> float:
    """Microseconds of a permuting copy, as fast as memory allows: better than such copies are."""
    return moved / (on.memory * on.fraction) * 1e6 + on.launch
