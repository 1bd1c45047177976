"""Run the fast tests in other environments, and write what came of it into the README's table of versions.

    python benchmarks/versions.py [ENV/bin/python ...] [--tests tests/test_kernels.py ...]

Each environment has a torch, pytest, pytest-xdist, hypothesis and this package, installed with --editable.
A row of benchmarks/results/versions.csv is the last run of those versions; without an environment the
table is written anew from it.
"""

import argparse
import csv
import json
import os
import re
import subprocess
import time
from pathlib import Path

from report import insert

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "versions.csv"
KEYS = ("python", "torch", "triton", "tests")
MARKS = ("<!-- versions: begin -->", "<!-- versions: end -->")
ASK = """
import importlib.metadata as metadata, json, platform, torch
try:
    triton = metadata.version("triton")
except metadata.PackageNotFoundError:
    triton = "none"
print(json.dumps({"python": platform.python_version(), "torch": torch.__version__, "triton": triton}))
"""


def measured(python, tests):
    """A row: the versions, and the counts of pytest's last line."""
    found = subprocess.run([python, "-c", ASK], capture_output=True, text=True, check=True).stdout
    row = json.loads(found) | {"tests": " ".join(tests) or "fast"}
    command = [python, "-m", "pytest", "-q", "-n", "2", *(tests or ["-m", "not slow"])]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    last = done.stdout.strip().splitlines()[-1]
    print(*row.values(), last, sep=", ", flush=True)
    for count in ("passed", "failed", "error", "skipped"):
        number = re.search(rf"(\d+) {count}", last)
        row[count] = int(number[1]) if number else 0
    if row["failed"] or row["error"]:
        print(*re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.M), sep="\n", flush=True)
    return row | {"date": time.strftime("%Y-%m-%d")}


def markdown(rows):
    """The README's table."""
    lines = [
        "| Python | torch | Triton | tests | passed | failed | skipped |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        tests = "fast" if row["tests"] == "fast" else f"`{row['tests']}`"
        failed = int(row["failed"]) + int(row["error"])
        cells = (row["python"], row["torch"], row["triton"], tests, row["passed"], failed, row["skipped"])
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("pythons", nargs="*", metavar="PYTHON")
    told = "run these whole, in place of all fast tests"
    parser.add_argument("--tests", nargs="+", default=[], metavar="FILE", help=told)
    arguments = parser.parse_args()
    for python in arguments.pythons:
        row = measured(python, arguments.tests)
        rows = list(csv.DictReader(RESULTS.open())) if RESULTS.exists() else []
        rows = [old for old in rows if any(old[key] != row[key] for key in KEYS)] + [row]
        with RESULTS.open("w", newline="") as file:
            writer = csv.DictWriter(file, row, lineterminator="\n")
            writer.writeheader()
            writer.writerows(sorted(rows, key=lambda each: [each[key] for key in KEYS]))
    page = ROOT / "README.md"
    table = markdown(list(csv.DictReader(RESULTS.open())))
    page.write_text(insert(page.read_text(), table, MARKS))


if __name__ == "__main__":
    main()
