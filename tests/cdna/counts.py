"""Bank conflicts and cache lines of what `monarch-rocm codegen` shows by default.

`python -m cdna.counts` compiles those launches as the command does, executes the first workgroups of each
on tensors of their real sizes, and writes what it counted to `monarch_rocm/codegen/executed.json`.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from cdna.backend import ARCHS, execute
from cdna.compiler import Compiled
from monarch_rocm.codegen import stored
from monarch_rocm.codegen.compiling import compile_launch, compile_row, source_of, start
from monarch_rocm.codegen.layers import DEFAULT, Launch, Layer, launches

WORKGROUPS = 2


def count(job: tuple[str, Layer]) -> dict[str, stored.Executed]:
    """For each launch of a layer on an architecture, by its row's key."""
    arch, layer = job
    torch.set_num_threads(1)
    found = {}
    for launch in launches(layer, arch):
        row = compile_row(layer, launch, arch)
        counters = run(launch, arch)
        factors = round(counters.conflict_factor(), 2), round(counters.line_factor(), 2)
        found[row.key] = stored.Executed(row.report.digest, *factors)
    return found


def run(launch: Launch, arch: str, workgroups: int = WORKGROUPS):
    """The counters of the launch's first workgroups."""
    code = compile_launch(launch, arch)
    signature = source_of(launch, True)[0].signature
    names = [parameter.name for parameter in launch.kernel.params]
    passed = tuple(name for name in names if signature[name] != "constexpr")
    tensors = {name: real(tensor) for name, tensor in zip(names, launch.tensors, strict=False)}
    numbers = dict(zip(names[len(tensors) :], (*launch.scalars, *launch.strides), strict=False))
    compiled = Compiled(code.asm["amdgcn"], code.metadata.num_warps, code.metadata.shared, passed)
    return execute(compiled, launch.programs, tensors, numbers, detailed=True, workgroups=workgroups)


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros that lie in memory as a tensor of the meta device says."""
    numbers = tensor.untyped_storage().nbytes() // tensor.itemsize
    zeros = torch.zeros(numbers, dtype=tensor.dtype)
    return zeros.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def main() -> None:
    jobs = [(arch, layer) for layer in DEFAULT for arch in ARCHS]
    found = {}
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), start) as pool:
        for counted in pool.map(count, jobs):
            found |= counted
            print(f"{len(found)} launches", end="\r", flush=True)
    print(f"written: {stored.write_executed(found)}, {len(found)} launches")


if __name__ == "__main__":
    main()
