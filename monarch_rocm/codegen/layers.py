"""Which launches a layer makes on an architecture: its own code runs on tensors without memory, and the
launches are written down instead of made. So nothing here repeats how a kernel is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from monarch_rocm import dispatch, ops
from monarch_rocm.kernels import tuning
from monarch_rocm.shape import MonarchShape

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Layer:
    """A layer and what is done with it.

    `path` is "triton" for a kernel wherever there is one, "auto" for those that the tables prefer, and
    "fused" or "chained" for the whole layer in one launch. With `train`, gradients of everything are
    taken too.
    """

    in_features: int
    out_features: int
    nblocks: int | tuple[int, int]
    tokens: int
    dtype: str = "bf16"
    layout: str = "interleaved"
    path: str = "triton"
    train: bool = False
    rank: int | None = None

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" rank {self.rank}"
        return (
            f"{self.in_features}>{self.out_features} in {self.nblocks}{rank} {self.layout}, "
            f"{self.tokens} tokens, {self.path}"
        )


@dataclass(frozen=True)
class Launch:
    """The arguments of one `kernels.launch.launch`, and its place in the layer, as "backward 2"."""

    place: str
    kernel: Any
    programs: int
    tensors: tuple[torch.Tensor, ...]
    scalars: tuple[int, ...]
    strides: tuple[int, ...]
    constants: dict[str, Any]


def launches(layer: Layer, arch: str) -> list[Launch]:
    """What the layer launches on `arch` with the shipped configs, in order."""
    found: list[Launch] = []
    phase = "forward"

    def record(*arguments: Any) -> None:
        number = sum(launch.place.startswith(phase) for launch in found) + 1
        found.append(Launch(f"{phase} {number}", *arguments))

    sizes = (layer.in_features, layer.out_features)
    shape = MonarchShape(*sizes, layer.nblocks, rank=layer.rank, layout=layer.layout)
    x, factor1, factor2, bias = (
        torch.empty(*size, dtype=DTYPES[layer.dtype], device="meta", requires_grad=layer.train)
        for size in ((layer.tokens, shape.in_features), shape.factor1, shape.factor2, (shape.out_features,))
    )
    with _replaced(layer.path, arch, record):
        y = ops.monarch_linear(x, factor1, factor2, bias, shape, layer.path, False)
        if layer.train:
            phase = "backward"
            torch.autograd.grad(y, (x, factor1, factor2, bias), torch.empty_like(y))
    return found


@contextmanager
def _replaced(path: str, arch: str, record: Callable[..., None]) -> Iterator[None]:
    """Kernels are recorded instead of launched, as on a GPU of that architecture and on that path."""

    def lookup(
        kernel: str, device: object, dtype: torch.dtype, n_out: int, n_in: int, tokens: int
    ) -> tuning.Row:
        table = tuning.table(kernel, arch)[1]
        row = tuning.pick(table, dtype.itemsize, n_out, n_in, tuning.bucket_of(tokens))
        assert row is not None, "a shipped table serves every shape"
        return row if path == "auto" or kernel not in dispatch.WHOLE else row | {"wins": path == kernel}

    def path_of(*_: object) -> str:
        return "auto" if path == "auto" else "triton"

    kernels = dispatch.kernels()
    with ExitStack() as stack:
        for name in tuning.PARAMETERS:
            stack.enter_context(mock.patch.object(getattr(kernels, name), "launch", record))
        stack.enter_context(mock.patch.object(tuning, "lookup", lookup))
        stack.enter_context(mock.patch.object(tuning, "architecture", return_value=arch))
        stack.enter_context(mock.patch.object(dispatch, "path_of", path_of))
        for remembered in ("_route", "_product"):  # what was found with other tables
            plain = getattr(dispatch, remembered).__wrapped__
            stack.enter_context(mock.patch.object(dispatch, remembered, plain))
        yield


# One layer a way of addressing: large blocks, small ones, sizes that need padding, both layouts, few
# tokens, whole layers in one launch, and the pass between layouts after a batched product.
DEFAULT = (
    *(Layer(4096, 4096, 4, 8192, dtype, train=True) for dtype in ("bf16", "fp32")),
    Layer(4096, 4096, 64, 8192, train=True),
    Layer(4096, 4096, 16, 8192, "fp16", "blocked"),
    Layer(1000, 1000, 8, 4096, train=True),
    *(Layer(4096, 4096, 4, tokens, dtype) for tokens in (1, 16) for dtype in ("bf16", "fp32")),
    *(Layer(512, 512, 16, 8192, dtype, path="fused") for dtype in ("bf16", "fp32")),
    *(Layer(1024, 1024, 16, 65536, dtype, "blocked", "chained") for dtype in ("bf16", "fp32")),
    *(Layer(4096, 4096, nblocks, 8192, path="auto") for nblocks in (4, 64)),
)


def every() -> tuple[Layer, ...]:
    """Layers that reach every config of the shipped tables, by the limits that those name."""
    found = []
    for dtype in ("bf16", "fp32"):
        found += [
            Layer(16 * size, 16 * size, 16, 8192, dtype, train=True, rank=width // 16)
            for size in (16, 32, 64, 128)
            for width in (16, 32, 64, 128)
        ]
        pairs = ((16, 16), (16, 64), (32, 32), (32, 128), (64, 32), (64, 64), (128, 128))
        found += [
            Layer(16 * size, 16 * size, 16, tokens, dtype, train=True, rank=width // 16)
            for size, width in pairs
            for tokens in (64, 1024)
        ]
        # Odd blocks, and odd tokens whose loads no mask's length is known of.
        found += [
            Layer(3 * size - 4, 3 * width - 5, (3, 1), 8195, dtype, train=True, rank=width - 1)
            for size, width in pairs
        ]
        found += [
            Layer(4 * size, 4 * size, 4, tokens, dtype)
            for size in (64, 256, 1024)
            for tokens in (1, 2, 4, 16)
        ]
        found.append(Layer(512, 512, 16, 8192, dtype, path="fused"))
        found.append(Layer(1024, 1024, 16, 65536, dtype, path="chained"))
        found += [
            Layer(rows * columns, rows * columns, rows, 8192, dtype, path="auto", rank=1)
            for rows in (4, 8, 16, 32, 64)
            for columns in (4, 8, 16, 32, 128)
        ]
    return tuple(found)
