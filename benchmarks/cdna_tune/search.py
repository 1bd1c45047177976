"""Candidates to tables: compile, drop what spills, rank by the model, and write the winners."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cdna_tune import model
from cdna_tune.classes import FEATURES, NO_LIMIT, TOKENS, Class, Place, candidates, must_compile, ranked_by
from cdna_tune.compiled import Code, Job, compile_all, count_all
from cdna_tune.model import Part, Work
from monarch_rocm.kernels import space, tuning

Config = dict[str, int]
Compile = Callable[[list[Job]], dict[Job, Code]]
MIN_STEPS = 4
FINALISTS = 2
MARGIN = (
    1.05  # by how much a config must be better: on the H200 the model's choice was 3 and 12 % off the best
)
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


@dataclass
class Row:
    """A row that is searched: candidates in the order of the model, and what the table has now."""

    each: Class
    bucket: int | None
    ranked: list[tuple[float, Config]]
    present: Config | None
    knobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def head(self) -> list[Config]:
        """The first few, and the present one wherever it ranks."""
        first = [config for _, config in self.ranked[:FINALISTS]]
        return first if self.present is None or self.present in first else [*first, self.present]

    @property
    def tokens(self) -> int:
        return tokens_of(self.each, self.bucket)


class Codes:
    """Code of jobs, and bank conflicts where they were asked for; compiled and executed once."""

    def __init__(self, arch: str, processes: int):
        self.arch, self.processes = arch, processes
        self.known: dict[Job, Code] = {}
        self.counted: set[Job] = set()

    def compile(self, jobs: Iterable[Job]) -> dict[Job, Code]:
        jobs = list(jobs)
        missing = [job for job in jobs if job not in self.known]
        self.known.update(compile_all(missing, self.processes))
        return {job: self.known[job] for job in jobs}

    def count(self, jobs: Iterable[Job]) -> None:
        """Let their code have the conflicts that the interpreter counts; what it finds wrong fails."""
        missing = [job for job in jobs if job not in self.counted and usable(self.known[job])]
        for job, found in count_all(missing, self.processes):
            code = self.known[job]
            self.known[job] = replace(code, conflicts=found.conflicts, failure=found.failure)
            self.counted.add(job)

    def microseconds(self, row: Row, config: Config, launches: int | None = None) -> float:
        """Mean of the launches that rank, or of the first of them."""
        places = [(place, False) for place in ranked_by(row.each)[:launches]]
        codes = [self.known[job] for job in jobs_of(self.arch, row.each, config, places)]
        return microseconds(self.arch, row.each, config, codes, row.tokens)


def ranking_jobs(arch: str, row: Row, configs: Iterable[Config]) -> list[Job]:
    places = [(place, False) for place in ranked_by(row.each)]
    return [job for config in configs for job in jobs_of(arch, row.each, config, places)]


def reorder(row: Row, codes: Codes) -> None:
    """Put the first few in the order of all launches that rank, with bank conflicts counted."""
    head = row.head
    rest = [pair for pair in row.ranked if pair[1] not in head]
    row.ranked = sorted(((codes.microseconds(row, config), config) for config in head), key=_order) + rest


def turn_knobs(rows: Sequence[Row], codes: Codes, number: int) -> None:
    """Try the compiler options of a round about the best config of each row.

    What the first launch that ranks finds better by `MARGIN` competes on all, with conflicts counted.
    """
    arch = codes.arch
    tried = {}
    for i, row in enumerate(rows):
        if row.ranked and number < space.rounds(row.each.kernel):
            tried[i] = space.variants(row.each.kernel, number, row.ranked[0][1], arch)
    first = [
        job
        for i, others in tried.items()
        for config in others
        for job in jobs_of(arch, rows[i].each, config, [(ranked_by(rows[i].each)[0], False)])
    ]
    codes.compile(first)
    better: dict[int, list[Config]] = {}
    for i, others in tried.items():
        row, base = rows[i], rows[i].ranked[0][1]
        plain = codes.microseconds(row, base, 1)
        for config in others:
            (job,) = jobs_of(arch, row.each, config, [(ranked_by(row.each)[0], False)])
            (same,) = jobs_of(arch, row.each, base, [(ranked_by(row.each)[0], False)])
            if job not in codes.counted and usable(codes.known[job]):
                # Till it is counted, an option is taken to leave the conflicts as they are.
                codes.known[job] = replace(codes.known[job], conflicts=codes.known[same].conflicts)
            us, code = codes.microseconds(row, config, 1), codes.known[job]
            row.knobs.append(
                {
                    "options": {name: value for name, value in config.items() if base.get(name) != value},
                    "over": round(us / plain, 3) if us < float("inf") else None,
                    "waves": [codes.known[same].waves, code.waves],
                    "registers": [codes.known[same].registers, code.registers],
                    "spills": code.vector_spills,
                }
            )
            if us * MARGIN <= plain:
                better.setdefault(i, []).append(config)
    jobs = [job for i, others in better.items() for job in ranking_jobs(arch, rows[i], others)]
    codes.compile(jobs)
    codes.count(jobs)
    for i, others in better.items():
        found = [(codes.microseconds(rows[i], config), config) for config in others]
        rows[i].ranked = sorted([*found, *rows[i].ranked], key=_order)


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


def tune(
    arch: str,
    chosen: Sequence[Class],
    present: Sequence[dict],
    processes: int,
    say: Callable[[str], None],
) -> list[dict]:
    """A record for each class and bucket: limits, config, modelled time.

    `present` are the records of the tables as they are: a config stays where no other is better by
    `MARGIN`, since each that changes has to be executed anew.
    """
    codes = Codes(arch, processes)
    places = [
        job
        for each in chosen
        for config in distinct(each)
        for job in jobs_of(arch, each, config, [(place, False) for place in ranked_by(each)[:1]])
    ]
    say(f"{arch}: {len(places)} launches of candidates")
    codes.compile(places)
    now = {identity(record): plain(record["config"]) for record in present}
    rows = []
    for each in chosen:
        for bucket in each.buckets:
            key = identity({"kernel": each.kernel, "dtype": each.dtype, "max": each.limits(bucket)})
            rows.append(Row(each, bucket, ranking(arch, each, bucket, codes.known), now.get(key)))
    few = [job for row in rows for job in ranking_jobs(arch, row, row.head)]
    say(f"{arch}: {len(set(few))} launches of finalists")
    codes.compile(few)
    codes.count(few)
    for row in rows:
        reorder(row, codes)
    for number in range(max(space.rounds(each.kernel) for each in chosen)):
        turn_knobs(rows, codes, number)
        say(f"{arch}: options, round {number + 1}")
    # Those that would change their rows are checked together, so that all processes have work.
    codes.compile(
        job
        for row in rows
        if not stays(row, row.ranked[0][0], codes)
        for job in jobs_of(arch, row.each, row.ranked[0][1], must_compile(row.each))
    )
    return [record_of(row, codes) for row in rows]


def identity(record: dict) -> str:
    """What a row of a table is known by."""
    return json.dumps([record["kernel"], record["dtype"], sorted(record["max"].items())])


def plain(config: Config) -> Config:
    """Without what is Triton's default anyway."""
    return {name: value for name, value in config.items() if space.PLAIN.get(name) != value}


def stays(row: Row, us: float, codes: Codes) -> bool:
    """Whether the table's present config is as good as one of that time."""
    return row.present is not None and codes.microseconds(row, row.present) < MARGIN * us


def record_of(row: Row, codes: Codes) -> dict:
    """As the results keep it."""
    us, config = row.ranked[0]
    if not stays(row, us, codes):
        us, config = winner(codes.arch, row.each, row.ranked, codes.compile)
    if stays(row, us, codes):
        us, config = codes.microseconds(row, row.present), row.present
    else:
        codes.count(ranking_jobs(codes.arch, row, [config]))
    found = {
        "kernel": row.each.kernel,
        "dtype": row.each.dtype,
        "max": row.each.limits(row.bucket),
        "stands": [row.each.n_out, row.each.n_in],
        "config": config,
        "us": round(us, 2),
        "conflicts": [
            round(codes.known[job].conflicts, 2) for job in ranking_jobs(codes.arch, row, [config])
        ],
        "candidates": len(row.ranked),
        "rank": [pair[1] for pair in row.ranked].index(config) + 1,
    }
    if row.present is not None and row.present != config:
        before = codes.microseconds(row, row.present)
        found |= {"before": row.present, "us_before": round(before, 2) if before < float("inf") else None}
    return found | ({"knobs": row.knobs} if row.knobs else {})


def wins(kernel: str, limits: dict[str, int], dtype: str) -> bool:
    """Whether "auto" takes a kernel instead of PyTorch's products: docs/amd.md says why."""
    if kernel == "bdmv":
        return dtype != "fp32" and limits.get("tokens", NO_LIMIT) <= 4 and limits.get("in", NO_LIMIT) <= 256
    return kernel == "interleave"


def tables(records: Sequence[dict]) -> dict[str, dict[str, list[dict]]]:
    """Rows by kernel and bytes of a number; classes come in the order of rows, buckets within.

    Where the last does not serve every shape, the default table's last does.
    """
    found: dict[str, dict[str, list[dict]]] = {}
    for record in records:
        rows = found.setdefault(record["kernel"], {"2": [], "4": []})
        config = plain(record["config"])
        won = wins(record["kernel"], record["max"], record["dtype"])
        itemsize = "4" if record["dtype"] == "fp32" else "2"
        rows[itemsize].append({"max": record["max"], "config": config, "wins": won})
    for kernel, table in found.items():
        for itemsize, rows in table.items():
            if not rows or rows[-1]["max"]:
                rows.append(tuning.table(kernel, "default")[1][itemsize][-1])
    return {
        kernel: {itemsize: tidy(rows) for itemsize, rows in table.items()} for kernel, table in found.items()
    }


def write(arch: str, records: Sequence[dict], configs: Path) -> None:
    for kernel, table in tables(records).items():
        file = configs / arch / f"{kernel}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(dump(table))
