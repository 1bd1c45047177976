"""Configs of the kernels that take a whole layer, whose loops are nested: they are counted, not read.

The tests' interpreter executes one program of each candidate. What its waves executed goes into the same
model as the other kernels' code. `docs/amd.md` says what came of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from cdna_tune import model
from cdna_tune.classes import TOKENS
from cdna_tune.compiled import Code, Counted, Job, compile_all, count_all, launch_of
from cdna_tune.model import Part, Work
from cdna_tune.search import MARGIN, Config, cdiv, identity, plain, usable
from monarch_rocm.codegen.assembly import LDS
from monarch_rocm.codegen.layers import Layer
from monarch_rocm.kernels import space, tuning

# For each kernel features and blocks of the layer that stands for a row of its table, and its layout.
LAYERS = {"fused": (512, 16, "interleaved"), "chained": (1024, 16, "blocked")}
COUNTED = {"fused": 512, "chained": 512}  # tokens of the launch that is executed: a tile or few a program
CLASSES = {
    "lds_exchange": "lds read", "lds_read": "lds read", "lds_write": "lds write", "async": "load",
    "vector": "valu",
}  # fmt: skip


def layer_of(kernel: str, dtype: str, tokens: int) -> Layer:
    features, blocks, layout = LAYERS[kernel]
    return Layer(features, features, blocks, tokens, dtype, layout, kernel)


def limits(kernel: str) -> dict[str, int]:
    """Layers up to this size take the row; larger ones the default, whose tiles fit any of them."""
    features, blocks, _ = LAYERS[kernel]
    return {"out": features, "in": features // blocks}


def candidates(kernel: str, dtype: str, arch: str) -> list[Config]:
    """Configs of the search space with tiles for many tokens, for as many programs as the chip has units,
    or twice as many.

    Left out, for a search of minutes: what cannot hold a tile's hidden features in local memory, and for
    `chained` in float32 more than 64 tokens and other than 4 waves.
    """
    found = []
    features, itemsize = LAYERS[kernel][0], 4 if dtype == "fp32" else 2
    units = model.chip(arch).units
    for config in space.candidates(kernel, rocm=True):
        if kernel == "fused":
            if config["BT"] * features * itemsize <= LDS[arch]:
                found.append(config)
        elif config["BT"] == 64 or (config["BT"] > 64 and dtype != "fp32"):
            if dtype == "fp32" and config["num_warps"] != 4:
                continue
            found += [config | {"PROGRAMS": units * times} for times in (1, 2)]
    return [config for i, config in enumerate(found) if config not in found[:i]]


def job_of(arch: str, kernel: str, dtype: str, config: Config, layer: Layer | None = None, hard=False) -> Job:
    values = tuple((name, value) for name, value in config.items() if name != "PROGRAMS")
    return Job(arch, layer or layer_of(kernel, dtype, COUNTED[kernel]), "forward 1", values, hard)


def part(code: Code, counted: Counted, tiles: float) -> Part:
    """What one wave executes for one tile of tokens; bytes a lane as in the code's text."""
    classes: dict[str, float] = {}
    for name, count in counted.instructions.items():
        name = CLASSES.get(name, name)
        classes[name] = classes.get(name, 0) + count / tiles

    def widths(name: str, executed: float) -> dict[int, float]:
        stand = code.whole[name]
        total = sum(stand.values())
        return {int(width): executed * count / total for width, count in stand.items()} if total else {}

    local = classes.get("lds read", 0) + classes.get("lds write", 0)
    return Part(
        classes,
        {code.mfma: classes.get("mfma", 0)},
        widths("loads", classes.get("load", 0)),
        widths("stores", classes.get("store", 0)),
        widths("lds", local),
    )


def work(kernel: str, dtype: str, config: Config, code: Code, counted: Counted, ran: int) -> Work:
    """The launch for `TOKENS` tokens, of which the counted program took `ran` tiles."""
    features, blocks, _ = LAYERS[kernel]
    size, itemsize = features // blocks, 4 if dtype == "fp32" else 2
    tiles = cdiv(TOKENS, config["BT"])
    programs = min(tiles, config.get("PROGRAMS", tiles))
    whole = part(code, counted, ran)
    loop, once, iterations = None, whole, 1.0
    if kernel == "chained":
        steps = 2 * blocks * cdiv(size, config["BO"]) * cdiv(size, config["BI"])
        shared = {
            name: {key: count / steps for key, count in getattr(whole, name).items()}
            for name in Part.__dataclass_fields__
        }
        loop, once = Part(**shared), Part({}, {}, {}, {}, {})
        iterations = steps * cdiv(tiles, programs)
    moved = itemsize * (2 * TOKENS * features + 2 * features * size)
    return Work(
        programs, config["num_warps"], code.waves * 4 / config["num_warps"], once, loop, iterations,
        config["num_stages"], itemsize, moved, counted.conflicts, counted.lines,
    )  # fmt: skip


def tune(
    arch: str,
    kernel: str,
    dtype: str,
    present: Sequence[dict],
    processes: int,
    say: Callable[[str], None],
) -> dict:
    """The record of a dtype, as `search.tune` makes them."""
    on = model.chip(arch)
    chosen = candidates(kernel, dtype, arch)
    default = default_config(kernel, dtype)
    key = {"kernel": kernel, "dtype": dtype, "max": limits(kernel)}
    now = next((plain(each["config"]) for each in present if identity(each) == identity(key)), default)
    codes: dict[Job, Code] = {}
    counts: dict[Job, Counted] = {}

    def microseconds(config: Config) -> float:
        job = job_of(arch, kernel, dtype, config)
        if not usable(codes[job]) or counts[job].failure:
            return float("inf")
        launch = launch_of(job)
        ran = cdiv(cdiv(COUNTED[kernel], config["BT"]), launch.programs)
        return model.time(on, work(kernel, dtype, config, codes[job], counts[job], ran)).us

    def timed(configs: list[Config]) -> list[tuple[float, Config]]:
        jobs = [job_of(arch, kernel, dtype, config) for config in configs]
        codes.update(compile_all(jobs, processes))
        counts.update(count_all((job for job in jobs if usable(codes[job])), processes))
        found = [(microseconds(config), config) for config in configs]
        return [pair for pair in found if pair[0] < float("inf")]

    ranked = sorted(timed(chosen), key=_order)
    knobs = []
    for number in range(space.rounds(kernel)):
        base_us, base = ranked[0]
        others = space.variants(kernel, number, base, arch)
        found = timed(others)
        same = codes[job_of(arch, kernel, dtype, base)]
        for config in others:
            code = codes[job_of(arch, kernel, dtype, config)]
            us = microseconds(config)
            knobs.append(
                {
                    "options": {name: value for name, value in config.items() if base.get(name) != value},
                    "over": round(us / base_us, 3) if us < float("inf") else None,
                    "waves": [same.waves, code.waves],
                    "registers": [same.registers, code.registers],
                    "spills": code.vector_spills,
                }
            )
        better = [pair for pair in found if pair[0] * MARGIN <= base_us]
        ranked = sorted([*ranked, *better], key=_order)
    say(f"{arch}: {kernel} {dtype}, {len(chosen)} candidates and {len(knobs)} options")

    ((before, _),) = timed([now]) or ((float("inf"), now),)
    for us, config in ranked:
        if before < MARGIN * us:
            us, config = before, now
            break
        if _compiles(arch, kernel, dtype, config, processes):
            break
    counted = counts[job_of(arch, kernel, dtype, config)]
    record = key | {
        "stands": [LAYERS[kernel][0], LAYERS[kernel][0] // LAYERS[kernel][1]],
        "config": config,
        "us": round(us, 2),
        "conflicts": [round(counted.conflicts, 2)],
        "candidates": len(ranked),
        "rank": [pair[1] for pair in ranked].index(config) + 1 if (us, config) in ranked else None,
        "knobs": knobs,
    }
    if config != now:
        record |= {"before": now, "us_before": round(before, 2) if before < float("inf") else None}
    return record


def default_config(kernel: str, dtype: str) -> Config:
    """What every layer without a row of its own takes."""
    return tuning.table(kernel, "default")[1]["4" if dtype == "fp32" else "2"][-1]["config"]


def _compiles(arch: str, kernel: str, dtype: str, config: Config, processes: int) -> bool:
    """Also for tensors that only 64-bit offsets reach, and for odd blocks where the kernel takes them."""
    layer = layer_of(kernel, dtype, COUNTED[kernel])
    jobs = [job_of(arch, kernel, dtype, config, hard=True)]
    if kernel == "chained":
        odd = replace(layer, in_features=1000, out_features=1000, nblocks=16, tokens=TOKENS + 3)
        jobs.append(job_of(arch, kernel, dtype, config, odd))
    return all(usable(code) for _, code in compile_all(jobs, processes))


def _order(pair: tuple[float, Config]) -> tuple[float, list[tuple[str, int]]]:
    return round(pair[0], 3), sorted(pair[1].items())
