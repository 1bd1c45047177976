"""What went wrong first: the cause of a failed attempt among all that the ranks report.

The first report is often not the cause. When a worker dies, its peers fail in their collectives within
milliseconds, while the death itself is told seconds later; and when one rank hangs, all wait.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

# What a rank says when another one has gone away.
_PEER = re.compile(
    r"DistBackendError|DistNetworkError|DistStoreError|closed by peer|reset by peer|Broken pipe|"
    r"Connection (closed|refused|reset)|Timed out (waiting|after)|[Gg]loo|NCCL|RCCL|ncclRemoteError|Socket",
)


@dataclass(frozen=True)
class Failure:
    """An exception in a worker: where, and what it said."""

    rank: int
    phase: str
    step: int | None
    error: str  # "ValueError: ..."
    traceback: str

    @property
    def peer(self) -> bool:
        """Whether it tells of another rank's end."""
        return _PEER.search(self.error) is not None

    def __str__(self) -> str:
        place = f"at step {self.step}" if self.phase == "train" else f"in {self.phase}"
        return f"rank {self.rank} failed {place}: {self.error}"


@dataclass(frozen=True)
class Cause:
    """Why an attempt ended."""

    rank: int | None
    text: str
    step: int | None = None
    traceback: str = ""
    final: bool = False  # another attempt would end alike

    def __str__(self) -> str:
        return self.text


@dataclass
class Evidence:
    """All that is known of one attempt's workers."""

    failures: list[Failure] = field(default_factory=list)
    dead: dict[int, str] = field(default_factory=dict)  # rank -> what is known of its end
    stacks: dict[int, str] = field(default_factory=dict)  # rank -> where it was when it had stood still
    steps: dict[int, int] = field(default_factory=dict)  # rank -> the step it is in
    phases: dict[int, str] = field(default_factory=dict)

    def known(self) -> Cause | None:
        """The cause, as soon as there can be no earlier one."""
        for rank, what in self.dead.items():  # which no exception on another rank brings about
            # A killed process's last words may be lost; its peers failed in the step that they shared.
            shared = [f.step for f in self.failures if f.peer and f.step is not None]
            step = max([*shared, *([self.steps[rank]] if rank in self.steps else [])], default=None)
            place = f"at step {step}" if step is not None else f"in {self.phases.get(rank, 'start')}"
            return Cause(rank, f"rank {rank} died {place}: {what}", step)
        own = [f for f in self.failures if not f.peer]
        if own:
            first = own[0]
            return Cause(first.rank, str(first), first.step, first.traceback, first.phase == "build")
        return None

    def best(self) -> Cause:
        """The likeliest cause when nothing more will come."""
        known = self.known()
        if known is not None:
            return known
        if self.failures:
            first = self.failures[0]
            return Cause(first.rank, str(first), first.step, first.traceback)
        return Cause(None, "the workers ended without a word")

    def hang(self, late: list[int], seconds: float) -> Cause:
        """Whose fault it is that the ranks `late` stand still: of one that cannot even say where it is, or
        that is outside PyTorch, or that is behind.
        """
        silent = [r for r in late if r not in self.stacks]
        outside = [r for r in late if r in self.stacks and not _waits(self.stacks[r])]
        last = min(self.steps.get(r, -1) for r in late)
        behind = [r for r in late if self.steps.get(r, -1) == last]
        rank = (silent or outside or behind)[0] if len(silent) < len(late) else behind[0]
        step = self.steps.get(rank)
        place = f"step {step}" if step is not None else self.phases.get(rank, "start")
        text = f"rank {rank} hangs in {place}: no progress for {seconds:g} s"
        stack = self.stacks.get(rank, "")
        if stack:
            text += f", in {_innermost(stack)}"
        elif rank in silent:
            text += "; the process does not run, or its interpreter is blocked"
        return Cause(rank, text, step, stack)


def _waits(stack: str) -> bool:
    """Whether the innermost Python frame is PyTorch's: a collective, or a backward pass with one."""
    return bool(re.search(r"[/\\]torch[/\\]", _innermost(stack)))


def _innermost(stack: str) -> str:
    frames = [line.strip() for line in stack.splitlines() if line.strip().startswith("File ")]
    return frames[-1].removeprefix("File ") if frames else "?"
