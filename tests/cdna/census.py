"""Every shipped config of every kernel, and whole layers, compiled and executed for every architecture.

`python -m cdna.census FOLDER` writes `cdna.csv`, a row a run, and `cdna.json`, the sums and how many faults
put in on purpose were seen, and fails where one run does. Nothing runs on AMD hardware.
"""

from __future__ import annotations

import argparse
import csv
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


def run_case(case: cases.Case) -> dict[str, Any]:
    row = {"kernel": case.kernel, "row": case.row, "arch": case.arch, "addressing": case.addressing}
    row |= {"dtype": str(case.dtype)[6:], "what": json.dumps(case.config)}
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
    row = {"kernel": "layer", "arch": case.arch, "addressing": case.addressing, "what": str(case)}
    row |= {"dtype": str(case.dtype)[6:]}
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
    arguments = parser.parse_args()
    chosen = [case for case in [*cases.every_case(), *layers.every_layer()] if arguments.only in str(case)]
    rows = []
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for row in pool.map(run_any, chosen, chunksize=4):
            rows.append(row)
            if not row["right"] or len(rows) % 100 == 0:
                print(f"{len(rows)}/{len(chosen)}", "" if row["right"] else row, flush=True)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with open(arguments.folder / "cdna.csv", "w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    wrong = sum(not row["right"] for row in rows)
    found = {
        "what": "compiled by Triton for the architecture and executed by tests/cdna, on no AMD hardware",
        "triton": triton.__version__,
        "torch": torch.__version__.partition("+")[0],
        "runs": len(rows),
        "right": len(rows) - wrong,
    }
    text = json.dumps(found, indent=1).removesuffix("\n}")
    for name, part in (("rows", summary(rows)), ("faults", mutations.table())):
        lines = ",\n  ".join(json.dumps(row) for row in part)
        text += f',\n "{name}": [\n  {lines}\n ]'
    (arguments.folder / "cdna.json").write_text(text + "\n}\n")
    print(f"{len(rows) - wrong} of {len(rows)} runs right, Triton {triton.__version__}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
