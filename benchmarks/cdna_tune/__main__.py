"""Config tables for CDNA from compiled code, with no AMD GPU: `python benchmarks/cdna_tune`.

Compiles the candidates of each class of block sizes, drops those that spill, ranks the rest by `model`,
and writes `kernels/configs/<arch>/<kernel>.json` and what it found to `benchmarks/results/cdna_tune.json`.
It goes on where it was stopped: code is kept in `build/cdna_tune`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from time import monotonic

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
os.environ["TRITON_INTERPRET"] = "0"
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])

from cdna_tune import search
from cdna_tune.classes import classes

ARCHS = ("gfx942", "gfx950", "gfx90a")  # the first is searched wholly, the others with its float32


def main() -> None:
    import triton

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--arch", nargs="+", choices=ARCHS, default=ARCHS)
    parser.add_argument("--only", nargs="+", help="kernels; nothing is written then")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    chosen = [each for each in classes() if not arguments.only or each.kernel in arguments.only]
    results = HERE.parent / "results" / "cdna_tune.json"
    found = {}
    for arch in arguments.arch:
        start = monotonic()
        first = found.get(ARCHS[0])
        searched = [each for each in chosen if first is None or each.dtype != "fp32"]
        found[arch] = search.tune(arch, searched, arguments.processes, lambda text: print(text, flush=True))
        if first is not None:
            found[arch] += search.inherited(first, ARCHS[0], arch)
        print(f"{arch}: {monotonic() - start:.0f} s", flush=True)
        if not arguments.only:
            search.write(arch, found[arch], HERE.parents[1] / "kernels" / "configs")
        else:
            print(*map(json.dumps, found[arch]), sep="\n")
    if not arguments.only and set(arguments.arch) == set(ARCHS):
        head = json.dumps(
            {"what": "modelled from compiled code, never measured", "triton": triton.__version__}
        )
        body = ",\n".join(
            f' "{arch}": [\n  ' + ",\n  ".join(map(json.dumps, rows)) + "\n ]" for arch, rows in found.items()
        )
        results.write_text(head[:-1] + ",\n" + body + "\n}\n")


if __name__ == "__main__":
    main()
