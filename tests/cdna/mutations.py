"""One instruction of a correct program changed, to see whether the interpreter notices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from cdna.assembly import Program
from cdna.backend import execute, on_cdna
from cdna.bits import EmulationError


@dataclass
class Subject:
    """A launch that has run, and the parameter that it wrote."""

    compiled: Any
    programs: int
    tensors: dict[str, torch.Tensor]
    numbers: dict[str, int]
    out: str

    @property
    def program(self) -> Program:
        return self.compiled.program

    def outcome(self, program: Program | None = None, **numbers: int) -> str:
        """What becomes of a run with these in place of its own: "raised: why", "wrong" or "right"."""
        copies = {id(tensor): tensor.clone() for tensor in self.tensors.values()}
        tensors = {name: copies[id(tensor)] for name, tensor in self.tensors.items()}
        tensors[self.out].fill_(float("nan"))
        try:
            execute(self.compiled, self.programs, tensors, {**self.numbers, **numbers}, program=program)
        except EmulationError as error:
            return f"raised: {error}"
        return "right" if torch.equal(tensors[self.out], self.tensors[self.out]) else "wrong"


def subject(arch: str, call: Any, out: str) -> Subject:
    """The one launch that `call` makes."""
    with on_cdna(arch) as backend:
        call()
    (launch,) = backend.launches
    return Subject(launch.compiled, launch.programs, launch.tensors, launch.numbers, out)


def without(program: Program, pattern: str) -> Iterator[tuple[int, Program]]:
    """The program without one of the instructions that match, for each of them, with its position."""
    for position in program.find(pattern):
        yield position, program.replaced(position, "s_nop 0")


def weaker_waits(program: Program, counter: str, by: int | None) -> Iterator[tuple[int, Program]]:
    """The program with one wait for `counter` leaving `by` more on their way, or not waiting at all.

    With the position of that wait.
    """
    for position in program.find("s_waitcnt"):
        counts = dict(program.instructions[position].modifiers)
        if counter in counts:
            left = counts.pop(counter)
            if by is not None:
                counts[counter] = left + by
            text = " ".join(f"{name}({count})" for name, count in counts.items())
            yield position, program.replaced(position, f"s_waitcnt {text}" if text else "s_nop 0")
