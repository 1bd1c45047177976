"""Launches of Triton kernels on CPU tensors, compiled for CDNA and executed by the interpreter.

Under `TRITON_INTERPRET=1` every launch goes through one method of Triton's. `on_cdna` replaces it, so
that all above runs as shipped: dispatch, config tables, launchers, `kernels/launch.py`. A new kernel
needs nothing here.
"""

from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from support import poison_fresh_tensors

from cdna.bits import EmulationError
from cdna.compiler import Compiled, compile_kernel, process
from cdna.counters import Counters
from cdna.heap import Heap
from cdna.machine import Machine
from monarch_rocm.kernels import tuning

ARCHS = ("gfx90a", "gfx942", "gfx950")
LDS_BYTES = {"gfx90a": 64 * 1024, "gfx942": 64 * 1024, "gfx950": 160 * 1024}


@dataclass
class Launch:
    """One kernel that ran, on what, and what it took."""

    kernel: str
    compiled: Compiled
    programs: int
    tensors: dict[str, torch.Tensor]
    numbers: dict[str, int]
    counters: Counters

    @property
    def addressing(self) -> set[str]:
        """By which kinds of instructions it touches memory."""
        ins = self.compiled.program.instructions
        return {each.opcode.split("_")[0] for each in ins if each.touches_memory}


def _storages(tensors):
    """Each storage once, as an array of bytes that shares its memory, by its address."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in found:
            found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return found


def _touchable(tensor):
    """The numbers of the half-words of its storage that a tensor holds."""
    bytes_held = tensor.untyped_storage().nbytes()
    if tensor.numel() * tensor.itemsize == bytes_held and not torch._debug_has_internal_overlap(tensor):
        return slice(0, bytes_held // 2)
    elements = np.array([tensor.storage_offset()])
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements = np.unique(elements[:, None] + np.arange(size) * stride)
    halves = tensor.itemsize // 2
    return (elements[:, None] * halves + np.arange(halves)).reshape(-1)


def execute(compiled, programs, tensors, numbers, detailed=False, program=None, workgroups=None):
    """Run a compiled kernel and write what it wrote back into the tensors; its counters.

    `program` may stand in for the compiled one, with an instruction changed. Of all `programs`, only the
    first `workgroups` run.
    """
    program = program or compiled.program
    storages = _storages(tensors.values())
    place = {address: i for i, address in enumerate(storages)}
    heap = Heap(list(storages.values()))
    values = dict(numbers)
    for name, tensor in tensors.items():
        storage = place[tensor.untyped_storage().data_ptr()]
        heap.allow(storage, _touchable(tensor))
        values[name] = heap.address(storage, tensor.storage_offset() * tensor.itemsize)
    running = programs if workgroups is None else min(workgroups, programs)
    machine = Machine(program, heap, running, compiled.warps, compiled.lds, detailed)
    machine.start(heap.set_arguments(_arguments(program, compiled.parameters, values, programs)))
    machine.run()
    heap.give_back()
    return machine.counters


def _arguments(program, parameters, values, programs):
    data = bytearray(program.directives["kernarg_size"])
    given = [values[name] for name in parameters]
    for argument in program.arguments:
        if argument.kind in ("global_buffer", "by_value"):
            # Behind the kernel's own come pointers to Triton's scratch space, of which there is none.
            value = given.pop(0) if given else 0
        elif argument.kind.startswith("hidden_block_count"):
            value = programs if argument.kind.endswith("x") else 1
        else:
            continue
        end = argument.offset + argument.size
        data[argument.offset : end] = value.to_bytes(argument.size, "little", signed=value < 0)
    if given:
        raise EmulationError("a kernel takes fewer arguments than it was given")
    return bytes(data)


class Backend:
    """Runs launches for one architecture and remembers them."""

    def __init__(self, arch, buffers=True, detailed=False):
        self.arch, self.buffers, self.detailed = arch, buffers, detailed
        self.launches = []

    def launch(self, kernel, grid, args, constants):
        (programs,) = grid
        given = dict(zip(kernel.arg_names, args, strict=False))
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        numbers = {name: value for name, value in given.items() if name not in tensors}
        compiled = compile_kernel(kernel, self.arch, tensors, numbers, constants, self.buffers)
        if compiled.lds > LDS_BYTES[self.arch]:
            raise EmulationError(f"{compiled.lds} bytes of LDS, more than {self.arch} has")
        counters = execute(compiled, programs, tensors, numbers, self.detailed)
        self.launches.append(Launch(kernel.fn.__name__, compiled, programs, tensors, numbers, counters))


@contextmanager
def on_cdna(arch, buffers=True, detailed=False, wide=False):
    """Within, kernels run as that architecture would run them, with the configs it would take.

    Fresh tensors hold NaN, so that an unwritten output shows.

    Args:
        arch (str): such as "gfx942".
        buffers (bool): tensors are marked as smaller than 2 GiB, as Triton does on ROCm where they are.
        detailed (bool): the counters follow banks and cache lines.
        wide (bool): kernels take offsets of 64 bits, whatever the size.

    Yields:
        Backend: `launches` is what has run.
    """
    from triton.runtime.interpreter import InterpretedFunction

    backend = Backend(arch, buffers, detailed)
    process()  # before a launch, whose options it would keep

    def run(kernel, *args, grid, warmup, **constants):
        backend.launch(kernel, grid, args, constants)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", run)
        patch.setattr(tuning, "architecture", lambda device: arch)
        if wide:
            patch.setattr(tuning, "is_wide", lambda *tensors: True)
        poison_fresh_tensors(patch)
        yield backend
