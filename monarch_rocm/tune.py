"""`monarch-rocm tune`: find the fastest config of each launch on the GPU at hand, and keep it.

Each candidate must first compute what PyTorch's product computes; the others are dropped. Then all
take turns (`timing`) with what they compete with: PyTorch's product, and what "auto" would run
without the kernel. Winners go to the user's own table, which lookups read before the shipped one.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from monarch_rocm import launches, timing
from monarch_rocm.kernels import space, store, tuning
from monarch_rocm.launches import KERNELS, Config, Operation, Task, Tensors
from monarch_rocm.shape import MonarchShape

QUICK = 3  # rounds in which all candidates take part
FINALISTS = 5  # of which that many go on
MARGIN = 0.98  # of a rival's time, which a kernel must stay below to win
PYTORCH, AUTO = "PyTorch", "auto without it"


@dataclass(frozen=True)
class Found:
    """The outcome of a task: the fastest `config`, whether it `wins`, and median microseconds, summed
    over the task's operations, of it and of its rivals; `skipped` counts candidates that failed.

    Where no candidate ran, `config` is the one that lookups gave before, without a time.
    """

    task: Task
    config: Config
    wins: bool
    time: float | None
    rivals: dict[str, float]
    skipped: int


def tune(
    shapes: Sequence[MonarchShape],
    tokens: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    train: bool,
    rounds: int,
    console: Console,
) -> list[Found]:
    """Tune all launches of some layers, write the user's tables, and print what was found.

    Args:
        shapes (sequence of MonarchShape): the layers.
        tokens (sequence of int): rows of the input; each counts as the next power of two.
        dtype (torch.dtype): bfloat16, float16 or float32.
        device (torch.device): where to measure, the current one.
        train (bool): gradients too.
        rounds (int): timed runs of each finalist, at least 4.
        console (Console): where the progress bar and the table go.

    Raises:
        torch.OutOfMemoryError: operands do not fit; what was found before is kept.
        OSError: the user's table cannot be written.
    """
    buckets = dict.fromkeys(map(tuning.bucket_of, tokens))
    operations: list[Operation] = []
    for shape in shapes:
        for bucket in buckets:
            operations += launches.forward(shape, bucket, train)
            operations += launches.backward(shape, bucket) if train else ()
    todo = list(launches.tasks(tuple(operations)))
    arch = tuning.architecture(device)
    found = []
    with Progress(console=console) as progress:
        total = sum(len(candidates(task, dtype, device)) * len(task.operations) for task in todo)
        bar = progress.add_task("tuning", total=total)
        for task in todo:
            progress.update(bar, description=str(task))
            with store.measuring(arch):
                found.append(search(task, dtype, device, rounds, lambda: progress.advance(bar)))
                keep(found[-1], dtype, arch)
    console.print(table(found))
    console.print(f"written: {tuning.cache_dir() / arch}")
    return found


def keep(found: Found, dtype: torch.dtype, arch: str) -> None:
    """Write what was found into the user's table."""
    task = found.task
    at = {"out": task.n_out, "in": task.n_in, "tokens": task.tokens}
    row = {"at": at, "config": found.config, "wins": found.wins}
    store.save(task.kernel, arch, dtype.itemsize, row)


def candidates(task: Task, dtype: torch.dtype, device: torch.device) -> list[Config]:
    """The configs to try: the one that lookups give now, and those of the search space that fit."""
    kernel = KERNELS[task.kernel]
    memory = _shared_memory(device)

    def fits(config: Config) -> bool:
        # A pipeline of n stages holds at least n - 1 of them.
        held = kernel.staged(config) * dtype.itemsize * max(1, config["num_stages"] - 1)
        return held <= memory and kernel.fits(config, task.n_out, task.n_in, task.tokens)

    present = tuning.lookup(task.kernel, device, dtype, task.n_out, task.n_in, task.tokens)["config"]
    rocm = torch.version.hip is not None
    others = (config for config in space.candidates(task.kernel, rocm) if fits(config))
    return [present, *(config for config in others if config != present)]


def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have: what the device says, 64 KiB (CDNA's) where it says nothing."""
    if device.type != "cuda":
        return 2**16
    properties = torch.cuda.get_device_properties(device)
    names = ("shared_memory_per_block_optin", "shared_memory_per_block")
    return max(getattr(properties, name, 0) for name in names) or 2**16


def search(
    task: Task,
    dtype: torch.dtype,
    device: torch.device,
    rounds: int,
    advance: Callable[[], None] = lambda: None,
) -> Found:
    """Find a task's fastest config by its time summed over the task's operations.

    It wins where that sum was below each rival's beyond noise (`is_faster`). Nothing is written.

    Args:
        task (Task): what to find.
        dtype, device: of the operands, which are drawn here.
        rounds (int): timed runs of each finalist.
        advance (callable): called whenever a candidate was checked on an operation.
    """
    tried = {json.dumps(config): config for config in candidates(task, dtype, device)}
    kernel = KERNELS[task.kernel]
    with torch.no_grad(), tuning.without(task.kernel):

        def time(names: Sequence[str], count: int, rivals: bool) -> dict[str, list[float]]:
            """Microseconds of each round, summed over operations."""
            sums: dict[str, list[float]] = {}
            for operation in task.operations:
                operands = operation.operands(launches.draw(dtype, device))
                runs = {name: _bind(kernel.launch, operation, operands, tried[name]) for name in names}
                if rivals:
                    runs[PYTORCH] = _bind(operation.run, operands, "torch")
                    runs[AUTO] = _bind(operation.run, operands, "auto")
                for name, values in timing.measure(runs, count, False).items():
                    sums[name] = [a + b for a, b in zip(sums.get(name, [0.0] * count), values, strict=True)]
            return sums

        def right(names: Iterable[str], advance: Callable[[], None]) -> list[str]:
            """Those that compile, fit and are right on every operation."""
            left = list(names)
            for operation in task.operations:
                operands = operation.operands(launches.draw(dtype, device))
                wanted = operation.run(operands, "torch")
                for name in list(left):
                    if not _is_right(kernel, operation, operands, tried[name], wanted):
                        left.remove(name)
                    advance()
            return left

        alive = right(tried, advance)
        if not alive:
            rivals = {name: statistics.median(values) for name, values in time((), rounds, True).items()}
            return Found(task, next(iter(tried.values())), False, None, rivals, len(tried))
        quick = time(alive, QUICK, False)
        for number in range(space.rounds(task.kernel) if torch.version.hip else 0):
            best = min(quick, key=lambda name: statistics.median(quick[name]))
            others = space.variants(task.kernel, number, tried[best], tuning.architecture(device))
            fresh = {json.dumps(config): config for config in others if config not in tried.values()}
            tried |= fresh
            quick |= time(right(fresh, lambda: None), QUICK, False)
        finalists = sorted(quick, key=lambda name: statistics.median(quick[name]))[:FINALISTS]
        times = time(finalists, rounds, True)
    medians = {name: statistics.median(values) for name, values in times.items()}
    best = min(finalists, key=lambda name: medians[name])
    wins = all(is_faster(times[best], times[rival]) for rival in (PYTORCH, AUTO))
    rivals = {name: medians[name] for name in (PYTORCH, AUTO)}
    return Found(task, tried[best], wins, medians[best], rivals, len(tried) - len(quick))


def _bind(function: Callable[..., object], *args: object) -> timing.Run:
    return lambda: function(*args)


def _is_right(
    kernel: launches.Kernel, operation: Operation, operands: Tensors, config: Config, wanted: Tensors
) -> bool:
    """Whether a config compiles, fits the device and computes what PyTorch's product computes."""
    try:
        with _unwritten_is_nan():
            got = kernel.launch(operation, operands, config)
        return all(map(_is_close, got, wanted))
    except Exception:
        # Whatever compiler and driver raise. A device that is lost fails the rivals too, who are not caught.
        return False


def _is_close(got: Tensor, wanted: Tensor) -> bool:
    """Within the rounding of two sums in another order; for float32 also within TF32's, which PyTorch
    may have been told to use. A tile that is missing or misplaced is off by as much as the values are.
    """
    allowed = max(4 * torch.finfo(wanted.dtype).eps, 2e-3) * wanted.abs().amax()
    return got.shape == wanted.shape and bool((got - wanted).abs().amax() <= allowed)


@contextmanager
def _unwritten_is_nan() -> Iterator[None]:
    """Fill fresh tensors with NaN: else a config that writes nothing may be handed the memory, and so
    the values, of one that was right.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill


def is_faster(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether one of two competitors that took turns was faster beyond noise: by 2% in the median, and
    in three rounds of four.

    Example:
        >>> is_faster([90, 91, 89, 120], [100, 99, 101, 100])
        True
        >>> is_faster([99, 99, 99, 99], [100, 100, 100, 100])
        False
    """
    won = sum(a < b for a, b in zip(ours, theirs, strict=True))
    return statistics.median(ours) < MARGIN * statistics.median(theirs) and won >= 0.75 * len(ours)


def taken(task: Task, found: Sequence[Found]) -> str:
    """What "auto" takes where the task's kernel could serve: a kernel's name, PyTorch's product, or for
    whole layers what it takes stage by stage.

    Each kernel was measured against what "auto" took without it, so that the last winner is taken. The
    one for few tokens, measured on whole layers, serves single stages of its sizes too.
    """

    def serves(other: Task) -> bool:
        if other.kernel == "bdmv" and task.kernel == "bdmm":
            return (other.n_out, other.n_in, other.tokens) == (task.n_out, task.n_in, task.tokens)
        return bool(set(task.operations) & set(other.operations))

    winners = [each.task.kernel for each in found if each.wins and serves(each.task)]
    if winners:
        return winners[-1]
    return AUTO if isinstance(task.operations[0], launches.Layer) else PYTORCH


def table(found: Sequence[Found]) -> Table:
    """The outcome, a row a task."""
    shown = Table(title="median microseconds, summed over the launches that share a config")
    times = (PYTORCH, AUTO)
    for name in ("kernel", "out x in", "tokens", "launches", "best config", "time", *times, "auto takes"):
        left = name in ("kernel", "best config", "auto takes")
        shown.add_column(name, justify="left" if left else "right")
    for each in found:
        task = each.task
        config = " ".join(f"{key}={value}" for key, value in each.config.items())
        shown.add_row(
            task.kernel,
            f"{task.n_out} x {task.n_in}",
            str(task.tokens),
            str(len(task.operations)),
            f"{config} ({each.skipped} skipped)" if each.skipped else config,
            "none ran" if each.time is None else f"{each.time:.4g}",
            *(f"{each.rivals[name]:.4g}" for name in times),
            taken(task, found),
        )
    return shown
