"""Some lines of assembly run on chosen registers, as the tests of the instructions need it."""

import numpy as np

from cdna.assembly import EXEC, M0, VCC, Argument, Program, parse_instruction
from cdna.bits import LANES, U32
from cdna.heap import Heap
from cdna.machine import Machine

# Operands that find mistakes: the ends of every range, signs, and patterns without symmetry.
EDGES = [0, 1, 2, 15, 16, 31, 32, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF]
EDGES += [0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF, 0x12345678, 0xDEADBEEF, 0x00C0FFEE]


def edges(seed):
    """64 operands, the edges among them, in an order of their own."""
    generator = np.random.default_rng(seed)
    more = generator.integers(0, 2**32, 64 - len(EDGES))
    return generator.permutation(np.concatenate([EDGES, more])).astype(U32)


def floats(seed, dtype=np.float32):
    """64 numbers of all sizes, zeros, infinities and NaN among them."""
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(64) * 2.0 ** generator.integers(-12, 12, 64)
    values[:8] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 0.5]
    return generator.permutation(values).astype(dtype)


def parse(text, arch="gfx942"):
    """A program of lines; a line that ends in a colon is a label."""
    lines = [line.strip() for line in text.strip().splitlines()]
    instructions, labels = [], {}
    for line in [*lines, "s_endpgm"]:
        if line.endswith(":"):
            labels[line[:-1]] = len(instructions)
        else:
            instructions.append(parse_instruction(line))
    directives = {"user_sgpr_count": 2, "kernarg_size": 0}
    return Program(arch, tuple(instructions), labels, directives, (Argument(0, 8, "global_buffer"),), 0, 0)


def run(text, vectors=None, scalars=None, *, memory=None, lds=0, waves=1, groups=1, active=None, **options):
    """The machine after the lines have run.

    Args:
        vectors (dict): register number to values that broadcast to `(all waves, 64)`.
        scalars (dict): register number, or "vcc", "m0", "scc", to a value or a value a wave.
        memory (array): the one tensor, whose address is in s[0:1].
        waves, groups (int): waves in a workgroup, workgroups.
        active (array): booleans that broadcast to `(all waves, 64)`.
        options: `arch`, and `detailed` for the counters.
    """
    memory = np.zeros(0, np.uint8) if memory is None else memory
    stored = np.ascontiguousarray(memory).view(np.uint8).reshape(-1)
    heap = Heap([stored])
    heap.allow(0, np.arange(len(stored) // 2))
    program = parse(text, options.pop("arch", "gfx942"))
    machine = Machine(program, heap, groups, waves, lds, **options)
    r, address = machine.registers, heap.address(0, 0)
    r.scalar_file[0], r.scalar_file[1] = address & 0xFFFFFFFF, address >> 32
    for register, values in (vectors or {}).items():
        values = np.asarray(values)
        r.vector_file[register] = values.astype(U32) if values.dtype.kind in "iu" else values.view(U32)
    for register, value in (scalars or {}).items():
        if register == "scc":
            r.condition[:] = value
            continue
        index = {"vcc": VCC, "m0": M0}.get(register, register)
        value = np.atleast_1d(np.array(value, object))
        r.scalar_file[index] = (value & 0xFFFFFFFF).astype(U32)
        if register == "vcc":
            r.scalar_file[VCC + 1] = (value >> 32).astype(U32)
    if active is not None:
        r.active[:] = active
        mask = (r.active.astype(np.uint64) << LANES.astype(np.uint64)).sum(1, dtype=np.uint64)
        r.scalar_file[EXEC], r.scalar_file[EXEC + 1] = mask & np.uint64(0xFFFFFFFF), mask >> np.uint64(32)
    machine.run()
    return machine


def vector(machine, register, dtype=U32):
    """A vector register of the first wave."""
    return machine.registers.vector_file[register][0].view(dtype)


def scalar(machine, register):
    """A scalar register of the first wave, as an int."""
    return int(machine.registers.scalar_file[{"vcc": VCC, "exec": EXEC}.get(register, register)][0])


def scalar64(machine, register):
    index = {"vcc": VCC, "exec": EXEC}.get(register, register)
    return scalar(machine, index) | scalar(machine, index + 1) << 32


def stored(machine, dtype=U32):
    """The memory after the run."""
    size = machine.heap.arguments_start - machine.heap.starts[0]
    return machine.heap.contents(0, size).view(dtype)
