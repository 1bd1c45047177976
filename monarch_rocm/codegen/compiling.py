"""Machine code of launches, made by Triton for an architecture that need not be at hand."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch

from monarch_rocm import dispatch
from monarch_rocm.codegen.assembly import Report, read
from monarch_rocm.codegen.layers import Launch, Layer, launches

POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


@dataclass(frozen=True)
class Row:
    """One launch of a layer on an architecture, and what its code is like."""

    arch: str
    kernel: str
    layer: str
    launch: str
    dtype: str
    constants: dict[str, Any]
    report: Report

    @property
    def key(self) -> str:
        """What budgets and exceptions know the row by."""
        return f"{self.arch} | {self.kernel} | {self.layer} | {self.launch} | {self.dtype}"


def why_not() -> str | None:
    """The reason why nothing can be compiled here, None where it can."""
    reason = dispatch.triton_state()[1]
    if reason is None and importlib.util.find_spec("triton.backends.amd") is None:
        return "this Triton was built without its AMD backend"
    return reason


def compile_layers(archs: Sequence[str], layers: Sequence[Layer]) -> Iterator[list[Row]]:
    """For each layer on each architecture, in that order, a row for each of its launches.

    Processes of their own compile, one a core, since Triton's interpreter may be on in this one.

    Raises:
        RuntimeError: a launch that does not compile.
    """
    jobs = [(arch, layer) for arch in archs for layer in layers]
    processes = min(len(os.sched_getaffinity(0)), len(jobs))
    with ProcessPoolExecutor(processes, get_context("spawn"), start) as pool:
        yield from pool.map(_compile_layer, jobs)


def start() -> None:
    """Begin a process that compiles."""
    os.environ["TRITON_INTERPRET"] = "0"
    # Triton 3.9 warns in each process that 3.10 will have another default.
    warnings.filterwarnings("ignore", "TRITON_DEFAULT_FP_FUSION")


def _compile_layer(job: tuple[str, Layer]) -> list[Row]:
    arch, layer = job
    return [compile_row(layer, launch, arch) for launch in launches(layer, arch)]


def compile_row(layer: Layer, launch: Launch, arch: str) -> Row:
    """Compile one of the layer's launches and read the code."""
    kernel = launch.kernel.__name__.removesuffix("_kernel")
    try:
        compiled = compile_launch(launch, arch)
    except Exception as error:
        place = f"{kernel}, {launch.place} of {layer} in {layer.dtype}, on {arch}"
        raise RuntimeError(f"{place} does not compile: {error}") from error
    report = read(compiled.asm["amdgcn"], arch, compiled.metadata.shared, compiled.metadata.num_warps)
    return Row(arch, kernel, str(layer), launch.place, layer.dtype, launch.constants, report)


def compile_launch(launch: Launch, arch: str, buffers: bool = True) -> Any:
    """Triton's compiled kernel, specialised as a launch on such a GPU specialises it.

    Without `buffers`, as if all tensors were of 2 GiB or more, which buffer instructions do not reach.
    """
    from triton import compile
    from triton.backends.compiler import GPUTarget

    from monarch_rocm.kernels.launch import compiling

    source, options = source_of(launch, buffers)
    with compiling(launch.kernel, arch, launch.tensors[0].itemsize):
        return compile(source, target=GPUTarget("hip", arch, 64), options=options)


def source_of(launch: Launch, buffers: bool) -> tuple[Any, dict[str, int]]:
    """What Triton compiles, and with which options."""
    from triton.compiler import ASTSource

    parameters = launch.kernel.params
    runtime: tuple[Any, ...] = (*launch.tensors, *launch.scalars, *launch.strides)
    signature: dict[str, str] = {}
    constants = dict(launch.constants)
    attributes = {}
    for position, value in enumerate(runtime):
        parameter = parameters[position]
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            found = [["tt.divisibility", 16]] if value.storage_offset() * value.itemsize % 16 == 0 else []
            if buffers and value.untyped_storage().nbytes() < 2**31:
                found.append(["tt.pointer_range", 32])
        elif value == 1 and not parameter.do_not_specialize:
            signature[parameter.name], constants[parameter.name], found = "constexpr", 1, []
        else:
            signature[parameter.name] = "i32" if value < 2**31 else "i64"
            divides = value % 16 == 0 and not parameter.do_not_specialize
            found = [["tt.divisibility", 16]] if divides else []
        if found:
            attributes[(position,)] = found
    for parameter in parameters[len(runtime) :]:
        signature[parameter.name] = "constexpr"
    options = {name: constants.pop(name) for name in launch.constants if name not in signature}
    return ASTSource(launch.kernel, signature, constants, attributes), options
