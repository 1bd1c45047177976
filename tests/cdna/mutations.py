"""One instruction of a correct program changed, to see whether the interpreter notices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from cdna.assembly import Program
from cdna.backend import ARCHS, execute, on_cdna
from cdna.bits import EmulationError
from monarch_rocm.kernels import bdmm, bdmm_wgrad

# Tiles that the sizes fill, so that every product counts.
TILES = {"BT": 64, "BO": 64, "BI": 32, "num_warps": 4}
SUMS = {**TILES, "BT": 32, "PROGRAMS": 1, "MIN_STEPS": 1}
DTYPES = (torch.bfloat16, torch.float32)


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


def stage(arch: str, dtype: torch.dtype, stages: int) -> Subject:
    """A product of blocks, in a loop whose loads run ahead by so many stages."""
    x, w = torch.randn(128, 192).to(dtype), torch.randn(2, 64, 96).to(dtype)
    config = TILES | {"num_stages": stages}
    return subject(arch, lambda: bdmm.bdmm(x, w, None, 128, 1, 1, False, config), "y")


def weight_gradient(arch: str, dtype: torch.dtype, stages: int) -> Subject:
    """A sum over tokens, likewise."""
    g, a = torch.randn(96, 128).to(dtype), torch.randn(96, 64).to(dtype)
    config = SUMS | {"num_stages": stages}
    return subject(arch, lambda: bdmm_wgrad.bdmm_wgrad(g, a, 2, 64, 32, 1, 1, config), "dw")


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


def too_many_tokens(found: Subject, more: int) -> str:
    """What becomes of a launch that is told of more tokens than there are, and has programs for them."""
    numbers = {"tokens": found.numbers["tokens"] + more}
    if "span" in found.numbers:
        numbers["span"] = found.numbers["span"] + 64
    larger = dataclasses.replace(found, programs=found.programs + 2)
    return larger.outcome(**numbers)


FAULTS = {
    "barrier removed": lambda found: without(found.program, "s_barrier"),
    "wait for memory removed": lambda found: weaker_waits(found.program, "vmcnt", None),
    "wait for LDS or constants removed": lambda found: weaker_waits(found.program, "lgkmcnt", None),
    "wait for memory leaves one more": lambda found: weaker_waits(found.program, "vmcnt", 1),
    "wait for LDS or constants leaves one more": lambda found: weaker_waits(found.program, "lgkmcnt", 1),
    "matrix product dropped": lambda found: without(found.program, "v_mfma"),
}


def table() -> list[dict[str, Any]]:
    """How many faults of each kind were put in, and how many of them were seen, by architecture."""
    torch.manual_seed(0)
    rows = []

    def count(fault, arch, seen):
        rows.append({"fault": fault, "arch": arch, "put_in": len(seen), "seen": sum(seen)})

    for arch in ARCHS:
        subjects = [make(arch, dtype, 2) for make in (stage, weight_gradient) for dtype in DTYPES]
        for fault, mutants in FAULTS.items():
            results = [found.outcome(program) for found in subjects for _, program in mutants(found)]
            count(fault, arch, [result != "right" for result in results])
        results = [too_many_tokens(found, more) for found in subjects for more in (1, 64)]
        count("more tokens than the tensor has", arch, ["outside the tensors" in each for each in results])
    return rows
