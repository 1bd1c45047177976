"""`Run`: a job under way. A thread drives it, starts it anew after faults, and hands records on."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import queue
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from monarch_rocm.distributed.attempt import Attempt, farewell
from monarch_rocm.distributed.judge import Cause


class Record(NamedTuple):
    """What the workers tell of one step, when all of them have done it."""

    step: int
    attempt: int  # 0 at first; after a restart, steps since the checkpoint come again with the next number
    metrics: dict[str, Any]  # rank 0's
    per_rank: tuple[dict[str, Any], ...]
    seconds: float  # the slowest rank's


class Restarted(NamedTuple):
    """A restart: who failed, why, at which step (None before the first), and how it went on."""

    rank: int | None
    cause: str
    failed_step: int | None
    resumed_step: int | None  # None where the next attempt failed before its first step
    seconds: float  # from the notice of the fault to the first new record


@dataclasses.dataclass(frozen=True)
class Restart:
    """What is done about faults.

    Args:
        max (int): restarts in all before the run gives up. Default: 0.
        stall_s (float): the longest that a worker may be silent, in seconds, in a step or while it saves.
            Longer is a hang. Default: 300.
        start_s (float): the same before its first step has ended: importing, joining, building, loading,
            compiling. Default: 1200.
        standby (bool): keep a second set of processes that have imported everything and wait, so that a
            restart takes the time of building and loading alone. They cost host memory, and no device's.
            Default: True.
        min_procs (int, optional): go on with fewer workers when some fail, down to this many in all,
            instead of replacing them. On several hosts, the failed one is left out. Default: replace them.

    Raises:
        ValueError: `max` below 0, another number not above 0.

    Example:
        >>> Restart(max=3, stall_s=120)
        Restart(max=3, stall_s=120, start_s=1200.0, standby=True, min_procs=None)
    """

    max: int = 0
    stall_s: float = 300.0
    start_s: float = 1200.0
    standby: bool = True
    min_procs: int | None = None

    def __post_init__(self) -> None:
        if self.max < 0:
            raise ValueError(f"max must be at least 0, but max={self.max!r} was given")
        for name, seconds in (("stall_s", self.stall_s), ("start_s", self.start_s)):
            if not seconds > 0:
                raise ValueError(f"{name} must be above 0, but {name}={seconds!r} was given")
        if self.min_procs is not None and self.min_procs < 1:
            raise ValueError(f"min_procs must be at least 1, but min_procs={self.min_procs!r} was given")


@dataclasses.dataclass
class Result:
    """What has become of a run, so far."""

    steps: int = 0  # done
    first_step: int | None = None  # that the first attempt began with: above 0 after a resume
    ranks: int = 0  # of the last attempt
    seconds: float = 0.0
    start_seconds: float | None = None  # from the start to the first record
    restarts: list[Restarted] = dataclasses.field(default_factory=list)
    passed_over: list[str] = dataclasses.field(default_factory=list)  # checkpoints that were not whole


class TrainingError(RuntimeError):
    """A run that gave up: the cause first, then the worker's traceback, then the restarts before it.

    Attributes:
        rank (int or None), step (int or None): whose fault it was, and where.
        restarts (list of Restarted): those before.
    """

    def __init__(self, cause: Cause, restarts: Sequence[Restarted]) -> None:
        parts = [cause.text]
        if cause.traceback:
            parts.append(cause.traceback.rstrip())
        if restarts:
            parts.append("restarts before it:")
            parts += [f"  {number}: {r.cause}" for number, r in enumerate(restarts, 1)]
        super().__init__("\n".join(parts))
        self.rank, self.step, self.restarts = cause.rank, cause.step, list(restarts)


class Sink(Protocol):
    """What follows a run: dashboard, log."""

    def record(self, record: Record) -> None: ...

    def restarted(self, restart: Restarted) -> None: ...

    def close(self) -> None: ...


STANDBY_AFTER = 5.0  # seconds of training after which a standby pays: its start takes about as long
RENEW_S = 5.0  # seconds between words to the workers that the controller is there
NEVER = float("inf")
_END = object()
_open: weakref.WeakSet[Run] = weakref.WeakSet()


class Run:
    """A job under way, made by `Fleet.train`: iterate over its records, sync or async.

    Leaving the loop, by `break`, an exception or Ctrl-C, stops the run; so does `close()`, and the end of
    the program. `wait()` runs to the end without looking at records.

    Raises:
        TrainingError: from the loop or `wait()`, where the run gave up.
    """

    def __init__(
        self,
        start: Callable[[int, int, tuple[int, ...]], Attempt],
        receiver: Any,
        size: tuple[int, int],
        restart: Restart,
        sinks: Sequence[Sink],
    ) -> None:
        self.result = Result()
        self._start, self._receiver = start, receiver
        self._hosts, self._procs = tuple(range(size[0])), size[1]
        self._restart, self._sinks = restart, list(sinks)
        self._attempts: dict[int, Attempt] = {}
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._waiting: Any = None
        self._error: BaseException | None = None
        self._began = time.monotonic()
        self._renew_at = 0.0
        self._pending: tuple[Cause, float] | None = None  # a restart under way
        self._thread = threading.Thread(target=self._drive, daemon=True, name="monarch-rocm-run")
        _open.add(self)
        self._thread.start()

    def __iter__(self) -> Iterator[Record]:
        try:
            while (item := self._queue.get()) is not _END:
                yield item
        finally:
            self.close()
        self._raise()

    async def __aiter__(self) -> AsyncIterator[Record]:
        taken: list[Any] = []
        try:
            while not (taken and taken[-1] is _END):
                taken = await asyncio.to_thread(self._take)
                for item in taken:
                    if item is not _END:
                        yield item
        finally:
            await asyncio.to_thread(self.close)
        self._raise()

    def _take(self) -> list[Any]:
        """All that has come; a call costs a change of threads, and records come many at a time."""
        taken: list[Any] = []
        with contextlib.suppress(queue.Empty):
            taken.append(self._queue.get(timeout=0.2))  # so that a cancelled task leaves no thread behind
            while taken[-1] is not _END:
                taken.append(self._queue.get_nowait())
        return taken

    def wait(self) -> Result:
        """Run to the end; returns the result."""
        for _ in self:
            pass
        return self.result

    def close(self) -> None:
        """Stop the run if it has not ended, and its processes; returns when they have gone."""
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._thread.join()
            except KeyboardInterrupt:  # a second one must not leave processes behind
                continue
        self._queue.put(_END)
        _open.discard(self)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    # The rest runs in the thread.

    def _drive(self) -> None:
        try:
            self._run()
        except _Stopped:
            pass
        except BaseException as error:
            self._error = error
        try:
            for attempt in list(self._attempts.values()):
                if attempt.state != "over":
                    self._end(attempt)
            for sink in self._sinks:
                sink.close()
        except BaseException as error:
            self._error = self._error or error
        finally:
            self.result.seconds = time.monotonic() - self._began
            self._queue.put(_END)

    def _run(self) -> None:
        current, spare = self._new(), None
        while True:
            cause, spare = self._follow(current)
            if cause is None:
                self._settle(None if self._pending is None else current.first_step)
                self._end(current)
                return
            noticed = time.monotonic()
            self._settle(None)
            self._end(current)
            restarts = self.result.restarts
            if (cause.final and current.number == 0) or len(restarts) >= self._restart.max:
                raise TrainingError(cause, restarts)
            if self._shrink(cause, current) and spare is not None:
                self._end(spare)
                spare = None
            self._pending = cause, noticed
            current = spare or self._new()

    def _new(self) -> Attempt:
        number = len(self._attempts)
        self._attempts[number] = self._start(number, self._procs, self._hosts)
        return self._attempts[number]

    def _end(self, attempt: Attempt) -> None:
        """End an attempt; processes on their way are waited for, since only then can they be ended."""
        deadline = time.monotonic() + 20
        while len(attempt.seen) < attempt.ranks and not attempt.evidence.dead and time.monotonic() < deadline:
            self._listen()
        attempt.end()

    def _follow(self, attempt: Attempt) -> tuple[Cause | None, Attempt | None]:
        """One attempt to its end: the cause of its failure or None, and the standby where there is one."""
        spare: Attempt | None = None
        self.result.ranks = attempt.ranks
        while True:
            self._listen()
            if self._stop.is_set():
                raise _Stopped
            if attempt.state == "ready":
                attempt.go()
            cause = attempt.cause(self._restart.stall_s, self._restart.start_s)
            self._collect(attempt)
            if attempt.finished:
                return None, spare
            if cause is not None:
                return cause, spare
            if spare is not None and spare.cause(NEVER, NEVER) is not None:
                self._end(spare)
                spare = None
            left = self._restart.max - len(self.result.restarts)
            if spare is None and self._restart.standby and left > 0 and attempt.trained() > STANDBY_AFTER:
                spare = self._new()

    def _listen(self) -> None:
        """Hand a message on, or wait for one for a moment."""
        if time.monotonic() > self._renew_at:
            self._renew_at = time.monotonic() + RENEW_S
            for attempt in self._attempts.values():
                if attempt.state != "over":
                    attempt.renew()
        if self._waiting is None:
            self._waiting = self._receiver.recv()
        try:
            kind, number, *words = self._waiting.get(timeout=0.05)
        except TimeoutError:
            return
        self._waiting = None
        self._attempts[number].hear(kind, *words)

    def _collect(self, attempt: Attempt) -> None:
        """Pass on what all ranks have told."""
        result = self.result
        if attempt.started and not attempt.noted:
            attempt.noted = True
            result.passed_over += attempt.passed_over
            if result.first_step is None and attempt.first_step is not None:
                result.first_step = result.steps = attempt.first_step
        for step in attempt.complete():
            told = attempt.records.pop(step)
            metrics, seconds = zip(*(told[rank] for rank in range(attempt.ranks)), strict=True)
            record = Record(step, attempt.number, metrics[0], metrics, max(seconds))
            attempt.told()
            self._settle(attempt.first_step)
            if result.start_seconds is None:
                result.start_seconds = time.monotonic() - self._began
            result.steps = step + 1
            self._queue.put(record)
            for sink in self._sinks:
                sink.record(record)

    def _settle(self, resumed: int | None) -> None:
        """Note the restart under way, which has come to a first record, or to nothing."""
        if self._pending is None:
            return
        (cause, noticed), self._pending = self._pending, None
        restart = Restarted(cause.rank, cause.text, cause.step, resumed, time.monotonic() - noticed)
        self.result.restarts.append(restart)
        for sink in self._sinks:
            sink.restarted(restart)

    def _shrink(self, cause: Cause, attempt: Attempt) -> bool:
        """Leave out what failed, where that is wanted and enough is left; whether it was."""
        least = self._restart.min_procs
        if least is None or cause.rank is None:
            return False
        if len(self._hosts) > 1:
            at = cause.rank // self._procs
            hosts = max(self._hosts[:at], self._hosts[at + 1 :], key=len)  # a mesh is sliced in one piece
            if len(hosts) * self._procs < least:
                return False
            self._hosts = hosts
            return True
        procs = self._procs - max(1, len(attempt.evidence.dead))
        if procs < least:
            return False
        self._procs = procs
        return True


class _Stopped(Exception):  # noqa: N818
    """The user has had enough."""


def close_all() -> None:
    """Stop what is still running, at the end of the program."""
    for run in list(_open):
        run.close()
    farewell()
