"""Modelled time of our layers on gfx942 against two batched products and the copies between them.

`python benchmarks/cdna_tune/compare.py` writes `results/cdna_modelled.json` and the table of docs/amd.md.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1]), str(HERE.parents[1] / "tests")]
if __name__ == "__main__":  # not for tests, whose kernels run in the interpreter
    os.environ["TRITON_INTERPRET"] = "0"

from cdna_tune import model, search
from cdna_tune.classes import TOKENS, Class
from cdna_tune.compiled import Job, compile_job, count_job
from monarch_rocm.codegen.layers import Layer
from monarch_rocm.kernels import tuning

ARCH = "gfx942"
WIDTH = 4096
BLOCKS = (4, 8, 16, 32, 64)
RESULTS = HERE.parent / "results" / "cdna_modelled.json"
PAGE = HERE.parents[1] / "docs" / "amd.md"
MARK = "<!-- modelled: benchmarks/cdna_tune/compare.py writes this table -->"


def launch(kernel: str, layer: Layer, place: str, n_out: int, n_in: int) -> float:
    """Microseconds of one launch of ours, with the shipped config and its bank conflicts."""
    row = tuning.pick(tuning.table(kernel, ARCH)[1], 2, n_out, n_in, TOKENS)
    config = row["config"]
    on = model.chip(ARCH)
    each = Class(kernel, "bf16", None, None, n_out, n_in, (None,))
    job = Job(ARCH, layer, place, tuple(config.items()))
    code = replace(compile_job(job), conflicts=count_job(job).conflicts)
    return model.time(on, search.work(each, config, code, TOKENS, on, place)[0]).us


def row(blocks: int, layout: str) -> dict:
    """One shape: ours, and the competitor with no copies and with those it needs."""
    n = WIDTH // blocks
    on = model.chip(ARCH)
    layer = Layer(WIDTH, WIDTH, blocks, TOKENS, layout=layout)
    ours = launch("bdmm", layer, "forward 1", n, n) + launch("bdmm", layer, "forward 2", n, n)
    interleaving = 0.0
    if layout == "interleaved":
        interleaving = launch("interleave", layer, "forward 3", blocks, n)
    activations = 2 * TOKENS * WIDTH * 2
    product = model.batched_product(on, 2 * TOKENS * WIDTH * n, activations + 2 * WIDTH * n, 2)
    copies = (2 if layout == "interleaved" else 1) * model.copy(on, activations)
    dense = model.batched_product(on, 2 * TOKENS * WIDTH * WIDTH, activations + 2 * WIDTH * WIDTH, 2)
    return {
        "layout": layout,
        "blocks": blocks,
        "dense": round(dense, 1),
        "two_products": round(2 * product, 1),
        "two_products_and_copies": round(2 * product + copies, 1),
        "products_and_our_pass": round(2 * product + interleaving, 1),
        "ours": round(ours + interleaving, 1),
    }


def table(rows: list[dict]) -> str:
    """As docs/amd.md shows it."""
    head = ("layout", "blocks", "dense", "two products", "with copies", "products, our pass", "our kernels")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    lines += ["| " + " | ".join(str(value) for value in each.values()) + " |" for each in rows]
    return "\n".join(lines)


def main() -> None:
    import triton

    rows = [row(blocks, layout) for layout in ("interleaved", "blocked") for blocks in BLOCKS]
    head = {
        "what": "microseconds on gfx942, modelled, never measured: 8192 tokens, 4096 to 4096, bfloat16",
        "triton": triton.__version__,
        "vendor": model.VENDOR,
    }
    body = ",\n  ".join(map(json.dumps, rows))
    RESULTS.write_text(json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n  {body}\n ]\n}}\n')
    page = PAGE.read_text()
    PAGE.write_text(re.sub(rf"(?s)({re.escape(MARK)}\n).*?\n\n", lambda m: m[1] + table(rows) + "\n\n", page))
    print(table(rows))


if __name__ == "__main__":
    main()
