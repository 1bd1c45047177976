"""Launch a kernel, and launch it again without Triton's work per call.

Triton specialises each argument anew at every call, which takes longer than a small layer computes.
Here a call is keyed by all that Triton specialises on, and a kernel that has been compiled for the
key is launched as it is.
"""

from contextlib import nullcontext
from typing import Any

import torch

_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(
    kernel: Any,
    programs: int,
    tensors: tuple[torch.Tensor, ...],
    scalars: tuple[int, ...],
    strides: tuple[int, ...],
    constants: dict[str, Any],
) -> None:
    """Run `programs` instances of `kernel` on the current stream of the tensors' device.

    Args:
        kernel: a `triton.jit` function whose parameters are `tensors`, `scalars`, `strides` and then
            `constants`, in that order, and which does not specialise on `scalars`.
        programs (int): size of the grid's first axis, at least 1.
        tensors, scalars, strides (tuple): positional arguments.
        constants (dict): constexpr parameters and launch options.
    """
    device = tensors[0].device
    key = (
        kernel,
        device,
        *[(stride == 1, stride % 16 == 0, stride < 2**31) for stride in strides],
        *constants.items(),
        *[(tensor.dtype, tensor.data_ptr() % 16) for tensor in tensors],
    )
    if torch.version.hip:  # there also on whether 32 bits address the storage
        key += tuple(tensor.untyped_storage().nbytes() < 2**31 for tensor in tensors)
    # Triton launches on the current device, whatever device the tensors are on.
    guard = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if guard else nullcontext():
        found = _compiled.get(key)
        if found is None:
            compiled = kernel[(programs,)](*tensors, *scalars, *strides, **constants)
            if compiled is not None:  # the interpreter compiles nothing
                first = len(tensors) + len(scalars) + len(strides)
                values = tuple(constants[name] for name in kernel.arg_names[first:])
                _compiled[key] = compiled, values
        else:
            compiled, values = found
            compiled[(programs, 1, 1)](*tensors, *scalars, *strides, *values)


def cdiv(size: int, tile: int) -> int:
    """How many tiles cover a size; Triton's own function of that name takes microseconds."""
    return -(-size // tile)
