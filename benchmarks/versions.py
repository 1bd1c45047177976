"""Run the fast tests in other environments, and keep what came of it for the README's table of versions.

    python benchmarks/versions.py ENV/bin/python [ENV/bin/python ...] [--tests tests/test_kernels.py ...]

Each environment has a torch, pytest, pytest-xdist, hypothesis and this package, installed with --editable.
A row of benchmarks/results/versions.csv is the last run of those versions.
"""

import argparse
import csv
import json
import os
import re
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "versions.csv"
KEYS = ("python", "torch", "triton", "tests")
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
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return row | {"commit": commit.stdout.strip(), "date": time.strftime("%Y-%m-%d")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("pythons", nargs="+", metavar="PYTHON")
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


if __name__ == "__main__":
    main()
