"""One try at a job: its processes, what they have told, and what has become of it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

from monarch_rocm.distributed.judge import Cause, Evidence, Failure
from monarch_rocm.distributed.mark import MarkOf
from monarch_rocm.distributed.outbox import EVERY

GRACE_HERE, GRACE_AWAY = 1.0, 20.0  # seconds in which the end of a process shows, here and on other hosts

LOOK = 0.05  # seconds between looks at processes

TOGETHER = 1.0  # seconds apart that ranks which wait for each other may seem to stop, as their words come in

LAST_WORDS = 2 * EVERY  # seconds that records of the steps before a failure are waited for


class Attempt:
    """The processes of one attempt, from their start to their end.

    States: "starting", "ready", "working", "over".
    """

    def __init__(self, number: int, supervisor: Any, ranks: int, here: tuple[str, str, str]) -> None:
        self.number, self.ranks = number, ranks
        self.state = "starting"
        self.first_step: int | None = None
        self.passed_over: list[str] = []
        self.evidence = Evidence()
        self.records: dict[int, dict[int, tuple[dict[str, Any], float]]] = {}
        self._supervisor, self._here = supervisor, here
        self._pids: dict[int, int] = {}
        self._places: dict[int, tuple[str, str, str]] = {}
        self._marks: dict[int, MarkOf] = {}
        self._port = 0
        self.seen: set[int] = set()  # whose processes are there
        self._ready: set[int] = set()
        self._started: set[int] = set()
        self._stepped: set[int] = set()
        self.done: set[int] = set()
        self.noted = False  # whether the driver has seen that all have started
        self._told_at: float | None = None
        self._heard = dict.fromkeys(range(ranks), time.monotonic())
        self._failed_at: float | None = None
        self._look_at = 0.0

    @property
    def started(self) -> bool:
        """Whether every rank has built and loaded."""
        return len(self._started) == self.ranks

    @property
    def finished(self) -> bool:
        """Whether every rank has done its job."""
        return len(self.done) == self.ranks

    @property
    def local(self) -> bool:
        """Whether all its processes are this machine's."""
        return len(self._places) == self.ranks and all(p == self._here for p in self._places.values())

    def hear(self, kind: str, rank: int, *words: Any) -> None:
        """Take a message in."""
        if kind == "fault":
            for dead, how in _crashed(words[0], self.ranks):
                self.evidence.dead[dead] = how
            return
        if kind != "stack":
            self._heard[rank] = time.monotonic()
        if kind == "hello":
            self.seen.add(rank)
            self._pids[rank], self._places[rank], port, mark = words
            if self._places[rank] == self._here:
                self._marks[rank] = MarkOf(self._pids[rank], mark)
            if rank == 0:
                self._port = port
        elif kind == "ready":
            self._ready.add(rank)
            if len(self._ready) == self.ranks and self.state == "starting":
                self.state = "ready"
        elif kind == "phase":
            self.evidence.phases[rank] = words[0]
            self.evidence.stacks.pop(rank, None)
            if words[0] != "save":
                self.evidence.steps.pop(rank, None)
        elif kind == "start":
            self.first_step, passed_over = words
            if rank == 0:
                self.passed_over = passed_over
            self._started.add(rank)
            if self.first_step is not None:  # scripts tell of no steps
                self.evidence.phases[rank] = "train"
                self.evidence.steps[rank] = self.first_step
        elif kind == "steps":
            for step, metrics, seconds in words[0]:
                self.records.setdefault(step, {})[rank] = metrics, seconds
                self.evidence.steps[rank] = step + 1
            self._stepped.add(rank)
            self.evidence.stacks.pop(rank, None)
        elif kind == "stack":
            self.evidence.stacks[rank] = words[0]
        elif kind == "failed":
            failure: Failure = words[0]
            self.evidence.failures.append(failure)
            if failure.step is not None:
                self.evidence.steps[rank] = failure.step
        elif kind == "done":
            self.done.add(rank)

    def told(self) -> None:
        """A record has come of it."""
        self._told_at = self._told_at or time.monotonic()

    def trained(self) -> float:
        """Seconds since its first record."""
        return 0.0 if self._told_at is None else time.monotonic() - self._told_at

    def complete(self) -> list[int]:
        """The steps that every rank has told of, in order."""
        return [step for step in sorted(self.records) if len(self.records[step]) == self.ranks]

    def go(self) -> None:
        """Let the processes work, which are all ready."""
        address = "127.0.0.1" if self.local else self._places[0][0]
        self._heard = dict.fromkeys(range(self.ranks), time.monotonic())
        self.state = "working"
        self._supervisor.go.call_one(address, self._port).get(timeout=60)

    def cause(self, stall_s: float, start_s: float) -> Cause | None:
        """Why it has failed, None while it has not."""
        now = time.monotonic()
        if now > self._look_at or self.evidence.failures:
            self._look_at = now + LOOK
            for rank, pid in self._pids.items():
                if self._places[rank] == self._here and rank not in self.done and not _alive(pid):
                    self.evidence.dead.setdefault(rank, f"its process {pid} is gone")
        if self.evidence.dead or self.evidence.failures:
            self._failed_at = self._failed_at or now
            known = self._known()
            if known is not None:
                return known if self._all_told(known) or now - self._failed_at > LAST_WORDS else None
            if now - self._failed_at > (GRACE_HERE if self.local else GRACE_AWAY):
                return self.evidence.best()
            return None
        for limit, ranks in ((stall_s, self._stepped), (start_s, set(range(self.ranks)))):
            waited = {r: now - self._heard[r] for r in sorted(ranks - self.done)}
            if waited and max(waited.values()) > limit:
                together = limit - min(TOGETHER, limit / 2)
                return self.evidence.hang([r for r, seconds in waited.items() if seconds > together], limit)
        return None

    def _known(self) -> Cause | None:
        for rank in self.evidence.dead.keys() & self._marks.keys():
            step = self._marks[rank].step()
            if step is not None:
                self.evidence.steps[rank] = step
        return self.evidence.known()

    def _all_told(self, cause: Cause) -> bool:
        """Whether no rank has more to tell of the steps before a failure."""
        if cause.step is None:
            return True
        silent = self.evidence.dead.keys() | {f.rank for f in self.evidence.failures} | self.done
        others = set(range(self.ranks)) - silent
        return all(self.evidence.steps.get(rank, 0) >= cause.step for rank in others)

    def renew(self) -> None:
        """Let the processes go on; without this, those on other machines end after a while."""
        self._supervisor.renew.broadcast()

    def end(self) -> None:
        """End the processes; returns when those of this machine have gone.

        Nothing is lost: what a worker has to keep is in checkpoints, what it has to say is said.
        """
        self.state = "over"
        self._kill()
        asking = threading.Thread(target=self._halt, daemon=True, name=f"monarch-rocm-end{self.number}")
        _asking.append(asking)
        asking.start()
        # Killed processes do not answer in time; others must be gone before their devices are used again.
        asking.join(0.2 if self.local else 15.0)
        self._kill()
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and any(_alive(pid) for pid in self._mine()):
            time.sleep(0.01)

    def _halt(self) -> None:
        with contextlib.suppress(Exception):  # from processes that are gone already
            self._supervisor.halt.call_one().get(timeout=30)

    def _mine(self) -> list[int]:
        return [pid for rank, pid in self._pids.items() if self._places[rank] == self._here]

    def _kill(self) -> None:
        for pid in self._mine():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


_asking: list[threading.Thread] = []


def farewell() -> None:
    """Let the actor runtime finish what it was asked, before the interpreter ends under it."""
    for asking in _asking:
        asking.join(10)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        if os.path.exists("/proc/self"):
            return False
        try:
            os.kill(pid, 0)
        except OSError:
            return False
        return True
    return state not in "ZX"


def _crashed(fault: str, ranks: int) -> list[tuple[int, str]]:
    """(rank, how) of the processes that a fault of the runtime tells of."""
    how = re.search(r"Killed\(sig=(\d+)[^)]*\)|Stopped\(exit_code=[^)]*\)|Failed\([^)]*\)", fault)
    text = how.group(0) if how else fault.strip().splitlines()[0]
    if how and how.group(1):
        text = f"killed by signal {how.group(1)}"
    point = re.search(r"\{([^}]*\d+/\d+[^}]*)\}", fault)
    if point is None:
        return []
    rank = 0
    for index, size in re.findall(r"(\d+)/(\d+)", point.group(1)):
        rank = rank * int(size) + int(index)
    return [(rank, text)] if rank < ranks else []
