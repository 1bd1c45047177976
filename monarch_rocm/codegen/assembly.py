"""What AMD assembly, as Triton's code generator prints it, says about a kernel: counts, nothing run."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass

# Bytes of local memory of a compute unit.
LDS = {"gfx90a": 64 * 1024, "gfx942": 64 * 1024, "gfx950": 160 * 1024}
# Of a SIMD: registers a lane, vector and accumulation registers together, how many are given out at
# once, and the most waves; alike on all three.
REGISTERS, GRANULE, WAVES = 512, 8, 8

Widths = dict[int, int]  # bytes that a lane moves in one instruction: how many such instructions


@dataclass(frozen=True)
class Code:
    """Instructions by class, and how wide those are that move data."""

    instructions: int
    classes: dict[str, int]
    loads: Widths
    stores: Widths
    lds_reads: Widths
    lds_writes: Widths


@dataclass(frozen=True)
class Report:
    """What one compiled kernel needs and holds.

    `loop` is its hot loop: of the innermost ones that with the most matrix instructions, else the
    longest that loads; None where the kernel has no loop that loads or multiplies. `waves` is how many
    fit on a SIMD. Vector registers spill to memory, scalar ones to lanes of vector registers. `digest`
    changes where an instruction does.
    """

    vgpr: int
    agpr: int
    sgpr: int
    vector_spills: int
    scalar_spills: int
    scratch: int
    lds: int
    waves: float
    mfma: dict[str, int]
    atomics: dict[str, int]
    whole: Code
    loop: Code | None
    digest: str

    @property
    def hot(self) -> Code:
        """The hot loop, or all of a kernel that has none."""
        return self.loop or self.whole


def read(assembly: str, arch: str, shared: int, num_warps: int) -> Report:
    """Read the assembly of one kernel that uses `shared` bytes of local memory, which the text does
    not tell, in workgroups of `num_warps` waves.
    """
    lines = _body(assembly)
    instructions = [line for line in lines if not line.endswith(":")]
    names = Counter(line.split()[0] for line in instructions)
    return Report(
        vgpr=_number(r"\.set (?:\.L)?\w+\.num_vgpr, (\d+)", assembly),
        agpr=_number(r"\.set (?:\.L)?\w+\.num_agpr, (\d+)", assembly),
        sgpr=_number(r"; TotalNumSgprs: (\d+)", assembly),
        vector_spills=_number(r"\.vgpr_spill_count:\s+(\d+)", assembly),
        scalar_spills=_number(r"\.sgpr_spill_count:\s+(\d+)", assembly),
        scratch=_number(r"\.private_segment_fixed_size:\s+(\d+)", assembly),
        lds=shared,
        waves=waves(arch, _number(r"; TotalNumVgprs: (\d+)", assembly), shared, num_warps),
        mfma={name: count for name, count in names.items() if "mfma" in name},
        atomics={name: count for name, count in names.items() if "atomic" in name},
        whole=_count(instructions),
        loop=_hot_loop(lines),
        digest=hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16],
    )


def waves(arch: str, registers: int, shared: int, num_warps: int) -> float:
    """How many waves of a kernel a SIMD holds at once: AMD's formula, by whole workgroups."""
    by_registers = min(WAVES, REGISTERS // max(GRANULE, -(-registers // GRANULE) * GRANULE))
    groups = by_registers * 4 // num_warps
    if shared:
        groups = min(groups, LDS[arch] // shared)
    return min(WAVES, groups * num_warps / 4)


def _number(pattern: str, assembly: str) -> int:
    found = re.search(pattern, assembly)
    if found is None:
        raise ValueError(f"the assembly has nothing like {pattern!r}: not what Triton 3.6 to 3.9 print")
    return int(found[1])


def _body(assembly: str) -> list[str]:
    """Labels and instructions of the kernel, without comments and directives."""
    lines = []
    inside = False
    for line in assembly.splitlines():
        if line.startswith(".Lfunc_end"):
            break
        if re.match(r"[\w$.]+:\s*; @", line):
            inside = True
            continue
        text = line.partition(";")[0].strip()
        if inside and text and (not text.startswith(".") or re.fullmatch(r"\.LBB\w+:", text)):
            lines.append(text)
    return lines


def _hot_loop(lines: list[str]) -> Code | None:
    labels = {line[:-1]: position for position, line in enumerate(lines) if line.endswith(":")}
    spans = []
    for position, line in enumerate(lines):
        if re.match(r"s_c?branch", line):
            start = labels.get(line.split()[-1], position)
            if start < position:
                spans.append((start, position))
    inner = [
        (start, stop)
        for start, stop in spans
        if not any(start <= a and b <= stop and (a, b) != (start, stop) for a, b in spans)
    ]
    loops = [_count([x for x in lines[start : stop + 1] if not x.endswith(":")]) for start, stop in inner]
    loops = [loop for loop in loops if loop.loads or loop.classes.get("mfma")]
    return max(loops, key=lambda loop: (loop.classes.get("mfma", 0), loop.instructions), default=None)


CLASSES = (
    (r"\S*mfma", "mfma"),
    (r"(global|buffer|flat)_load", "load"),
    (r"(global|buffer|flat)_store", "store"),
    (r"\S*atomic", "atomic"),
    (r"scratch_", "scratch"),
    (r"ds_(read|load)", "lds read"),
    (r"ds_(write|store)", "lds write"),
    (r"ds_", "lds other"),
    (r"s_waitcnt", "wait"),
    (r"s_barrier", "barrier"),
    (r"s_nop", "nop"),
    (r"s_", "salu"),
    (r"v_", "valu"),
)
MOVES = {"load": "loads", "store": "stores", "lds read": "lds_reads", "lds write": "lds_writes"}


def _class_of(instruction: str) -> str:
    return next((name for pattern, name in CLASSES if re.match(pattern, instruction)), "other")


def _count(instructions: list[str]) -> Code:
    classes: Counter[str] = Counter()
    widths: dict[str, Counter[int]] = {name: Counter() for name in MOVES.values()}
    for instruction in instructions:
        kind = _class_of(instruction)
        classes[kind] += 1
        if kind in MOVES:
            widths[MOVES[kind]][_width(instruction.split()[0])] += 1
    return Code(len(instructions), dict(classes), **{name: dict(count) for name, count in widths.items()})


def _width(opcode: str) -> int:
    """Bytes that a lane moves, such as 16 for `buffer_load_dwordx4` and for `ds_read2_b64`."""
    found = re.search(r"dwordx?(\d?)", opcode)
    if found:
        return 4 * int(found[1] or 1)
    found = re.match(r"ds_[a-z]+(2?)(?:st64)?_[biu](\d+)", opcode)
    if found:
        return int(found[2]) // 8 * (2 if found[1] else 1)
    found = re.search(r"short|byte", opcode)
    if found:
        return {"short": 2, "byte": 1}[found[0]]
    raise ValueError(f"how much does {opcode} move?")
