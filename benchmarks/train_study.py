"""Train one small GPT after another, dense and Monarch, and keep what each reached in a CSV.

python benchmarks/train_study.py --grid scout main --minutes 12 --out benchmarks/results/train_h200.csv

The model, the text and the schedule are those of examples/train_lm.py; the text is all Python source
of the Python that runs this (standard library and site-packages, 110 MB). A row is appended as soon as
a run ends; runs whose row is there already are skipped, so the same command goes on where it stopped.
No run is begun that would not end within --minutes. On a GPU a whole training step is one CUDA graph,
and --workers processes share the GPUs, so that one compiles while others train: seconds of such runs
are no timings, which `--grid timing --workers 1` measures.
"""

import argparse
import csv
import dataclasses
import datetime
import itertools
import math
import os
import platform
import sys
import sysconfig
import tempfile
import time
import traceback
from pathlib import Path

import torch
from filelock import FileLock
from torch import nn

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from train_lm import GPT, linear_layers, rate, read_text, windows  # noqa: E402

from monarch_rocm import __version__, optim, schedules  # noqa: E402

LIMIT = 110_000_000  # bytes of text
EVALUATED = 2**21  # tokens of the validation loss
WARMUP = 100
CHECK = 250  # steps between looks at the loss


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run; a row of the CSV with the same values is the same run."""

    linear: str = "dense"
    width: int = 512
    nblocks: int = 0
    rank: int = 0  # 0: fly's sizes
    lr: float = 1e-3  # times sqrt(512 / n) for a matrix in the blocks whose outputs read n inputs
    times: float = 1.0  # of all matrices in the blocks
    optimizer: str = "adamw"
    options: str = ""  # words, joined by +
    seed: int = 0
    steps: int = 1500
    layers: int = 8
    head_size: int = 64
    context: int = 1024
    tokens: int = 2**15  # a step
    recipe: int = 4  # to be raised when the model, the text or the meaning of rates changes

    def has(self, option):
        return option in self.options.split("+")

    @property
    def key(self):
        return tuple(str(value) for value in dataclasses.astuple(self))


def dense(width=512, **kwargs):
    return Run("dense", width, **kwargs)


def monarch(nblocks=4, width=512, **kwargs):
    return Run("monarch", width, nblocks, **kwargs)


def training_flops(run, model):
    """FLOPs of a run: three passes of the products that have weights and of causal attention."""
    products = sum(p.numel() for p in model.blocks.parameters() if p.ndim > 1) + model.head.weight.numel()
    attention = run.layers * run.context * run.width  # two products, half of each masked
    return 3 * 2 * (products + attention) * run.tokens * run.steps


def block_parameters(model):
    """Numbers in the blocks of the trained model, without guides."""
    named = model.blocks.named_parameters()
    return sum(parameter.numel() for name, parameter in named if not name.endswith("guide"))


def build(run, device):
    torch.manual_seed(run.seed)
    layout = "blocked" if run.has("blocked") else "interleaved"
    linear = linear_layers(run.linear, run.nblocks, run.rank or None, layout)
    with torch.device(device):
        model = GPT(run.width, run.layers, run.head_size, run.context, linear)
    return schedules.self_guide(model) if run.has("guided") else model


def optimizers(run, model, device):
    """The optimizers, each with its groups."""
    wanted = {"lr": run.lr, "weight_decay": 0.1, "base_width": 512}
    # By the rule for Muon also for AdamW: rates mean the same in every row, whatever the package recommends.
    matrices, head = (
        optim.param_groups(part, **wanted, matrices=True) for part in (model.blocks, model.head)
    )
    for group in matrices:
        group["lr"] = group["initial_lr"] = group["lr"] * run.times
    others = head + optim.param_groups(model, **wanted, without=matrices + head)
    if run.optimizer == "muon":
        kinds = [optim.Muon(matrices)]
        kinds.append(torch.optim.AdamW(others, betas=(0.9, 0.95), fused=True))
    else:
        kinds = [torch.optim.AdamW(matrices + others, betas=(0.9, 0.95), fused=True)]
    if device == "cuda":  # rates in tensors, which a graph reads anew at each replay
        for group in itertools.chain.from_iterable(kind.param_groups for kind in kinds):
            group["lr"], group["capturable"] = torch.tensor(group["lr"], device=device), True
    if run.has("caps"):
        optim.StepCaps(model).attach(kinds[0])
    return kinds


def train(run, texts, device, note):
    """The row of a run, or None where `note(run, steps done)` says that time is up."""
    began = time.perf_counter()
    model = build(run, device)
    kinds = optimizers(run, model, device)
    numbers = block_parameters(model)
    batch = run.tokens // run.context
    generator = torch.Generator().manual_seed(run.seed)
    starts = torch.randint(len(texts[0]) - run.context - 1, (run.steps, batch), generator=generator)
    starts, losses = starts.to(device), torch.zeros(run.steps, device=device)
    chosen = torch.zeros(batch, dtype=torch.long, device=device)
    if device == "cuda":
        for block in model.blocks:
            block.compile(dynamic=False)  # they share one graph, so that one is compiled

    def forward(text, places):
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return model(*windows(text, places, run.context))

    def step():
        loss = forward(texts[0], chosen)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        for kind in kinds:
            kind.step()
        return loss.detach()

    def set_rates(share):
        for group in itertools.chain.from_iterable(kind.param_groups for kind in kinds):
            value = group["initial_lr"] * share
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value

    def zero_grad():
        for kind in kinds:
            kind.zero_grad()

    if device == "cuda":
        replay = capture(step, set_rates, zero_grad, kinds)
    else:

        def replay():
            zero_grad()
            return step()

    def synchronize():
        if device == "cuda":
            torch.cuda.synchronize()

    synchronize()
    prepared, done = time.perf_counter(), 0
    while done < run.steps:
        set_rates(rate(done, run.steps, WARMUP))
        if run.has("guided"):
            schedules.set_guidance(model, schedules.guidance(done, run.steps // 2))
        chosen.copy_(starts[done])
        losses[done].copy_(replay())
        done += 1
        if done % CHECK == 0 or done == run.steps:
            finite = bool(torch.isfinite(losses[:done]).all())  # waits for the GPU
            if not note(run, done) and done < run.steps:
                return None
            if not finite:
                break
    synchronize()
    seconds = time.perf_counter() - prepared
    history = losses[:done].double().cpu()
    smooth = [round(float(part.mean()), 4) for part in history.split(50)]
    return {
        **dataclasses.asdict(run),
        "block_parameters": numbers,
        "training_flops": training_flops(run, model),
        "validation_loss": validate(forward, texts[1], run) if finite else math.nan,
        "train_loss": smooth[-1],
        "steps_done": done,
        "seconds": round(seconds, 2),
        "prepared_in": round(prepared - began, 1),
        "curve": " ".join(map(str, smooth)),
    }


def capture(step, set_rates, zero_grad, kinds):
    """A function that replays `step` as one CUDA graph; parameters and optimizers begin as they are."""
    set_rates(0.0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiles, and makes the optimizers' states
            zero_grad()
            step()
    torch.cuda.current_stream().wait_stream(stream)
    zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for kind in kinds:
        for state in kind.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()

    def replay():
        graph.replay()
        return loss

    return replay


def validate(forward, text, run):
    """Mean loss over the same windows of the validation text for every run of a context."""
    count = min(EVALUATED, len(text) // 2 // run.context * run.context) // run.context
    batch = min(count, run.tokens // run.context)
    count -= count % batch
    places = torch.arange(count, device=text.device) * ((len(text) - run.context - 1) // count)
    # With gradients: the compiled forward pass of training serves, and nothing is compiled anew.
    losses = [forward(text, part).detach().double() for part in places.split(batch)]
    return round(float(torch.stack(losses).mean()), 5)


def gather(limit, device):
    """(train, validation) as tensors of bytes; kept in a file, since several processes read it."""
    cache = Path(tempfile.gettempdir()) / f"train_study_{limit}.pt"
    with FileLock(f"{cache}.lock"):
        if not cache.exists():
            roots = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")]
            parts = [torch.frombuffer(bytearray(p), dtype=torch.uint8) for p in read_text(roots, limit=limit)]
            partial = cache.with_suffix(f".{os.getpid()}")
            torch.save(parts, partial)
            partial.replace(cache)
    return [part.to(device) for part in torch.load(cache)]


def append(path, row):
    with FileLock(f"{path}.lock"):
        new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, row)
            if new:
                writer.writeheader()
            writer.writerow(row)


def environment(device, text, workers):
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {
        "device": name,
        "workers": workers,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "monarch_rocm": __version__,
        "date": datetime.date.today().isoformat(),
        "text_bytes": sum(map(len, text)),
    }


def work(number, arguments, runs, deadline):
    """One worker: takes the runs in order, each where no other worker has taken it."""
    device, path = arguments.device, Path(arguments.out)
    if device == "cuda":
        torch.cuda.set_device(number % torch.cuda.device_count())
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.cache_size_limit = 256
    torch._dynamo.config.accumulated_cache_size_limit = 4096
    texts = gather(arguments.limit, device)
    found = environment(device, texts, arguments.workers)
    claims = Path(arguments.claims)
    took: dict[tuple, float] = {}  # seconds for a step, for each kind and size of model

    def note(run, done):
        left = deadline - time.time()
        print(f"[{number}] {describe(run)} step {done}/{run.steps}, {left:.0f} s left", flush=True)
        return left > 0

    for place, run in enumerate(runs):
        kind = run.linear, run.nblocks, run.rank, run.width, run.context, run.tokens, run.options
        if time.time() + took.get(kind, 0.0) * run.steps > deadline:
            continue
        try:
            (claims / str(place)).mkdir()
        except FileExistsError:
            continue
        began = time.perf_counter()
        try:
            row = train(run, texts, device, note)
        except Exception:  # one run that fails must not cost the others their time
            print(f"[{number}] {describe(run)} failed:\n{traceback.format_exc()}", flush=True)
            continue
        finally:
            if device == "cuda":
                torch.cuda.empty_cache()
        if row is None:
            print(f"[{number}] {describe(run)} was given up: time is up", flush=True)
            return
        append(path, row | found)
        took[kind] = (time.perf_counter() - began) / row["steps_done"]
        print(
            f"[{number}] {describe(run)}: {row['validation_loss']} in {row['seconds']} s, "
            f"prepared in {row['prepared_in']} s",
            flush=True,
        )


def describe(run):
    kind = f"monarch {run.nblocks}" + (f" rank {run.rank}" if run.rank else "")
    kind = kind if run.linear == "monarch" else "dense"
    return f"{kind} d={run.width} lr={run.lr:g}*{run.times:g} {run.optimizer} {run.options} s{run.seed}"


MIDDLE = {"context": 512, "tokens": 2**14}  # a third of the FLOPs of a step of 2**15 tokens, and narrower
SMALL = {"context": 512, "tokens": 2**13}
TINY = {"width": 64, "layers": 2, "head_size": 32, "context": 128, "tokens": 2**10}
# The rates that the scouts found best, of dense layers and of Monarch layers alike.
ADAMW, MUON = {"lr": 1e-3, "times": 2}, {"lr": 4e-3, "times": 1, "optimizer": "muon"}
CAPPED = ADAMW | {"options": "caps", "times": 4}  # past where the caps are reached


def grids():
    """The runs of each part of the study, the most valuable first."""
    # No more FLOPs than the dense model of each size, then no more than half its parameters.
    equal = dense(256, **SMALL), monarch(8, 512, **SMALL), monarch(4, 384, **SMALL), monarch(16, 640, **SMALL)
    half = monarch(8, 384, **SMALL), monarch(16, 576, **SMALL)
    large = dense(512), monarch(16, 1280), monarch(16, 1152), monarch(8, 1024)

    def tried(runs, kind, times=(None,), seeds=(0,)):
        wanted = [kind | {"seed": seed} | ({"times": t} if t else {}) for seed in seeds for t in times]
        return [dataclasses.replace(run, **values) for values in wanted for run in runs]

    scout = tried(equal, MUON) + tried(equal, ADAMW) + tried(half, ADAMW) + tried(half, MUON)
    scout += tried(equal[:3], ADAMW, (1, 4)) + tried(equal[:2], MUON, (2, 0.5))
    main = tried(large, ADAMW, seeds=(0, 1, 2)) + tried(large[:1], ADAMW, (1, 2.8))
    main += tried(large[:3], ADAMW, (1.4,), seeds=(0, 1, 2))
    main += tried(large[:1], MUON, seeds=(0, 1, 2)) + tried((monarch(8, 1024), monarch(4, 768)), MUON)
    main += tried(large[3:], CAPPED, (4, 16, 1)) + tried((monarch(8, 832), monarch(4, 768)), ADAMW)
    shapes = [monarch(nblocks, 256, **SMALL) for nblocks in (4, 8, 16)]
    shapes += [monarch(8, 512, rank=4, **SMALL), monarch(8, 384, rank=12, **SMALL)]
    shapes += [monarch(4, 256, rank=32, **SMALL), monarch(8, 256, rank=12, **SMALL)]
    words = [monarch(8, 512, options=options, **SMALL, **ADAMW) for options in ("blocked", "guided")]
    small = {"steps": 20, "width": 64, "layers": 2, "head_size": 32, "context": 64, "tokens": 512}
    tiny = dense(**TINY), monarch(4, **TINY | {"width": 96})
    tiny_ranks = [monarch(4, rank=rank, **TINY) for rank in (2, 4, 8)] + [monarch(8, **TINY | {"width": 128})]
    return {
        "scout": scout,
        "main": main,
        "budgets": tried(
            (dense(384, **MIDDLE), monarch(8, 768, **MIDDLE), monarch(16, 1024, **MIDDLE)), ADAMW
        ),
        "stability": tried(equal[1:2], CAPPED, (4, 16, 1)) + tried(equal[1:2], ADAMW, (2, 8, 0.5)),
        # From a width to four times it and from 4 blocks to 16, in steps of 1.4.
        "transfer": tried(
            [monarch(nblocks, width, **SMALL) for nblocks, width in ((4, 128), (4, 512), (8, 128), (8, 512))]
            + [monarch(16, 512, **SMALL)],
            ADAMW,
            (2, 1.4, 2.8, 1, 4),
        ),
        "shapes": tried(shapes, ADAMW) + words,
        "seeds": tried(equal[:2], ADAMW, seeds=(1, 2)) + tried(equal[:3:2], MUON, seeds=(1, 2)),
        # An hour on a CPU: --device cpu --limit 30000000
        "cpu": [
            *tried(tiny, ADAMW),
            *tried(tiny, MUON, (0.5,)),
            *tried(tiny[1:], ADAMW, (0.5, 8)),
            *tried(tiny, ADAMW, (1.4, 2.8)),
            *tried(tiny_ranks, ADAMW),
            *tried(tiny[1:], CAPPED, (4, 16)),
            *[dataclasses.replace(tiny[1], options=options, **ADAMW) for options in ("blocked", "guided")],
        ],
        # Alone on the GPU: --workers 1.
        "timing": [
            dataclasses.replace(run, steps=100)
            for run in [*tried(large, ADAMW), *tried(large[::3], MUON), *tried(large[3:], CAPPED)]
        ],
        "smoke": [dataclasses.replace(run, **small) for run in [*main, *words]],
    }


def read_rows(path):
    """Rows of the CSV, of earlier runs."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu = torch.cuda.is_available()
    parser.add_argument("--grid", nargs="+", default=["scout", "main"], help=f"of {', '.join(grids())}")
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--workers", type=int, default=3 if gpu else 1)
    parser.add_argument("--out", default="train_study.csv")
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--limit", type=int, default=LIMIT, help="bytes of text")
    parser.add_argument("--list", action="store_true", help="print the runs that are left, and stop")
    arguments = parser.parse_args()
    deadline = time.time() + 60 * arguments.minutes
    path = Path(arguments.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    for grid in arguments.grid:
        rows = read_rows(path)
        if rows and rows[0].get("recipe") != str(Run().recipe):
            parser.error(f"{path} has rows of another recipe: name another file with --out")
        before = {tuple(row[field.name] for field in dataclasses.fields(Run)) for row in rows}
        runs = [run for run in dict.fromkeys(grids()[grid]) if run.key not in before]
        if arguments.list:
            for run in runs:
                model = build(run, "meta")
                numbers, flops = block_parameters(model), training_flops(run, model)
                print(f"{describe(run):60} {numbers / 1e6:6.2f} M  {flops / 1e15:6.2f} PFLOP")
        else:
            carry_out(runs, arguments, deadline)


def carry_out(runs, arguments, deadline):
    with tempfile.TemporaryDirectory() as claims:
        arguments.claims = claims
        if arguments.workers == 1:
            work(0, arguments, runs, deadline)
        else:
            gather(arguments.limit, "cpu")
            torch.multiprocessing.spawn(work_in_turn, (arguments, runs, deadline), arguments.workers)


def work_in_turn(number, *rest):
    time.sleep(5 * number)  # the first run's kernels are in the caches when others ask for them
    work(number, *rest)


if __name__ == "__main__":
    main()
