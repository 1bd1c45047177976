"""`monarch-rocm codegen`: compile, judge, print."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.measure import Measurement
from rich.progress import track
from rich.table import Table
from rich.text import Text

from monarch_rocm import dispatch
from monarch_rocm.codegen import gate, layers, stored
from monarch_rocm.codegen.assembly import Widths
from monarch_rocm.codegen.compiling import Row, compile_layers
from monarch_rocm.codegen.stored import Executed

CAPTION = (
    "Compiled, never run: no AMD GPU was involved. Widths are bytes a lane moves: how many such "
    "instructions, in the hot loop (all of a kernel that has none) but for stores, which are the whole "
    "kernel's. waves: how many fit on a SIMD. conflicts and lines are modelled: an interpreter of this "
    "code counted them ('old' where the code has changed since)."
)
COLUMNS = (
    "arch", "kernel", "layer", "launch", "dtype", "VGPR", "AGPR", "SGPR", "spills", "scalar spills", "LDS",
    "waves", "MFMA", "loads", "LDS reads", "LDS writes", "stores",
    "instructions, in the hot loop by class", "conflicts", "lines", "verdict",
)  # fmt: skip
NUMBERS = (*COLUMNS[5:12], "conflicts", "lines")


def codegen(archs: Sequence[str], every: bool, write_budgets: bool, out: Path | None) -> int:
    """Compile the default layers, or with `every` all that the configs know; returns the exit status."""
    chosen = layers.every() if every else layers.DEFAULT
    jobs = track(
        compile_layers(archs, chosen),
        "compiling",
        total=len(archs) * len(chosen),
        console=Console(stderr=True),
        transient=True,
    )
    rows = [row for job in jobs for row in job]
    triton = dispatch.triton_state()[0]
    if write_budgets:
        print(f"written: {stored.write_budgets(rows, triton)}")
    budgets = stored.budgets()
    executed = stored.executed()
    comparable = budgets.triton == triton and not every
    failures = gate.judge(rows, stored.exceptions(), executed, budgets.rows if comparable else None)

    _print(table(rows, executed, {failure.subject for failure in failures}))
    for failure in failures:
        print(f"{failure.rule}: {failure.subject}: {failure.message}")
    if not every and not comparable:
        print(f"Budgets are of Triton {budgets.triton}, this is {triton}: they were not compared.")
    print(f"{len(rows)} launches compiled with Triton {triton}, {len(failures)} failures.")
    if out is not None:
        content = {
            "triton": triton,
            "rows": [_as_json(row, executed) for row in rows],
            "failures": [asdict(failure) for failure in failures],
        }
        out.write_text(json.dumps(content, indent=1) + "\n")
        print(f"written: {out}")
    return 1 if failures else 0


def _as_json(row: Row, executed: Mapping[str, Executed]) -> dict[str, object]:
    found = executed.get(row.key)
    fresh = found is not None and found.digest == row.report.digest
    return {"key": row.key, **asdict(row), "executed": asdict(found) if found and fresh else None}


def _print(shown: Table) -> None:
    """At its full width, whatever the terminal's, so that a row stays a line."""
    console = Console()
    needed = Measurement.get(console, console.options.update(max_width=10_000), shown).maximum
    Console(width=max(console.width, needed)).print(shown)


def table(rows: Sequence[Row], executed: Mapping[str, Executed], failing: set[str]) -> Table:
    """A line a row."""
    shown = Table(caption=Text(CAPTION, justify="left"), box=None, header_style="bold")
    for name in COLUMNS:
        shown.add_column(name, justify="right" if name in NUMBERS else "left", no_wrap=True)
    for row in rows:
        report, hot = row.report, row.report.hot
        classes = " ".join(f"{name} {count}" for name, count in sorted(hot.classes.items()))
        shown.add_row(
            row.arch,
            row.kernel,
            row.layer,
            row.launch,
            row.dtype,
            *map(str, (report.vgpr, report.agpr, report.sgpr)),
            *map(str, (report.vector_spills, report.scalar_spills, report.lds)),
            f"{report.waves:g}",
            " ".join(f"{name.removeprefix('v_mfma_')}x{count}" for name, count in report.mfma.items()),
            *map(_widths, (hot.loads, hot.lds_reads, hot.lds_writes, report.whole.stores)),
            f"{report.whole.instructions}, {hot.instructions}: {classes}",
            *_modelled(row, executed),
            "fails" if row.key in failing else "",
        )
    return shown


def _widths(widths: Widths) -> str:
    return " ".join(f"{width}Bx{count}" for width, count in sorted(widths.items(), reverse=True))


def _modelled(row: Row, executed: Mapping[str, Executed]) -> tuple[str, str]:
    found = executed.get(row.key)
    if found is None:
        return "", ""
    if found.digest != row.report.digest:
        return "old", "old"
    return f"{found.conflicts:.2f}", f"{found.lines:.2f}"
