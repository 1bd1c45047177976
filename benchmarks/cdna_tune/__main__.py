"""Config tables for CDNA from compiled code, with no AMD GPU: `python benchmarks/cdna_tune`.

Compiles the candidates of each class of block sizes, drops those that spill, ranks the rest by `model`
with the bank conflicts that the tests' interpreter counts, tries the compiler's options about the best,
and writes `kernels/configs/<arch>/<kernel>.json` and what it found to `benchmarks/results/cdna_tune.json`.
It goes on where it was stopped: code is kept in `build/cdna_tune`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from time import strftime

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1]), str(HERE.parents[1] / "tests")]
os.environ["TRITON_INTERPRET"] = "0"
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:3], os.environ.get("PYTHONPATH", "")])

from cdna_tune import search, whole
from cdna_tune.classes import classes

ARCHS = ("gfx942", "gfx950", "gfx90a")
DTYPES = ("bf16", "fp32")  # bf16 stands for fp16
RESULTS = HERE.parent / "results" / "cdna_tune.json"


def main() -> None:
    import triton

    kernels = list(dict.fromkeys(each.kernel for each in classes())) + list(whole.LAYERS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--arch", nargs="+", choices=ARCHS, default=ARCHS)
    parser.add_argument("--only", nargs="+", choices=kernels, default=kernels, help="others stay as they are")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES, help="likewise")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()

    def say(text: str) -> None:
        print(f"{strftime('%H:%M:%S')} {text}", flush=True)

    found = json.loads(RESULTS.read_text())
    for arch in arguments.arch:
        present, kept = [], []
        for record in found[arch]:
            searched = record["kernel"] in arguments.only and record["dtype"] in arguments.dtype
            (present if searched else kept).append(record)
        chosen = [
            each for each in classes() if each.kernel in arguments.only and each.dtype in arguments.dtype
        ]
        records = search.tune(arch, chosen, present, arguments.processes, say) if chosen else []
        for kernel in whole.LAYERS:
            if kernel in arguments.only:
                for dtype in arguments.dtype:
                    records.append(whole.tune(arch, kernel, dtype, present, arguments.processes, say))
        order = {search.identity(record): i for i, record in enumerate(found[arch])}
        found[arch] = sorted(
            kept + records, key=lambda record: order.get(search.identity(record), len(order))
        )
        search.write(arch, found[arch], HERE.parents[1] / "kernels" / "configs")
        head = {"what": "modelled from compiled code, never measured", "triton": triton.__version__}
        body = ",\n".join(
            f' "{name}": [\n  ' + ",\n  ".join(map(json.dumps, found[name])) + "\n ]" for name in ARCHS
        )
        RESULTS.write_text(json.dumps(head)[:-1] + ",\n" + body + "\n}\n")
        changed = sum("before" in record for record in records)
        say(f"{arch}: {len(records)} rows, {changed} of them changed")


if __name__ == "__main__":
    main()
