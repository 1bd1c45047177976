"""What compiled code must not do, and which rows do it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from monarch_rocm.codegen.assembly import LDS
from monarch_rocm.codegen.compiling import Row
from monarch_rocm.codegen.stored import SLACK, Allowed, Executed, Numbers, numbers

NARROW = 4  # bytes that a lane should load at least
CONFLICTS = 1.25  # clocks of local memory over those without conflicts, at most


@dataclass(frozen=True)
class Failure:
    """A rule that a row breaks, or an exception that no row needs."""

    rule: str
    subject: str
    message: str


def _vector_spills(row: Row) -> str | None:
    report = row.report
    if report.vector_spills or report.scratch:
        return f"{report.vector_spills} vector registers spill, {report.scratch} bytes of scratch"
    return None


def _scalar_spills(row: Row) -> str | None:
    spills = row.report.scalar_spills
    return f"{spills} scalar registers spill to lanes of vector registers" if spills else None


def _local_memory(row: Row) -> str | None:
    limit = LDS[row.arch]
    return f"{row.report.lds} bytes, and there are {limit}" if row.report.lds > limit else None


def _loads(row: Row) -> str | None:
    return _narrow(row.report.hot.loads, "loads")


def _lds_reads(row: Row) -> str | None:
    return _narrow(row.report.hot.lds_reads, "reads of local memory")


def _narrow(widths: dict[int, int], what: str) -> str | None:
    narrow = {width: count for width, count in sorted(widths.items()) if width < NARROW}
    if not narrow:
        return None
    counts = ", ".join(f"{count} of {width} bytes" for width, count in narrow.items())
    return f"{what} in the hot loop: {counts}"


def _xf32(row: Row) -> str | None:
    # AMD's tf32: float32 products must be exact to float32.
    names = [name for name in row.report.mfma if "xf32" in name]
    return f"multiplies in {', '.join(names)}" if names else None


def _atomics(row: Row) -> str | None:
    return f"{', '.join(row.report.atomics)}: two runs may differ" if row.report.atomics else None


RULES: dict[str, Callable[[Row], str | None]] = {
    "vector spills": _vector_spills,
    "scalar spills": _scalar_spills,
    "local memory": _local_memory,
    "narrow loads": _loads,
    "narrow local reads": _lds_reads,
    "xf32": _xf32,
    "atomics": _atomics,
}


def _bank_conflicts(conflicts: float) -> str | None:
    if conflicts <= CONFLICTS:
        return None
    return f"local memory takes {conflicts:.2f} times the clocks it takes without bank conflicts"


def _over_budget(row: Row, budget: Numbers) -> str | None:
    over = [
        f"{name} {number}, budget {budget[name]}"
        for name, number in numbers(row).items()
        if number > budget[name] * (1 + SLACK[name])
    ]
    return "; ".join(over) or None


def judge(
    rows: Sequence[Row],
    exceptions: Sequence[Allowed],
    executed: Mapping[str, Executed],
    budgets: Mapping[str, Numbers] | None,
) -> list[Failure]:
    """What the rows break that no exception allows, and exceptions for rows that break nothing.

    An exception is needless only once rows of every architecture that it speaks of were judged. Bank
    conflicts are judged where `executed` is of this very code. Without `budgets`, as for another
    Triton than theirs, numbers are compared with nothing, and an exception may be needless; with them,
    each row must have one.
    """
    judged = [(row.key, rule, check(row)) for row in rows for rule, check in RULES.items()]
    for row in rows:
        found = executed.get(row.key)
        if found is not None and found.digest == row.report.digest:
            judged.append((row.key, "bank conflicts", _bank_conflicts(found.conflicts)))
        if budgets is not None:
            budget = budgets.get(row.key)
            message = "has none; --write-budgets writes it" if budget is None else _over_budget(row, budget)
            judged.append((row.key, "budget", message))

    failures = []
    needed = set()
    for key, rule, message in judged:
        if message is not None:
            allowed = {each for each in exceptions if each.covers(rule, key)}
            needed |= allowed
            if not allowed:
                failures.append(Failure(rule, key, message))
    absent = set(LDS) - {row.arch for row in rows}
    for each in exceptions if budgets is not None else ():
        open_yet = any(fnmatchcase(arch, each.rows.split(" | ")[0]) for arch in absent)
        if each not in needed and not open_yet and any(each.covers(rule, key) for key, rule, _ in judged):
            failures.append(Failure(each.rule, each.rows, "the exception is needed no more: remove it"))
    return failures
