"""How well the model ranks configs that were measured, on the only GPU that was: an H200.

`python benchmarks/cdna_tune/validate.py` compiles the configs of `results/h200_configs.json` for it, with
no GPU, gives the same model an H200's rates, and writes rank correlations to `results/model_h200.json`.
The measured code was Triton 3.6's, and this is not.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
if __name__ == "__main__":  # not for tests, whose kernels run in the interpreter
    os.environ["TRITON_INTERPRET"] = "0"
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import mean, median

from cdna_tune import compiled, model, ptx, search
from cdna_tune.classes import Class
from monarch_rocm.codegen.compiling import start
from monarch_rocm.codegen.layers import Layer

PLACES = {
    "F1": ("bdmm", "forward 1"), "F2": ("bdmm", "forward 2"),
    "B2": ("bdmm", "backward 3"), "B1": ("bdmm", "backward 5"),
    "W2": ("bdmm_wgrad", "backward 2"), "W1": ("bdmm_wgrad", "backward 4"),
}  # fmt: skip


def compile_job(job: compiled.Job) -> compiled.Code:
    """As `compiled.compile_job`, for an H200."""
    from triton import compile
    from triton.backends.compiler import GPUTarget

    from monarch_rocm.codegen.compiling import source_of

    launch = compiled.launch_of(job)
    key = compiled.key_of(job, launch)
    file = compiled.CACHE / key[:2] / f"{key}.json"
    if file.is_file():
        return compiled.Code(**json.loads(file.read_text()))
    source, options = source_of(launch, buffers=False)
    try:
        made = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    except Exception as error:  # whatever a compiler may raise
        return compiled.Code(failure=str(error)[:300])
    registers, stack = ptx.registers(made.asm["cubin"])
    whole, loop, shape = ptx.read(made.asm["ptx"])
    fit = ptx.waves(registers, made.metadata.shared, made.metadata.num_warps)
    code = compiled.Code(
        scratch=stack, lds=made.metadata.shared, waves=fit, mfma=shape, whole=whole, loop=loop
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(vars(code)))
    return code


def ranks(values: list[float]) -> list[float]:
    """From 1, equal values share the mean of theirs."""
    order = sorted(values)
    return [mean(i + 1 for i, each in enumerate(order) if each == value) for value in values]


def spearman(a: list[float], b: list[float]) -> float:
    """Correlation of ranks; 0 where one side is constant."""
    a, b = ranks(a), ranks(b)
    over = sum((x - mean(a)) * (y - mean(b)) for x, y in zip(a, b, strict=True))
    under = (sum((x - mean(a)) ** 2 for x in a) * sum((y - mean(b)) ** 2 for y in b)) ** 0.5
    return over / under if under else 0.0


def main() -> None:
    import triton

    measured = json.loads((HERE.parent / "results" / "h200_configs.json").read_text())
    jobs = {}
    for case, found in measured["cases"].items():
        name, _, size = case.split(",")
        layer = Layer(4096, 4096, 4096 // int(size), 8192, train=True)
        for _, config in found["ours"]:
            values = tuple((key, value) for key, value in config.items() if key not in compiled.WORDS)
            jobs[case, str(config)] = compiled.Job("sm90", layer, PLACES[name][1], values)
    unique = list(dict.fromkeys(jobs.values()))
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn"), start) as pool:
        codes = dict(zip(unique, pool.map(compile_job, unique, chunksize=4), strict=True))
    on = model.chip("sm90")
    rows, everything = [], ([], [])
    for case, found in measured["cases"].items():
        name, tokens, size = case.split(",")
        kernel, place = PLACES[name]
        each = Class(kernel, "bf16", None, None, int(size), int(size), (None,))
        pairs = []
        for us, config in found["ours"]:
            code = codes[jobs[case, str(config)]]
            if code.failure or not code.waves:
                continue
            launch, summed = search.work(each, config, code, int(tokens), on, place)
            guess = model.time(on, launch).us + (model.copy(on, summed) if summed else 0.0)
            pairs.append((us, guess))
        if len(pairs) < 5:
            continue
        times, guesses = (list(side) for side in zip(*pairs, strict=True))
        everything[0].extend(times)
        everything[1].extend(guesses)
        chosen = times[guesses.index(min(guesses))]
        rows.append(
            {
                "case": case,
                "configs": len(pairs),
                "spearman": round(spearman(times, guesses), 2),
                "chosen_over_best": round(chosen / min(times), 2),
                "median_over_best": round(median(times) / min(times), 2),
                "modelled_over_measured": round(median(g / t for t, g in pairs), 2),
            }
        )
    groups = {}
    for kernel in ("bdmm", "bdmm_wgrad"):
        part = [row for row in rows if PLACES[row["case"][:2]][0] == kernel]
        groups[kernel] = {
            "cases": len(part),
            "median_spearman": round(median(row["spearman"] for row in part), 2),
            "worst_spearman": min(row["spearman"] for row in part),
            "median_chosen_over_best": round(median(row["chosen_over_best"] for row in part), 2),
            "worst_chosen_over_best": max(row["chosen_over_best"] for row in part),
            "median_median_over_best": round(median(row["median_over_best"] for row in part), 2),
        }
    head = {
        "what": "the model of benchmarks/cdna_tune with an H200's rates against times measured on one",
        "triton": f"compiled with {triton.__version__}, measured with {measured['triton']}",
        "spearman_over_all": round(spearman(*everything), 2),
        **groups,
    }
    text = (
        json.dumps(head, indent=1)[:-2]
        + ',\n "rows": [\n  '
        + ",\n  ".join(map(json.dumps, rows))
        + "\n ]\n}\n"
    )
    (HERE.parent / "results" / "model_h200.json").write_text(text)
    print(json.dumps(head, indent=1))


if __name__ == "__main__":
    main()
