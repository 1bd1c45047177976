"""Candidates compiled, in processes of their own, and what the model needs of their code kept on disk.

A key holds all that the code depends on, so that a run that was stopped goes on where it was and a
changed kernel is compiled anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from monarch_rocm.codegen.compiling import compile_launch, start
from monarch_rocm.codegen.layers import Launch, Layer, launches

CACHE = Path(__file__).resolve().parents[2] / "build" / "cdna_tune"
WORDS = (  # of a config, those that are no constant of the kernel
    "PROGRAMS",
    "MIN_STEPS",
)


@dataclass(frozen=True)
class Job:
    """One launch of a layer with another config, for an architecture.

    `hard` compiles it as for tensors that only 64-bit offsets reach.
    """

    arch: str
    layer: Layer
    place: str
    config: tuple[tuple[str, int], ...]
    hard: bool = False


@dataclass(frozen=True)
class Code:
    """What the model needs of a compiled kernel; `failure` where it does not compile."""

    vector_spills: int = 0
    scalar_spills: int = 0
    scratch: int = 0
    registers: int = 0
    lds: int = 0
    waves: float = 0.0
    mfma: str = ""
    whole: dict[str, dict[str, int]] | None = None
    loop: dict[str, dict[str, int]] | None = None
    conflicts: float = 1.0  # as the tests' interpreter counted, where it ran this code
    failure: str = ""

    @property
    def spills(self) -> bool:
        return bool(self.vector_spills or self.scratch)


@cache
def _launches(layer: Layer) -> dict[str, Launch]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a Monarch layer")  # ranks that cost more than dense
        # Whose tables are read does not matter: configs are replaced.
        return {launch.place: launch for launch in launches(layer, "default")}


def launch_of(job: Job) -> Launch:
    """The layer's launch with the job's config."""
    plain = _launches(job.layer)[job.place]
    config = {name: value for name, value in job.config if name not in WORDS}
    if "FULL" in plain.constants:
        config["FULL"] = job.layer.tokens == config["BT"]
    if job.hard:
        config["WIDE"] = True
    return replace(plain, constants={**plain.constants, **config})


def key_of(job: Job, launch: Launch) -> str:
    import triton

    parts = (
        triton.__version__,
        job.arch,
        launch.kernel.cache_key,
        [(str(each.dtype), each.untyped_storage().nbytes() < 2**31) for each in launch.tensors],
        launch.scalars,
        launch.strides,
        sorted(launch.constants.items()),
        job.hard,
    )
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def compile_job(job: Job) -> Code:
    """From the disk where it is there."""
    return _stored(job, ".json", Code, _compile)


def _compile(job: Job, launch: Launch) -> Code:
    from monarch_rocm.codegen.assembly import read

    try:
        made = compile_launch(launch, job.arch, buffers=not job.hard)
    except Exception as error:  # whatever a compiler may raise: the candidate is none
        return Code(failure=f"{type(error).__name__}: {error}"[:300])
    report = read(made.asm["amdgcn"], job.arch, made.metadata.shared, made.metadata.num_warps)

    def part(code) -> dict[str, dict[str, int]]:
        lds = {width: code.lds_reads.get(width, 0) + code.lds_writes.get(width, 0)
               for width in {*code.lds_reads, *code.lds_writes}}  # fmt: skip
        return {"classes": code.classes, "loads": code.loads, "stores": code.stores, "lds": lds}

    return Code(
        report.vector_spills,
        report.scalar_spills,
        report.scratch,
        report.vgpr + report.agpr,
        report.lds,
        report.waves,
        next(iter(report.mfma), ""),
        part(report.whole),
        part(report.loop) if report.loop else None,
    )


@dataclass(frozen=True)
class Counted:
    """What the tests' interpreter counted in the first workgroup: instructions of a wave by class, clocks
    of local memory and cache lines over the least; `failure` where it found the code wrong.
    """

    conflicts: float = 1.0
    lines: float = 1.0
    instructions: dict[str, float] | None = None
    failure: str = ""


def count_job(job: Job) -> Counted:
    """From the disk where it is there."""
    return _stored(job, ".counted.json", Counted, _count)


def _count(job: Job, launch: Launch) -> Counted:
    from cdna import counts

    try:
        counters = counts.run(launch, job.arch, workgroups=1)
        waves = dict(job.config)["num_warps"]
        instructions = {name: count / waves for name, count in counters.instructions.items()}
        return Counted(counters.conflict_factor(), counters.line_factor(), instructions)
    except Exception as error:  # whatever the interpreter raises: the candidate is none
        return Counted(failure=f"{type(error).__name__}: {error}"[:300])


Kept = TypeVar("Kept", Code, Counted)


def _stored(job: Job, ending: str, kind: type[Kept], make: Callable[[Job, Launch], Kept]) -> Kept:
    launch = launch_of(job)
    key = key_of(job, launch)
    file = CACHE / key[:2] / f"{key}{ending}"
    try:
        return kind(**json.loads(file.read_text()))
    except (FileNotFoundError, ValueError):
        pass
    found = make(job, launch)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(asdict(found)))
    part.replace(file)  # whoever reads sees all of it or nothing
    return found


def compile_all(jobs: Iterable[Job], processes: int) -> Iterator[tuple[Job, Code]]:
    """Each job once, in order."""
    yield from _all(compile_job, jobs, processes)


def count_all(jobs: Iterable[Job], processes: int) -> Iterator[tuple[Job, Counted]]:
    """Likewise."""
    yield from _all(count_job, jobs, processes)


def _all(function: Callable[[Job], Any], jobs: Iterable[Job], processes: int) -> Iterator[tuple[Job, Any]]:
    unique = list(dict.fromkeys(jobs))
    if unique:
        with ProcessPoolExecutor(processes, get_context("spawn"), start) as pool:
            yield from zip(unique, pool.map(function, unique), strict=True)
