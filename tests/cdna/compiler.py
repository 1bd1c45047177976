"""Kernels compiled for CDNA in a process of their own.

The tests run under `TRITON_INTERPRET=1`, where `triton.jit` makes functions that cannot be compiled.
`python -m cdna.compiler` is the other process: it answers a line of JSON with a line of JSON.
"""

import atexit
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache, cached_property

from cdna.assembly import parse_program

OPTIONS = ("num_warps", "num_stages", "waves_per_eu", "matrix_instr_nonkdim", "kpack")


@dataclass(frozen=True)
class Compiled:
    assembly: str
    warps: int
    lds: int
    parameters: tuple[str, ...]  # those that are passed when the kernel runs

    @cached_property
    def program(self):
        return parse_program(self.assembly)


@cache
def process():
    """The other process, with the environment of the first call: a launch sets options there for its own."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    started = subprocess.Popen(
        [sys.executable, "-m", "cdna.compiler"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(started.kill)
    return started


@cache
def _ask(question):
    other = process()
    other.stdin.write(question + "\n")
    other.stdin.flush()
    answer = json.loads(other.stdout.readline() or '{"error": "the compiler has died"}')
    if "error" in answer:
        raise RuntimeError(f"{answer['error']}\n{question}")
    return Compiled(answer["assembly"], answer["warps"], answer["lds"], tuple(answer["parameters"]))


def compile_kernel(kernel, arch, tensors, numbers, constants, buffers):
    """A kernel as the JIT would compile it for such arguments.

    Args:
        kernel: a `triton.jit` function, compiled or interpreted.
        arch (str): such as "gfx942".
        tensors (dict): parameter to tensor.
        numbers (dict): parameter to int.
        constants (dict): parameter to constexpr value, and launch options.
        buffers (bool): tensors below 2 GiB are marked so, and read by buffer instructions; else none is.
    """
    described = {
        name: [
            str(tensor.dtype).removeprefix("torch."),
            tensor.data_ptr() % 16,
            buffers and tensor.untyped_storage().nbytes() < 2**31,
        ]
        for name, tensor in tensors.items()
    }
    question = {
        "kernel": [kernel.fn.__module__, kernel.fn.__name__],
        "arch": arch,
        "tensors": described,
        "numbers": numbers,
        "constants": constants,
    }
    return _ask(json.dumps(question))


def _specialised(parameter, question):
    """(type, what may be assumed of the value), as Triton's own JIT decides for a HIP device."""
    import torch
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.amd.compiler import HIPBackend

    small = True
    if parameter.name in question["tensors"]:
        dtype, misaligned, small = question["tensors"][parameter.name]
        dtype = getattr(torch, dtype)
        value = torch.zeros(32, dtype=dtype)[misaligned // dtype.itemsize :]
    else:
        value = question["numbers"][parameter.name]
    kind, assumed = native_specialize_impl(
        HIPBackend,
        value,
        parameter.is_const,
        not parameter.do_not_specialize,
        not parameter.do_not_specialize_on_alignment,
    )
    if kind == "constexpr":
        return kind, assumed
    return kind, HIPBackend.parse_attr((assumed or "").replace("S", "S" if small else ""))


def _answer(question):
    import importlib

    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from monarch_rocm.kernels.launch import compiling

    module, name = question["kernel"]
    kernel = getattr(importlib.import_module(module), name)
    constants = dict(question["constants"])
    options = {key: constants.pop(key) for key in OPTIONS if key in constants}
    signature, attributes, passed = {}, {}, []
    for position, parameter in enumerate(kernel.params):
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            continue
        kind, assumed = _specialised(parameter, question)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[parameter.name] = assumed
        else:
            attributes[(position,)] = assumed
            passed.append(parameter.name)
    source = ASTSource(kernel, signature, constants, attributes)
    dtype = next(iter(question["tensors"].values()))[0]
    with compiling(kernel, question["arch"], getattr(torch, dtype).itemsize):
        compiled = triton.compile(source, target=GPUTarget("hip", question["arch"], 64), options=options)
    return {
        "assembly": compiled.asm["amdgcn"],
        "warps": compiled.metadata.num_warps,
        "lds": compiled.metadata.shared,
        "parameters": passed,
    }


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a compiler prints must not stand between the answers
    for line in sys.stdin:
        try:
            answer = _answer(json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
