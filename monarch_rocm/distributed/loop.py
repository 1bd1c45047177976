"""What a worker does: join the process group, build, load, train, tell. Knows no actor runtime."""

from __future__ import annotations

import contextlib
import datetime
import os
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from monarch_rocm.distributed.checkpoints import Checkpoints
from monarch_rocm.distributed.judge import Failure
from monarch_rocm.distributed.mark import Mark
from monarch_rocm.distributed.outbox import Outbox

Send = Callable[[tuple[Any, ...]], None]

LAST_WORDS_S = 1.0  # how long a worker that has failed waits for the metrics that a GPU still computes


@dataclass(frozen=True)
class Seat:
    """A worker's place among all."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    address: str
    port: int

    def environment(self) -> dict[str, str]:
        """What torchrun sets."""
        host, hosts = self.rank // self.local_ranks, self.ranks // self.local_ranks
        values = {
            "RANK": self.rank,
            "WORLD_SIZE": self.ranks,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_ranks,
            "GROUP_RANK": host,
            "GROUP_WORLD_SIZE": hosts,
            "ROLE_RANK": self.rank,
            "ROLE_WORLD_SIZE": self.ranks,
            "ROLE_NAME": "default",
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
        }
        return {name: str(value) for name, value in values.items()}


@dataclass(frozen=True)
class Training:
    """A run of `fleet.train`, as its workers see it."""

    build: Callable[[int], Any]
    steps: int
    checkpoints: Checkpoints | None
    stall_s: float
    device: str | None

    def __call__(self, seat: Seat, teller: Teller) -> None:
        teller.phase("join")
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if device == "cuda":
            if seat.local_rank >= torch.cuda.device_count():
                raise ValueError(
                    f"{seat.local_ranks} workers on a host with {torch.cuda.device_count()} GPUs; "
                    "a worker takes one, and device='cpu' takes none"
                )
            torch.cuda.set_device(seat.local_rank)
        # The controller judges a hang first; collectives that time out are for when it has gone.
        timeout = datetime.timedelta(seconds=2 * self.stall_s + 30)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=timeout)
        teller.phase("build")
        trainer = self.build(seat.rank)
        for name in ("model", "optimizer", "train_step"):
            if not hasattr(trainer, name):
                raise TypeError(
                    f"build must return an object with model, optimizer and train_step(step) -> dict, "
                    f"but {type(trainer).__name__} has no {name}"
                )
        teller.phase("load")
        first, passed_over = 0, list[str]()
        if self.checkpoints is not None:
            loaded = self.checkpoints.load(trainer.model, trainer.optimizer, passed_over)
            if loaded is not None:
                first, extra = loaded
                _give(trainer, extra)
        teller.start(first, passed_over)
        for step in range(first, self.steps):
            teller.step(step)
            teller.metrics(step, trainer.train_step(step))
            if self.checkpoints is not None and self.checkpoints.due(step + 1, self.steps):
                teller.phase("save")
                self.checkpoints.save(step + 1, trainer.model, trainer.optimizer, _take(trainer))
                teller.tell("saved", step + 1)
        teller.flush()


def _take(trainer: Any) -> dict[str, Any]:
    """What a trainer keeps beside model and optimizer."""
    extra = {}
    if hasattr(trainer, "scheduler"):
        extra["scheduler"] = trainer.scheduler.state_dict()
    if hasattr(trainer, "state_dict") and not isinstance(trainer, torch.nn.Module):
        extra["trainer"] = trainer.state_dict()
    return extra


def _give(trainer: Any, extra: dict[str, Any]) -> None:
    if "scheduler" in extra:
        trainer.scheduler.load_state_dict(extra["scheduler"])
    if "trainer" in extra:
        trainer.load_state_dict(extra["trainer"])


@dataclass(frozen=True)
class Script:
    """A torchrun script, run as one runs it."""

    argv: tuple[str, ...]
    stall_s = float("inf")

    def __call__(self, seat: Seat, teller: Teller) -> None:
        teller.phase("script")
        teller.tell("start", None, [])
        module = self.argv[0] == "-m"
        sys.argv = list(self.argv[module:])
        if not module:
            sys.path.insert(0, os.path.dirname(os.path.abspath(self.argv[0])))
        try:
            if module:
                runpy.run_module(self.argv[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(self.argv[0], run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise RuntimeError(f"the script ended with exit code {end.code}") from None


class Teller:
    """Sends a worker's words to the controller, and where it stands if it stands still.

    Metrics are sent in batches. Every other word takes along what waits, so that whatever is told of a
    checkpoint, an error or the end comes after all steps before it.
    """

    def __init__(self, rank: int, attempt: int, send: Send, stall_s: float, mark: Mark) -> None:
        self._send, self._rank, self._attempt, self._mark = send, rank, attempt, mark
        self._phase = "start"
        self._step: int | None = None
        self._moved = self._began = time.monotonic()
        self._stall_s, self._thread = stall_s, threading.get_ident()
        self._ended = threading.Event()
        self._outbox = Outbox(lambda told: self._say("steps", told))
        if stall_s != float("inf"):
            threading.Thread(target=self._watch, daemon=True, name="monarch-rocm-watch").start()

    def _say(self, kind: str, *words: Any) -> None:
        self._send((kind, self._attempt, self._rank, *words))

    def tell(self, kind: str, *words: Any) -> None:
        """Send a message, and count it as progress."""
        self._moved = time.monotonic()
        self._outbox.flush()
        self._say(kind, *words)

    def phase(self, name: str) -> None:
        """Enter a phase."""
        self._phase, self._step = name, None
        self.tell("phase", name)

    def start(self, first: int, passed_over: list[str]) -> None:
        """Say that all is loaded, and where training goes on."""
        self._mark.set(first)
        self.tell("start", first, passed_over)

    def step(self, step: int) -> None:
        """Enter a step."""
        self._phase, self._step = "train", step
        self._moved = self._began = time.monotonic()

    def metrics(self, step: int, metrics: Any) -> None:
        """End a step; its metrics are sent soon."""
        if not isinstance(metrics, dict):
            raise TypeError(f"train_step must return a dict of metrics, not a {type(metrics).__name__}")
        self._moved = time.monotonic()
        self._outbox.put(step, metrics, self._moved - self._began)
        self._mark.set(step + 1)

    def flush(self) -> None:
        """Send all metrics that wait."""
        self._outbox.flush()

    def failed(self, error: BaseException) -> None:
        """Send an exception."""
        with contextlib.suppress(Exception):  # the GPU that would have the metrics may be what failed
            self._outbox.flush(LAST_WORDS_S)
        self._say("failed", failure(self._rank, self._phase, self._step, error))

    def done(self) -> None:
        """Say that all went well."""
        self.tell("done")

    def stop(self) -> None:
        """Watch no longer."""
        self._ended.set()
        self._outbox.close()

    def _watch(self) -> None:
        told = 0.0
        while not self._ended.wait(min(1.0, self._stall_s / 8)):
            moved = self._moved
            if time.monotonic() - moved > self._stall_s / 2 and told != moved:
                told = moved
                frame = sys._current_frames().get(self._thread)
                stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
                self._say("stack", stack)


def failure(rank: int, phase: str, step: int | None, error: BaseException) -> Failure:
    """An exception as words, which always pickle."""
    text = "".join(traceback.format_exception(error))
    return Failure(rank, phase, step, f"{type(error).__name__}: {error}", text)


def work(job: Training | Script, seat: Seat, attempt: int, send: Send, mark: Mark) -> None:
    """Do a job and tell how it went; nothing is raised."""
    teller = Teller(seat.rank, attempt, send, job.stall_s, mark)
    try:
        os.environ.update(seat.environment())
        if seat.local_ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
        job(seat, teller)
    except BaseException as error:
        teller.failed(error)
    else:
        teller.done()
    finally:
        teller.stop()
