"""Every shipped config of every kernel, and whole layers, compiled and executed for every architecture.

`python -m cdna.census FOLDER` writes `cdna.csv`, a row a run, and `cdna.json`, the sums and how many faults
put in on purpose were seen, and fails where one run does. Nothing runs on AMD hardware.

With `--changed` it runs only whole layers and the configs that FOLDER's census does not hold, and keeps the
other runs: for tables that were tuned anew. It refuses where kernels, interpreter, Triton or torch differ.
With `--only` too, what is not named stays as the file has it, whole layers among it.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: launches are taken from its interpreter

import torch

from cdna import cases, layers, mutations
from monarch_rocm.kernels import tuning

COLUMNS = (
    *("kernel", "row", "dtype", "arch", "addressing", "right", "error_over_allowed", "instructions_used"),
    *(
        "programs",
        "vector_spills",
        "scalar_spills",
        "lds_bytes",
        "instructions",
        "mfma",
        "lds_clocks_over_least",
    ),
    *("lines_over_least", "what"),
)


FOLDER = Path(__file__).parent
KERNELS = ("bdmm", "bdmm_wgrad", "bdmv", "chained", "fused", "interleave", "launch", "order", "tuning")


def sources() -> str:
    """A digest of all that decides how a case runs, but for tables of configs."""
    kernels = Path(tuning.__file__).parent
    files = [kernels / f"{name}.py" for name in KERNELS]
    files += [kernels.resolve().parent / "monarch_rocm" / "hidden.py", FOLDER.parent / "support.py"]
    files += [
        file
        for file in sorted(FOLDER.glob("*.py"))
        if not file.name.startswith("test_") and file.name not in ("census.py", "counts.py", "layers.py")
    ]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def identity(row: dict[str, Any]) -> tuple[str, ...]:
    """What a case is known by; a row of the file has the same."""
    names = ("kernel", "row", "dtype", "arch", "addressing", "what")
    return tuple(str(row.get(name, "")) for name in names)


def kept_runs(folder: Path, head: dict[str, Any]) -> tuple[dict[tuple[str, ...], dict[str, Any]], list]:
    """Right runs of the folder's census by their identity, and its faults."""
    before = json.loads((folder / "cdna.json").read_text())
    for name, value in head.items():
        if before.get(name) != value:
            raise SystemExit(f"{folder} has a census of {name} {before.get(name)}, not {value}: run all")
    with open(folder / "cdna.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["right"] == "True"]
    found = {}
    for row in rows:
        key = identity(row)
        row |= {name: int(row[name]) for name in ("vector_spills", "scalar_spills")}
        row |= {"right": True, "error_over_allowed": float(row["error_over_allowed"])}
        if row["kernel"] == "layer":
            del row["row"]  # which `summary` takes for the number of a config
        else:
            row["row"] = int(row["row"])
        found[key] = row
    return found, before["faults"]


def start_of(case: cases.Case | layers.Layer) -> dict[str, Any]:
    row = {"arch": case.arch, "addressing": case.addressing, "dtype": str(case.dtype)[6:]}
    if isinstance(case, layers.Layer):
        return row | {"kernel": "layer", "what": str(case)}
    return row | {"kernel": case.kernel, "row": case.row, "what": json.dumps(case.config)}


def run_case(case: cases.Case) -> dict[str, Any]:
    row = start_of(case)
    try:
        found = cases.try_case(case, detailed=True)
    except Exception as error:
        return row | {"right": False, "what": f"{type(error).__name__}: {error}"}
    counters = found["counters"]
    return row | {
        "right": True,
        "error_over_allowed": round(found["error"], 2),
        "instructions_used": found["addressing"],
        "programs": found["programs"],
        "vector_spills": found["vector_spills"],
        "scalar_spills": found["scalar_spills"],
        "lds_bytes": found["lds"],
        "instructions": sum(counters.instructions.values()),
        "mfma": counters.instructions["mfma"],
        "lds_clocks_over_least": round(counters.conflict_factor(), 2),
        "lines_over_least": round(counters.line_factor(), 2),
    }


def run_layer(case: layers.Layer) -> dict[str, Any]:
    row = start_of(case)
    try:
        found = layers.try_layer(case)
    except Exception as error:
        return row | {"right": False, "what": f"{case} {type(error).__name__}: {error}"}
    launches = found["launches"]
    return row | {
        "right": True,
        "error_over_allowed": round(found["error"], 2),
        "instructions_used": "+".join(sorted(set().union(*(launch.addressing for launch in launches)))),
        "programs": sum(launch.programs for launch in launches),
        "vector_spills": sum(launch.compiled.program.vector_spills for launch in launches),
        "scalar_spills": sum(launch.compiled.program.scalar_spills for launch in launches),
        "lds_bytes": max(launch.compiled.lds for launch in launches),
        "instructions": sum(sum(launch.counters.instructions.values()) for launch in launches),
        "mfma": sum(launch.counters.instructions["mfma"] for launch in launches),
    }


def run_any(case: cases.Case | layers.Layer) -> dict[str, Any]:
    torch.set_num_threads(1)
    return run_case(case) if isinstance(case, cases.Case) else run_layer(case)


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each kernel, architecture and dtype."""
    grouped = defaultdict(list)
    for row in rows:
        grouped[row["kernel"], row["arch"], row["dtype"]].append(row)
    return [
        {
            "kernel": kernel,
            "arch": arch,
            "dtype": dtype,
            "configs": len({row.get("row", row["what"]) for row in part}),
            "runs": len(part),
            "right": sum(row["right"] for row in part),
            "with_vector_spills": sum(bool(row.get("vector_spills")) for row in part),
            "with_scalar_spills": sum(bool(row.get("scalar_spills")) for row in part),
            "worst_error_over_allowed": max(row.get("error_over_allowed", 0) for row in part),
        }
        for (kernel, arch, dtype), part in grouped.items()
    ]


def main() -> int:
    import triton

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--changed", action="store_true", help="keep the runs of what is as it was")
    arguments = parser.parse_args()
    head = {"triton": triton.__version__, "torch": torch.__version__.partition("+")[0], "sources": sources()}
    kept, faults = kept_runs(arguments.folder, head) if arguments.changed else ({}, None)
    every, known = [], []
    for case in (*cases.every_case(), *layers.every_layer()):
        named = arguments.only in str(case)
        # What layers launch depends on more than a row.
        row = None if named and isinstance(case, layers.Layer) else kept.get(identity(start_of(case)))
        if named or row is not None:
            every.append(case)
            known.append(row)
    chosen = [case for case, row in zip(every, known, strict=True) if row is None]
    fresh = []
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for row in pool.map(run_any, chosen, chunksize=4):
            fresh.append(row)
            if not row["right"] or len(fresh) % 100 == 0:
                print(f"{len(fresh)}/{len(chosen)}", "" if row["right"] else row, flush=True)
    left = iter(fresh)
    rows = [next(left) if row is None else row for row in known]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with open(arguments.folder / "cdna.csv", "w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    wrong = sum(not row["right"] for row in rows)
    found = {
        "what": "compiled by Triton for the architecture and executed by tests/cdna, on no AMD hardware",
        **head,
        "runs": len(rows),
        "right": len(rows) - wrong,
    }
    text = json.dumps(found, indent=1).removesuffix("\n}")
    for name, part in (("rows", summary(rows)), ("faults", faults or mutations.table())):
        lines = ",\n  ".join(json.dumps(row) for row in part)
        text += f',\n "{name}": [\n  {lines}\n ]'
    (arguments.folder / "cdna.json").write_text(text + "\n}\n")
    new = f"{len(fresh)} of them new, " if kept else ""
    print(f"{len(rows) - wrong} of {len(rows)} runs right, {new}Triton {triton.__version__}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
