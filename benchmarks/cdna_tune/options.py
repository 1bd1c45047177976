"""What the compiler's options do to the rows that were searched: the table of docs/amd.md.

`python benchmarks/cdna_tune/options.py` reads `results/cdna_tune.json` and writes the table.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from cdna_tune.search import MARGIN

RESULTS = HERE.parent / "results" / "cdna_tune.json"
PAGE = HERE.parents[1] / "docs" / "amd.md"
MARK = "<!-- options: benchmarks/cdna_tune/options.py writes this table -->"
ARCHS = ("gfx90a", "gfx942", "gfx950")


def table(found: dict[str, list[dict]]) -> str:
    """A line for each kernel and each option that was tried about its configs."""
    tried = defaultdict(lambda: defaultdict(list))
    for arch in ARCHS:
        for record in found[arch]:
            for knob in record.get("knobs", ()):
                tried[record["kernel"], ", ".join(f"`{name}`" for name in knob["options"])][arch].append(knob)
    lines = ["| kernel | option | " + " | ".join(ARCHS) + " |", "|---" * (2 + len(ARCHS)) + "|"]
    for (kernel, option), knobs in sorted(tried.items()):
        cells = " | ".join(_cell(knobs[arch]) for arch in ARCHS)
        lines.append(f"| `{kernel}` | {option} | {cells} |")
    return "\n".join(lines)


def _cell(knobs: list[dict]) -> str:
    """How many were tried: least, median and largest time over that without, how many clearly better."""
    times = [knob["over"] for knob in knobs if knob["over"] is not None]
    if not times:
        return ""
    better = sum(time * MARGIN <= 1 for time in times)
    unfit = len(knobs) - len(times)
    said = f"{len(knobs)}: {min(times):.2f}, {median(times):.2f}, {max(times):.2f}; {better}"
    return said + (f"; {unfit} spill" if unfit else "")


def main() -> None:
    text = table(json.loads(RESULTS.read_text()))
    page = PAGE.read_text()
    PAGE.write_text(re.sub(rf"(?s)({re.escape(MARK)}\n).*?\n\n", lambda m: m[1] + text + "\n\n", page))
    print(text)


if __name__ == "__main__":
    main()
