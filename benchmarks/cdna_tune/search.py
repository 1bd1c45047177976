"""Candidates to tables: compile, drop what spills, rank by the model, and write the winners."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from cdna_tune import model
from cdna_tune.classes import FEATURES, NO_LIMIT, TOKENS, Class, Place, candidates, must_compile, ranked_by
from cdna_tune.compiled import Code, Job, compile_all
from cdna_tune.model import Part, Work

Config = dict[str, int]
Compile = Callable[[list[Job]], dict[Job, Code]]
MIN_STEPS = 4
FINALISTS = 4
# Accesses of local memory of less than 4 bytes a lane count so much more: each is an instruction with an
# address and a place in a register of its own, whose cost beside matrix instructions is not modelled.
NARROW = 1.25


def cdiv(size: int, tile: int) -> int:
    return -(-size // tile)


def part(counts: dict[str, dict[str, int]], mfma: str) -> Part:
    """As the model takes it; JSON's keys are strings."""

    def widths(name: str) -> dict[int, int]:
        return {int(width): count for width, count in counts[name].items()}

    matrix = counts["classes"].get("mfma", 0)
    products = {mfma: matrix} if matrix else {}
    return Part(counts["classes"], products, widths("loads"), widths("stores"), widths("lds"))


def without(whole: Part, loop: Part) -> Part:
    """What stands outside of the loop."""

    def less(a, b):
        return {name: count - b.get(name, 0) for name, count in a.items()}

    return Part(*(less(getattr(whole, name), getattr(loop, name)) for name in Part.__dataclass_fields__))


def iterations(code: Code, whole: Part, loop: Part, products: float, steps: int) -> float:
    """How often the loop runs: as often as it takes for the matrix instructions that a wave needs.

    A compiler peels and unrolls steps, so that `steps` itself tells only where there are none.
    """
    inside, all_of = sum(loop.mfma.values()), sum(whole.mfma.values())
    if not inside:
        return steps
    return max(1.0, (products - (all_of - inside)) / inside)


# Along which side of its tiles each launch reads and writes runs: hidden features lie token by token.
RUNS = {
    "bdmm": {
        "forward 1": ("BI", "BI", "BT"),
        "forward 2": ("BT", "BI", "BO"),
        "backward 3": ("BI", "BO", "BT"),
        "backward 5": ("BT", "BO", "BO"),
    },
    "bdmm_wgrad": {"backward 4": ("BT", "BI"), "backward 2": ("BO", "BT")},
}


def lines(each: Class, config: Config, place: str, line: int) -> float:
    """Bytes of whole cache lines over those of a tile's runs, in the mean of its operands."""
    if each.kernel == "interleave":
        whole = config["BR"] * config["BC"]  # a tile with all columns of its rows is one run, and so on
        runs = [
            whole if config["BC"] >= each.n_in else config["BC"],
            whole if config["BR"] >= each.n_out else config["BR"],
        ]
    elif each.kernel == "bdmv":
        runs = [config["BI"]]
    else:
        runs = [config[name] for name in RUNS[each.kernel][place]]
    return sum(max(1.0, line / (run * each.itemsize)) for run in runs) / len(runs)


def work(
    each: Class, config: Config, code: Code, tokens: int, on: model.Chip, place: str
) -> tuple[Work, float]:
    """The launch of a layer of about `FEATURES` features, and bytes of the pass that sums parts, if any."""
    whole = part(code.whole, code.mfma)
    loop = part(code.loop, code.mfma) if code.loop else None
    warps, itemsize = config["num_warps"], each.itemsize
    n_out, n_in = each.n_out, each.n_in
    blocks = max(1, FEATURES // max(n_out, n_in))
    moved = itemsize * (tokens * blocks * (n_out + n_in) + blocks * n_out * n_in)
    summed = 0.0
    if each.kernel == "interleave":
        rows_of = max(1, FEATURES // (n_out * n_in))  # as many numbers as the other kernels move
        programs = cdiv(tokens * rows_of, config["BT"]) * cdiv(n_out, config["BR"]) * cdiv(n_in, config["BC"])
        moved, steps, tile = 2 * itemsize * tokens * rows_of * n_out * n_in, 1, 0
    elif each.kernel == "bdmm_wgrad":
        tiles = blocks * cdiv(n_out, config["BO"]) * cdiv(n_in, config["BI"])
        all_steps = cdiv(tokens, config["BT"])
        splits = min(max(1, config["PROGRAMS"] // tiles), max(1, all_steps // config["MIN_STEPS"]))
        programs, steps = tiles * splits, cdiv(all_steps, splits)
        tile = config["BO"] * config["BI"] * config["BT"]
        if splits > 1:
            summed = blocks * n_out * n_in * (4 * splits + itemsize)
            moved += blocks * n_out * n_in * 4 * splits
    else:
        programs = cdiv(tokens, config["BT"]) * blocks * cdiv(n_out, config["BO"])
        steps = cdiv(n_in, config["BI"])
        tile = config["BT"] * config["BO"] * config["BI"]
    count = 0.0
    if loop is not None:
        products = 0.0
        if code.mfma:
            m, n, k = (int(x) for x in _shape(code.mfma))
            # Waves without a tile of their own repeat that of others.
            area = tile / config["BI" if each.kernel != "bdmm_wgrad" else "BT"]
            products = steps * tile / (m * n * k) / warps * max(1.0, warps * m * n / area)
        count = iterations(code, whole, loop, products, steps)
    once = without(whole, loop) if loop is not None else whole
    resident = code.waves * 4 / warps
    factor = lines(each, config, place, on.line)
    steps_ahead = config["num_stages"]
    launch = Work(
        programs, warps, resident, once, loop, count, steps_ahead, itemsize, moved, code.conflicts, factor
    )
    return launch, summed


def _shape(mfma: str) -> tuple[str, ...]:
    return re.search(r"(\d+)x(\d+)x(\d+)", mfma).groups()


def microseconds(arch: str, each: Class, config: Config, codes: Sequence[Code], tokens: int) -> float:
    """Mean of the launches that rank a class, or the first of them; endless where one does not fit."""
    on = model.chip(arch)
    total = 0.0
    for code, (_, place) in zip(codes, ranked_by(each), strict=False):
        if not usable(code):
            return float("inf")
        launch, summed = work(each, config, code, tokens, on, place)
        hot = launch.loop or launch.once
        narrow = any(width < 4 for width in hot.lds)
        total += model.time(on, launch).us * (NARROW if narrow else 1.0)
        total += model.copy(on, summed) if summed else 0.0
    return total / len(codes)


def usable(code: Code) -> bool:
    """Whether it runs at all, and without a spill of vector registers; `waves` is of what fits."""
    return not code.failure and not code.spills and code.waves > 0


def variants(each: Class, config: Config, arch: str) -> list[Config]:
    """Configs with the same code: a weight gradient's tokens are split for this chip's units."""
    if each.kernel != "bdmm_wgrad":
        return [config]
    units = model.chip(arch).units
    return [config | {"PROGRAMS": units * times, "MIN_STEPS": MIN_STEPS} for times in (1, 2, 3, 4)]


def jobs_of(arch: str, each: Class, config: Config, places: Sequence[tuple[Place, bool]]) -> list[Job]:
    values = tuple((name, value) for name, value in config.items() if name not in ("PROGRAMS", "MIN_STEPS"))
    return [Job(arch, layer, place, values, hard) for (layer, place), hard in places]


def distinct(each: Class) -> list[Config]:
    """Candidates that differ in their code."""
    found = {}
    for config in candidates(each):
        code = {name: value for name, value in config.items() if name not in ("PROGRAMS", "MIN_STEPS")}
        found.setdefault(tuple(code.items()), code)
    return list(found.values())


def ranking(arch: str, each: Class, bucket: int | None, codes: dict[Job, Code]) -> list[tuple[float, Config]]:
    """Usable candidates, the fastest first; equal ones by their values, so that a run repeats."""
    places = [(place, False) for place in ranked_by(each)[:1]]
    found = []
    for config in distinct(each):
        if each.kernel in ("bdmm", "bdmm_wgrad"):
            smallest = 64 if bucket is None and each.kernel == "bdmm" else 16
            if not smallest <= config["BT"] <= max(16, bucket or TOKENS):
                continue
        compiled = [codes[job] for job in jobs_of(arch, each, config, places)]
        for one in variants(each, config, arch):
            us = microseconds(arch, each, one, compiled, tokens_of(each, bucket))
            if us < float("inf"):
                found.append((us, one))
    return sorted(found, key=_order)


def _order(pair: tuple[float, Config]) -> tuple[float, list[tuple[str, int]]]:
    return round(pair[0], 3), sorted(pair[1].items())


def tokens_of(each: Class, bucket: int | None) -> int:
    """For how many a bucket is modelled."""
    return bucket or (16 if each.kernel == "bdmv" else TOKENS)


def finalists(
    arch: str, each: Class, bucket: int | None, ranked: list[tuple[float, Config]], codes: dict[Job, Code]
) -> list[tuple[float, Config]]:
    """The first few in the order of all launches that rank, then the rest as they were."""
    places = [(place, False) for place in ranked_by(each)]
    again = []
    for _, config in ranked[:FINALISTS]:
        compiled = [codes[job] for job in jobs_of(arch, each, config, places)]
        again.append((microseconds(arch, each, config, compiled, tokens_of(each, bucket)), config))
    return sorted(again, key=_order) + ranked[FINALISTS:]


def winner(
    arch: str, each: Class, ranked: list[tuple[float, Config]], compile_jobs: Compile
) -> tuple[float, Config]:
    """The fastest that spills nowhere: no vector register, and no scalar one where that can be had."""
    places = must_compile(each)
    fallback = None
    for us, config in ranked:
        codes = list(compile_jobs(jobs_of(arch, each, config, places)).values())
        if not all(usable(code) for code in codes):
            continue
        if not any(code.scalar_spills for code in codes):
            return us, config
        fallback = fallback or (us, config)
        if us > 1.15 * ranked[0][0]:
            break
    if fallback is None:
        raise RuntimeError(f"no config of {each} on {arch} compiles without spills")
    return fallback


def tidy(rows: list[dict]) -> list[dict]:
    """Without rows whose shapes the next one serves alike."""
    kept: list[dict] = []
    for row in reversed(rows):
        after = kept[-1] if kept else None
        narrower = after is not None and all(
            row["max"].get(name, NO_LIMIT) <= limit for name, limit in after["max"].items()
        )
        if not (narrower and row["config"] == after["config"] and row["wins"] == after["wins"]):
            kept.append(row)
    return kept[::-1]


def dump(table: dict[str, list[dict]]) -> str:
    """A line a row, as the other tables are."""
    parts = []
    for itemsize, rows in table.items():
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        parts.append(f' "{itemsize}": [\n  {lines}\n ]')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def tune(arch: str, chosen: Sequence[Class], processes: int, say: Callable[[str], None]) -> list[dict]:
    """A record for each class and bucket: limits, config, modelled time, and the runner-up's."""
    ranked_jobs = [
        job
        for each in chosen
        for config in distinct(each)
        for job in jobs_of(arch, each, config, [(place, False) for place in ranked_by(each)[:1]])
    ]
    say(f"{arch}: {len(ranked_jobs)} launches of candidates")
    codes = dict(compile_all(ranked_jobs, processes))
    records = []
    known: dict[Job, Code] = dict(codes)
    pending = []
    for each in chosen:
        for bucket in each.buckets:
            pending.append((each, bucket, ranking(arch, each, bucket, codes)))
    few = [
        job
        for each, _, ranked in pending
        for _, config in ranked[:FINALISTS]
        for job in jobs_of(arch, each, config, [(place, False) for place in ranked_by(each)])
    ]
    say(f"{arch}: {len(set(few) - set(known))} launches of finalists")
    known.update(compile_all(few, processes))
    pending = [
        (each, bucket, finalists(arch, each, bucket, ranked, known)) for each, bucket, ranked in pending
    ]
    # The first of each are checked together, so that all processes have work.
    first = [
        job
        for each, _, ranked in pending
        for _, config in ranked[:1]
        for job in jobs_of(arch, each, config, must_compile(each))
    ]
    say(f"{arch}: {len(set(first))} launches to check winners")
    known.update(compile_all(first, processes))

    def compile_jobs(jobs: list[Job]) -> dict[Job, Code]:
        missing = [job for job in jobs if job not in known]
        if missing:
            known.update(compile_all(missing, min(processes, len(missing))))
        return {job: known[job] for job in jobs}

    for each, bucket, ranked in pending:
        us, config = winner(arch, each, ranked, compile_jobs)
        records.append(
            {
                "kernel": each.kernel,
                "dtype": each.dtype,
                "max": each.limits(bucket),
                "stands": [each.n_out, each.n_in],
                "config": config,
                "us": round(us, 2),
                "candidates": len(ranked),
                "rank": [pair[1] for pair in ranked].index(config) + 1,
            }
        )
    return records


def inherited(records: Sequence[dict], source: str, arch: str) -> list[dict]:
    """Float32's rows of another architecture: all have the same matrix instructions for it at the same
    rate, so that a search of each would cost minutes for little. The codegen gate compiles them.
    """
    found = []
    for record in records:
        if record["dtype"] == "fp32":
            config = dict(record["config"])
            if "PROGRAMS" in config:
                config["PROGRAMS"] = config["PROGRAMS"] // model.chip(source).units * model.chip(arch).units
            kept = {name: record[name] for name in ("kernel", "dtype", "max", "stands")}
            found.append(kept | {"config": config, "from": source})
    return found


def wins(kernel: str, limits: dict[str, int], dtype: str) -> bool:
    """Whether "auto" takes a kernel instead of PyTorch's products: docs/amd.md says why."""
    if kernel == "bdmv":
        return dtype != "fp32" and limits.get("tokens", NO_LIMIT) <= 4 and limits.get("in", NO_LIMIT) <= 256
    return kernel == "interleave"


def tables(records: Sequence[dict]) -> dict[str, dict[str, list[dict]]]:
    """Rows by kernel and bytes of a number; classes come in the order of rows, buckets within."""
    found: dict[str, dict[str, list[dict]]] = {}
    for record in records:
        rows = found.setdefault(record["kernel"], {"2": [], "4": []})
        # Triton's own default, which a table need not repeat.
        config = {
            name: value for name, value in record["config"].items() if (name, value) != ("waves_per_eu", 0)
        }
        won = wins(record["kernel"], record["max"], record["dtype"])
        itemsize = "4" if record["dtype"] == "fp32" else "2"
        rows[itemsize].append({"max": record["max"], "config": config, "wins": won})
    return {
        kernel: {itemsize: tidy(rows) for itemsize, rows in table.items()} for kernel, table in found.items()
    }


def write(arch: str, records: Sequence[dict], configs: Path) -> None:
    for kernel, table in tables(records).items():
        file = configs / arch / f"{kernel}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(dump(table))
