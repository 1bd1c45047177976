"""`plan`: what a forward pass would run, and why, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from monarch_rocm import dispatch
from monarch_rocm.linear import MonarchLinear
from monarch_rocm.shape import MonarchShape, check_size


@dataclass(frozen=True)
class Plan:
    """What would run, as `plan` found it.

    `kernels` has an entry a launch: the kernel, its config's file and values, or the op of PyTorch's,
    and the `bytes` that it must read and write at least. `flops` and `bytes` are those of the whole
    forward pass: counted from the shape, not measured.
    """

    backend: str
    reason: str
    kernels: tuple[dict[str, Any], ...]
    flops: int
    bytes: int

    def __str__(self) -> str:
        lines = [f"{self.backend}: {self.reason}", f"  {self.flops:,} FLOPs, {self.bytes:,} bytes"]
        for kernel in self.kernels:
            lines.append("  " + ", ".join(f"{key} {value}" for key, value in kernel.items()))
        return "\n".join(lines)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What IPython and notebooks show: the same as `print`."""
        printer.text(str(self))


def plan(
    layer_or_shape: MonarchLinear | MonarchShape,
    tokens: int,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    *,
    backend: str | None = None,
) -> Plan:
    """Which path and config the forward pass would take, with no gradient to follow, and why.

    Nothing is run.

    Args:
        layer_or_shape (MonarchLinear or MonarchShape): the layer, or its geometry alone.
        tokens (int): rows of the input, its leading dimensions multiplied.
        dtype (torch.dtype, optional): of input and factors. Default: the layer's, for a shape
            `torch.get_default_dtype()`.
        device (torch.device or str, optional): Default: the layer's, for a shape torch's default.
        backend (str, optional): Default: the layer's, for a shape "auto".

    Returns:
        Plan: `backend`, `reason`, `kernels`, `flops`, `bytes`.

    Raises:
        TypeError: something else than a layer or a shape, a dtype that no layer takes.
        RuntimeError: backend "triton" where it cannot run; a GPU that is not there.

    Example:
        >>> print(plan(MonarchShape(512, 512), tokens=64, dtype=torch.float64, device="cpu"))
        torch: ...
    """
    if not isinstance(layer_or_shape, (MonarchLinear, MonarchShape)):
        raise TypeError(
            f"plan takes a MonarchLinear or a MonarchShape, not a {type(layer_or_shape).__name__}"
        )
    if isinstance(layer_or_shape, MonarchShape):
        shape = layer_or_shape
        backend = backend or "auto"
        dtype = dtype or torch.get_default_dtype()
        device = torch.device(device) if device is not None else torch.get_default_device()
    else:
        shape, factor = layer_or_shape.shape, layer_or_shape.blkdiag1
        backend = backend or layer_or_shape.backend
        dtype = dtype or factor.dtype
        device = torch.device(device) if device is not None else factor.device
    if not isinstance(dtype, torch.dtype) or not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(f"dtype must be a floating-point torch.dtype, but dtype={dtype!r} was given")
    tokens = 0 if tokens == 0 else check_size("tokens", tokens)
    path, reason = dispatch.choose(backend, dtype, device.type)
    flops = 2 * tokens * shape.num_parameters
    if device.type == "cuda" and path != "torch" and not torch.cuda.is_available():
        raise RuntimeError(
            "plan looks up the configs of the GPU at hand, and PyTorch finds no ROCm or CUDA GPU"
        )
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    launches = tuple(_launches(shape, tokens, dtype, device, path))
    if path != "reference":
        path = "triton" if any("kernel" in each for each in launches) else "torch"
    return Plan(path, reason, launches, flops, sum(each["bytes"] for each in launches))


def _launches(
    shape: MonarchShape, tokens: int, dtype: torch.dtype, device: torch.device, path: str
) -> Iterator[dict[str, Any]]:
    """What `linear` launches, in order, with the bytes that each reads and writes."""

    def kernel(name: str, config: dict[str, int]) -> dict[str, Any]:
        tuning = dispatch.kernels().tuning
        return {"kernel": name, "file": tuning.file_of(name, tuning.architecture(device), config), **config}

    def moved(features: int, weights: int = 0) -> dict[str, int]:
        return {"bytes": (tokens * features + weights) * dtype.itemsize}

    hidden = shape.K * shape.Q
    widths = (shape.in_features + hidden, hidden + shape.out_features)
    route = dispatch.BATCHED
    if path != "reference":
        factors = shape.factor1, shape.factor2
        route = dispatch.route(path, dtype, device, *factors, shape.reorders, False, tokens)
    low_rank = shape.K == shape.L == 1 and route.first is route.second is None
    plain = "linear" if low_rank else "bmm"
    whole = moved(shape.in_features + shape.out_features, shape.num_parameters)
    if route.chained is not None:
        yield kernel("chained", route.chained) | whole
    elif route.fused is not None:
        yield kernel("fused", route.fused) | whole
        return
    else:
        stages = zip((shape.factor1, shape.factor2), widths, (route.first, route.second), strict=True)
        for (blocks, n_out, n_in), width, product in stages:
            op = "einsum" if path == "reference" else plain
            launch = {"op": op} if product is None else kernel(product.kernel, product.config)
            yield launch | moved(width, blocks * n_out * n_in)
    direct = route.chained is None and route.second is not None and route.second.kernel == "bdmv"
    if not direct and shape.reorders:
        config = None
        if path != "reference":
            config = dispatch.config_for("interleave", path, dtype, device, shape.L, shape.S, tokens)
        launch = {"op": "transposing copy"} if config is None else kernel("interleave", config)
        yield launch | moved(2 * shape.out_features)
