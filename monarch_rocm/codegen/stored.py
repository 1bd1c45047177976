"""What the repository keeps about compiled code, as JSON beside this file.

`budgets.json` is what the code needed when it was last accepted; the command writes it.
`exceptions.json` is written by hand: which rows may break which rule, and why.
`executed.json` is what an interpreter of the code counted; the tests' interpreter writes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from monarch_rocm.codegen.compiling import Row

FOLDER = Path(__file__).parent
# How far a number may pass its budget, as a part of it: local memory decides how many workgroups fit,
# the others may wander a little.
SLACK = {"registers": 0.05, "lds": 0.0, "instructions": 0.05, "hot instructions": 0.05}

Numbers = dict[str, int]


@dataclass(frozen=True)
class Budgets:
    """Numbers of each row by its key, and the Triton that made them: another makes other code."""

    triton: str
    rows: dict[str, Numbers]


@dataclass(frozen=True)
class Allowed:
    """Rows, by a pattern of their keys, that may break a rule."""

    rule: str
    rows: str
    why: str

    def covers(self, rule: str, key: str) -> bool:
        return rule == self.rule and fnmatchcase(key, self.rows)


@dataclass(frozen=True)
class Executed:
    """What an interpreter counted when it ran the code with that digest.

    `conflicts` are the clocks that local memory took over those it takes without bank conflicts, in
    the interpreter's model of the banks; `lines` the cache lines touched over the fewest that could
    hold the bytes.
    """

    digest: str
    conflicts: float
    lines: float


def numbers(row: Row) -> Numbers:
    """Those of a row that have a budget."""
    report = row.report
    return {
        "registers": report.vgpr + report.agpr,
        "lds": report.lds,
        "instructions": report.whole.instructions,
        "hot instructions": report.hot.instructions,
    }


def budgets() -> Budgets:
    """Those last accepted."""
    return Budgets(**json.loads((FOLDER / "budgets.json").read_text()))


def write_budgets(rows: Iterable[Row], triton: str) -> Path:
    """Accept these rows as they are."""
    content = {"triton": triton, "rows": {row.key: numbers(row) for row in rows}}
    return _write("budgets.json", content)


def exceptions() -> list[Allowed]:
    """All, in the order of the file."""
    return [Allowed(**each) for each in json.loads((FOLDER / "exceptions.json").read_text())]


def executed() -> dict[str, Executed]:
    """What was counted, by the rows' keys."""
    rows = json.loads((FOLDER / "executed.json").read_text())
    return {key: Executed(**each) for key, each in rows.items()}


def write_executed(rows: Mapping[str, Executed]) -> Path:
    """Keep what an interpreter counted, by the rows' keys."""
    return _write("executed.json", {key: vars(rows[key]) for key in sorted(rows)})


def _write(name: str, content: object) -> Path:
    file = FOLDER / name
    file.write_text(json.dumps(content, indent=1) + "\n")
    return file
