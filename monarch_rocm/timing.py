"""The clock of `bench` and `tune`: competitors take turns on the GPU at hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

Run = Callable[[], Any]
CALLS = 100  # in a round of the host's time


def measure(runs: dict[str, Run], rounds: int, train: bool) -> dict[str, list[float]]:
    """Microseconds of each run in each round, by CUDA or HIP events on the current stream.

    Runs take turns, with the cache flushed before each and the host far enough ahead that only the
    device's time counts.

    Args:
        runs (dict of str to callable): the competitors.
        rounds (int): turns of each, after three that are not counted.
        train (bool): whether autograd records, as a training step needs.
    """
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in runs}
    with torch.set_grad_enabled(train):
        for run in runs.values():
            for _ in range(3):
                run()
        for _ in range(rounds):
            for name, run in runs.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                flush.zero_()
                torch.cuda._sleep(8_000_000 if train else 1_000_000)  # the host gets ahead meanwhile
                begin.record()
                run()
                end.record()
                end.synchronize()
                times[name].append(begin.elapsed_time(end) * 1e3)
    return times


def measure_host(runs: dict[str, Run], rounds: int, gradients: bool) -> dict[str, list[float]]:
    """Microseconds of the host's for a call of each run, over `CALLS` calls in each round, which the GPU
    is then given time to finish; runs take turns.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    with torch.set_grad_enabled(gradients):
        for warm_up in (True, False):
            for _ in range(3 if warm_up else rounds):
                for name, run in runs.items():
                    torch.cuda.synchronize()
                    begin = time.perf_counter()
                    for _ in range(CALLS):
                        run()
                    if not warm_up:
                        times[name].append((time.perf_counter() - begin) / CALLS * 1e6)
    return times


def measure_kernels(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Microseconds that the kernels of each run take together in each round, by the profiler; runs take
    turns, and autograd records.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(3):
            run()
    for _ in range(rounds):
        for name, run in runs.items():
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                run()
                torch.cuda.synchronize()
            times[name].append(sum(each.self_device_time_total for each in profile.key_averages()))
    return times
