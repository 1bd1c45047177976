"""Launch a kernel, and launch it again without Triton's work per call.

Triton specialises each argument anew at every call, which takes longer than a small layer computes.
Here a call is keyed by all that Triton specialises on, and a kernel that has been compiled for the
key is launched as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver

from monarch_rocm.kernels import tuning

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
LOOPED_AGAIN = frozenset({"chained_kernel"})  # kernels that come to a loop of products more than once
MOST = 2**14  # keys that are remembered: strides of hidden features change with the tokens
# A compiled kernel's `run`, what that wants next, the last arguments in the kernel's order, which are its
# constants, and the kernel itself, which unloads its code when it is forgotten.
Ready = tuple[Any, Any, Any, tuple[Any, ...], Any]
_compiled: dict[tuple[Any, ...], Ready] = {}


class Constants(dict[str, Any]):
    """Constexpr parameters and launch options of a kernel, by name, made by `constants`.

    Hashed by identity, so that a launch costs no look at its parts.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other


constants = cache(Constants)  # the same object for the same names and values


def launch(
    kernel: Any,
    programs: int,
    tensors: tuple[torch.Tensor, ...],
    scalars: tuple[int, ...],
    strides: tuple[int, ...],
    constants: Constants,
) -> Ready | None:
    """Run `programs` instances of `kernel` on the current stream of the tensors' device.

    Args:
        kernel: a `triton.jit` function whose parameters are `tensors`, `scalars`, `strides` and then
            `constants`, in that order.
        programs (int): size of the grid's first axis, at least 1.
        tensors, scalars, strides (tuple): positional arguments.
        constants (Constants): the rest, by name.

    Returns:
        What `again` can launch, for tensors of the same dtypes, strides and alignment; None from the
        interpreter.
    """
    device = tensors[0].get_device()
    if device >= 0 and device != torch.cuda.current_device():
        # Triton launches on the current device, whatever device the tensors are on.
        with torch.cuda.device(device):
            return launch(kernel, programs, tensors, scalars, strides, constants)
    # Tokens that 16 divides let a kernel load hidden features, whose tokens lie side by side, in wide runs.
    kinds = [(each == 1, each % 16 == 0) for each in scalars]
    pointers = [(each.dtype, each.data_ptr() % 16) for each in tensors]
    key = (kernel, constants, device, strides, *kinds, *pointers)
    if torch.version.hip:  # Triton specialises there also on whether 32 bits address the storage
        key += tuple([each.untyped_storage().nbytes() < 2**31 for each in tensors])
    ready = _compiled.get(key)
    if ready is not None and not watched():
        again(ready, programs, current_stream(device), (*tensors, *scalars, *strides))
        return ready
    with compiling(kernel, tuning.architecture(tensors[0].device), tensors[0].itemsize):
        compiled = kernel[(programs,)](*tensors, *scalars, *strides, **constants)
    if compiled is None:  # the interpreter compiles nothing
        return None
    if len(_compiled) >= MOST:
        _compiled.clear()
    first = len(tensors) + len(scalars) + len(strides)
    values = tuple(constants[name] for name in kernel.arg_names[first:])
    _compiled[key] = ready = (compiled.run, compiled.function, compiled.packed_metadata, values, compiled)
    return ready


def again(ready: Ready, programs: int, stream: int, arguments: tuple[Any, ...]) -> None:
    """Launch what was compiled, on a stream of the current device."""
    run, function, metadata, last, _ = ready
    run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments, *last)


def bind(ready: Ready, scalars: tuple[int, ...], strides: tuple[int, ...]) -> Ready:
    """What `again` can launch given the tensors alone."""
    run, function, metadata, last, compiled = ready
    return run, function, metadata, (*scalars, *strides, *last), compiled


def current_stream(device: int) -> int:
    """The handle of that device's current stream."""
    return driver.active.get_current_stream(device)  # type: ignore[no-any-return]


@contextmanager
def compiling(kernel: Any, arch: str, itemsize: int) -> Iterator[None]:
    """Within, Triton compiles `kernel` for numbers of that many bytes as `arch` wants it."""
    wanted = options(kernel.__name__, arch, itemsize) if arch.startswith("gfx") else {}
    if not wanted:
        yield
        return
    with knobs.amd.scope():
        for name, value in wanted.items():
            setattr(knobs.amd, name, value)
        yield


def options(kernel: str, arch: str, itemsize: int) -> dict[str, bool]:
    """Which of Triton's options for AMD GPUs a kernel needs to be set, by name.

    Hidden features and gradients are not contiguous along the summed index. gfx942 transposes them in
    registers on their way to local memory; gfx90a does so only when told to, and else reads 2-byte
    numbers from there one by one. For 4-byte numbers that takes more instructions than it saves. What
    the user has set stays.

    Copies straight into local memory, which gfx950 makes by default since Triton 3.8, are wrong before
    3.9 where a kernel comes to a loop again: no barrier keeps its first copies from what other waves
    still read in the last step of the time before. Whatever the user has set, there are none then.
    """
    wanted = {}
    if arch == "gfx90a" and itemsize == 2 and knobs.amd.use_in_thread_transpose is None:
        wanted["use_in_thread_transpose"] = True
    if kernel in LOOPED_AGAIN and TRITON < (3, 9):
        wanted["use_async_copy"] = False
    return wanted


def watched() -> bool:
    """Whether a profiler has hooked into Triton, which then must launch in its own way."""
    hook = knobs.runtime.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))


def cdiv(size: int, tile: int) -> int:
    """How many tiles cover a size; Triton's own function of that name takes microseconds."""
    return -(-size // tile)
