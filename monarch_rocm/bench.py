"""`monarch-rocm bench`: layers against what they replace, on the GPU at hand.

All competitors of a case run in one process and take turns (`timing`), on fresh random data. Every
case also shows the floor: the larger of its bytes over the measured copy bandwidth and its FLOPs over the
measured matrix rate.
"""

from __future__ import annotations

import csv
import json
import platform
import statistics
import subprocess
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import monarch_rocm
from monarch_rocm import functional, reference, stack
from monarch_rocm.dispatch import triton_state
from monarch_rocm.kernels import tuning
from monarch_rocm.linear import MonarchLinear
from monarch_rocm.planning import plan
from monarch_rocm.shape import MonarchShape
from monarch_rocm.timing import Run, measure, measure_host, measure_kernels

STACKS = ("stack", "stack on the GPU")
CALLS = ("call", "call for gradients")
LAYERS = 16  # whose weights a decoding step walks through, so that they come from memory


@dataclass(frozen=True)
class Case:
    """One row: a layer's sizes, and what is done with it.

    "forward" and "train" are a pass and a pass with all gradients; "decode" walks through the weights
    of `LAYERS` layers in a graph; "stack" is a compiled training step of a whole model
    (`monarch_rocm.stack`) as the clock has it, and "stack on the GPU" what its kernels take of that, as
    they would in a graph; "call" and "call for gradients"
    are the host's time for one eager call of a module, without and with gradients recorded.
    """

    kind: str
    in_features: int
    out_features: int
    tokens: int
    nblocks: int
    layout: str


def _cases() -> list[Case]:
    squares = [
        Case("forward", 4096, 4096, 8192, nblocks, layout)
        for nblocks in (4, 8, 16, 32, 64)
        for layout in ("blocked", "interleaved")
    ]
    wide = [
        Case("forward", *sizes, 8192, nblocks, layout)
        for sizes in ((4096, 14336), (14336, 4096))
        for nblocks in (4, 8)
        for layout in ("blocked", "interleaved")
    ]
    narrow = [
        Case("forward", 1024, 1024, 65536, nblocks, layout)
        for nblocks in (4, 8, 16, 32)
        for layout in ("blocked", "interleaved")
    ]
    tokens = [
        Case("forward", 4096, 4096, count, nblocks, "interleaved")
        for nblocks in (4, 16, 64)
        for count in (64, 256, 1024, 2048, 32768)
    ]
    train = [
        Case("train", 4096, 4096, 8192, nblocks, layout)
        for nblocks in (4, 8, 16, 64)
        for layout in ("blocked", "interleaved")
    ]
    decode = [
        Case("decode", 4096, 4096, count, nblocks, "interleaved")
        for nblocks in (4, 16, 64)
        for count in (1, 4, 16)
    ]
    stacks = [
        Case(kind, 2048, 2048, 8192, nblocks, layout)
        for kind in ("stack", "stack on the GPU")
        for nblocks in (4, 8)
        for layout in ("blocked", "interleaved")
    ]
    calls = [
        Case(kind, 1024, 1024, 1, nblocks, "interleaved")
        for kind in ("call", "call for gradients")
        for nblocks in (4, 16)
    ]
    return [*squares, *wide, *narrow, *tokens, *train, *decode, *calls, *stacks]


CASES = _cases()
KINDS = tuple(dict.fromkeys(case.kind for case in CASES))


def two_products(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """The two batched products alone, with no permutation: not the right function, but its price."""
    tokens = x.shape[0]
    h = torch.bmm(x.view(tokens, w1.shape[0], -1).transpose(0, 1), w1.mT)
    return torch.bmm(h.view(w2.shape[0], tokens, -1), w2.mT)


def published(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """The usual op, written anew: products into strided buffers, a copy after each of them."""
    tokens, hidden = x.shape[0], w1.shape[0] * w1.shape[1]
    h = x.new_empty(tokens, w1.shape[0], w1.shape[1])
    torch.bmm(x.view(tokens, w1.shape[0], -1).transpose(0, 1), w1.mT, out=h.transpose(0, 1))
    h = h.view(tokens, hidden // w2.shape[0], w2.shape[0]).transpose(1, 2).contiguous()
    y = x.new_empty(tokens, w2.shape[0], w2.shape[1])
    torch.bmm(h.transpose(0, 1), w2.mT, out=y.transpose(0, 1))
    return y.transpose(1, 2).reshape(tokens, -1)


def competitors(case: Case, dtype: torch.dtype, compiled: bool) -> dict[str, Run]:
    """What takes turns in a case, by name."""
    if case.kind in STACKS:
        return stack.steps(case.in_features, case.tokens, case.nblocks, case.layout, dtype)
    if case.kind in CALLS:
        return _modules(case, dtype)
    shape = MonarchShape(case.in_features, case.out_features, case.nblocks, layout=case.layout)
    layers = LAYERS if case.kind == "decode" else 1

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", dtype=dtype) / size[-1] ** 0.5

    x = draw(case.tokens, case.in_features)
    dense = [draw(case.out_features, case.in_features) for _ in range(layers)]
    ours = [(draw(*shape.factor1), draw(*shape.factor2)) for _ in range(layers)]
    backends = ["auto", "torch"]
    if case.kind == "forward" and case.in_features == case.out_features == 4096 and case.tokens == 8192:
        backends.append("triton")

    if case.kind == "train":
        grad = draw(case.tokens, case.out_features)
        for tensor in (x, dense[0], *ours[0]):
            tensor.requires_grad_()

        def step(forward: Run, *weights: Tensor) -> Run:
            return lambda: torch.autograd.grad(forward(), (x, *weights), grad)

        runs = {"dense": step(lambda: F.linear(x, dense[0]), dense[0])}
        for backend in backends:
            runs[backend] = step(partial(functional.apply, x, *ours[0], None, shape, backend), *ours[0])
        return runs

    runs = {"dense": lambda: [F.linear(x, weight) for weight in dense]}
    for backend in backends:
        runs[backend] = partial(_each, x, ours, shape, backend)
    if shape.in_features == shape.K * shape.P and shape.out_features == shape.L * shape.S:
        runs["two products"] = lambda: [two_products(x, *factors) for factors in ours]
        runs["published op"] = lambda: [published(x, *factors) for factors in ours]
    if compiled and "triton" in runs:
        torch.compiler.reset()  # else one shape's compilation counts against the next
        einsum = torch.compile(reference.monarch_linear)
        runs["compiled einsum"] = lambda: einsum(x, *ours[0], None, shape)
    if case.kind == "decode":
        return {name: _graph(run) for name, run in runs.items()}
    return runs


def _modules(case: Case, dtype: torch.dtype) -> dict[str, Run]:
    n_in, n_out = case.in_features, case.out_features
    x = torch.randn(case.tokens, n_in, device="cuda", dtype=dtype)
    dense = nn.Linear(n_in, n_out, device="cuda", dtype=dtype)
    monarch = MonarchLinear(n_in, n_out, device="cuda", dtype=dtype, nblocks=case.nblocks, layout=case.layout)
    return {"dense": partial(dense, x), "auto": partial(monarch, x)}


def _each(x: Tensor, layers: list[tuple[Tensor, Tensor]], shape: MonarchShape, backend: str) -> None:
    for factors in layers:
        functional.apply(x, *factors, None, shape, backend)


def _graph(run: Run) -> Run:
    with torch.no_grad():
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    return graph.replay


def ceilings(dtype: torch.dtype, rounds: int) -> tuple[float, float]:
    """(bytes a second of a large copy, FLOPs a second of a large product)."""
    source = torch.randn(2**29, device="cuda")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=dtype) for _ in range(2))
    times = measure({"copy": source.clone, "product": lambda: a @ b}, rounds, False)
    copy, product = (statistics.median(times[name]) * 1e-6 for name in ("copy", "product"))
    return 2 * source.nbytes / copy, 2 * 8192**3 / product


def floor_us(case: Case, dtype: torch.dtype, bandwidth: float, rate: float) -> float | None:
    """The least time: each input and weight read once and each output written once, or the FLOPs.

    For a whole model only the FLOPs of its linear layers count; the host's time has no floor.
    """
    if case.kind in CALLS:
        return None
    if case.kind in STACKS:
        return 3 * 2 * case.tokens * stack.parameters(case.in_features, case.nblocks) / rate * 1e6
    shape = MonarchShape(case.in_features, case.out_features, case.nblocks, layout=case.layout)
    moved = case.tokens * (case.in_features + case.out_features) + shape.num_parameters
    flops = 2 * case.tokens * shape.num_parameters
    passes = 3 if case.kind == "train" else 1
    # A training step moves x and y, dx and dy, and each weight and its gradient; it multiplies thrice.
    moved = moved * 2 + case.tokens * case.in_features if case.kind == "train" else moved
    return max(moved * dtype.itemsize / bandwidth, passes * flops / rate) * 1e6


def environment() -> dict[str, str]:
    """What a result depends on besides the code."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": properties.name,
        "arch": tuning.architecture(torch.device("cuda", 0)),
        "clocks": _clocks(),
        "torch": torch.__version__,
        "triton": triton_state()[0],
        "runtime": f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}",
        "python": platform.python_version(),
        "monarch_rocm": monarch_rocm.__version__,
    }


def _clocks() -> str:
    """The clocks as found, read only."""
    query = "--query-gpu=clocks.sm,clocks.mem,clocks.max.sm"
    try:
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        if torch.version.hip:
            command = ["rocm-smi", "--showclocks", "--csv"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip().replace("\n", "; ")


def bench(
    out: Path, cases: list[Case], dtype: torch.dtype, rounds: int, compiled: bool, console: Console
) -> None:
    """Measure the cases, print a table, and write `out` as CSV and, with the environment, as JSON."""
    found = environment()
    bandwidth, rate = ceilings(dtype, rounds)
    console.print(
        f"{found['device']}: copies {bandwidth / 1e12:.2f} TB/s, multiplies {rate / 1e12:.0f} TFLOP/s"
    )
    rows = []
    for case in track(cases, "measuring", console=console):
        runs = competitors(case, dtype, compiled)
        if case.kind in CALLS:
            times = measure_host(runs, rounds, case.kind != "call")
        elif case.kind == "stack on the GPU":
            times = measure_kernels(runs, rounds)
        else:
            times = measure(runs, rounds, case.kind in ("train", "stack"))
        shape = MonarchShape(case.in_features, case.out_features, case.nblocks, layout=case.layout)
        launches = () if case.kind in STACKS else plan(shape, case.tokens, dtype, "cuda").kernels
        per = LAYERS if case.kind == "decode" else 1
        floor = floor_us(case, dtype, bandwidth, rate)
        dense = statistics.median(times["dense"])
        for name, values in times.items():
            low, *_, high = statistics.quantiles(values, n=5)
            median = statistics.median(values)
            rows.append(
                {
                    **asdict(case),
                    "dtype": str(dtype).removeprefix("torch."),
                    "run": name,
                    "p20_us": round(low / per, 2),
                    "p50_us": round(median / per, 2),
                    "p80_us": round(high / per, 2),
                    "speedup": round(dense / median, 3),
                    "floor_us": None if floor is None else round(floor, 2),
                    "of_floor": None if floor is None else round(floor * per / median, 3),
                    "launches": " + ".join(str(each.get("kernel", each.get("op"))) for each in launches)
                    if name == "auto"
                    else "",
                }
            )
        del runs
        write(out, rows, found, {"copy_bytes_per_s": bandwidth, "product_flops_per_s": rate})
    console.print(table(rows))
    console.print(f"written: {out.with_suffix('.csv')} and {out.with_suffix('.json')}")


def write(out: Path, rows: list[dict[str, Any]], found: dict[str, str], ceiling: dict[str, float]) -> None:
    """Write what was measured so far, so that a case that fails costs no other."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    out.with_suffix(".json").write_text(
        json.dumps({"environment": found, "ceilings": ceiling, "rows": rows}, indent=1) + "\n"
    )


def table(rows: list[dict[str, Any]]) -> Table:
    """The rows a case each: times of all runs, and what `auto` reached."""
    names = list(dict.fromkeys(row["run"] for row in rows))
    shown = Table(title="median microseconds; speed-up of auto over dense")
    for name in ("kind", "in", "out", "tokens", "blocks", "layout", *names, "floor", "speed-up", "auto runs"):
        shown.add_column(name, justify="left" if name in ("kind", "layout", "auto runs") else "right")
    keys = ("kind", "in_features", "out_features", "tokens", "nblocks", "layout")
    for case in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        same = {row["run"]: row for row in rows if tuple(row[key] for key in keys) == case}
        times = [f"{same[name]['p50_us']:.4g}" if name in same else "" for name in names]
        auto = same["auto"]
        floor = "" if auto["floor_us"] is None else f"{auto['floor_us']:.4g}"
        last = (floor, f"{auto['speedup']:.2f}", auto["launches"])
        shown.add_row(*map(str, case), *times, *last)
    return shown
