"""Which path a layer runs on, and why. The one place that knows of all paths."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from monarch_rocm import batched
from monarch_rocm.shape import MonarchShape, check_size

if TYPE_CHECKING:
    from monarch_rocm.linear import MonarchLinear

BACKENDS = ("auto", "triton", "torch", "reference")
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OLDEST_TRITON = (3, 4)


def check_backend(backend: str) -> str:
    """Raise unless `backend` is a known one."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, but backend={backend!r} was given")
    return backend


def constant(function: Any) -> Any:
    """Let `torch.compile` take the result as it is, as `torch.compiler.assumeconstant_result` does,
    which imports all of Dynamo when it decorates.
    """
    function._dynamo_markedconstant = True
    return function


@constant
def requested(backend: str) -> str:
    """`backend`, or what the environment variable MONARCH_ROCM_BACKEND says in place of "auto"."""
    if backend != "auto":
        return check_backend(backend)
    from_environment = os.environ.get("MONARCH_ROCM_BACKEND", "auto")
    if from_environment not in BACKENDS:
        raise ValueError(f"MONARCH_ROCM_BACKEND={from_environment!r}, which is none of {BACKENDS}")
    return from_environment


@cache
def triton_version() -> str | None:
    """Version of the Triton that would be imported, None without one."""
    if importlib.util.find_spec("triton") is None:
        return None
    import triton

    return str(triton.__version__)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def why_not_triton(dtype: torch.dtype, device_type: str) -> str | None:
    """The reason why Triton kernels cannot run there, None where they can."""
    if dtype not in TRITON_DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in TRITON_DTYPES)
        return f"the kernels take {names}, not {str(dtype).removeprefix('torch.')}"
    if device_type != "cuda" and not (device_type == "cpu" and _interpreted()):
        return f"the tensors are on {device_type!r}, not on a ROCm or CUDA GPU"
    version = triton_version()
    if version is None:
        return "Triton is not installed"
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TRITON:
        return f"Triton {version} is older than {'.'.join(map(str, OLDEST_TRITON))}"
    return None


@cache
def _choose(backend: str, dtype: torch.dtype, device_type: str, interpreted: bool) -> tuple[str, str]:
    if backend in ("torch", "reference"):
        return backend, f"backend={backend!r} was asked for"
    reason = why_not_triton(dtype, device_type)
    if backend == "triton":
        if reason is not None:
            raise RuntimeError(f"backend='triton' cannot run: {reason}")
        return "triton", "backend='triton' was asked for"
    if device_type == "cpu":
        return "torch", "on the CPU, where Triton has only an interpreter for tests"
    if reason is not None:
        return "torch", reason
    return "torch", (
        "batched products were faster than the Triton kernels of this release in every case measured "
        "(one H200); backend='triton' runs those"
    )


@constant
def choose(backend: str, dtype: torch.dtype, device_type: str) -> tuple[str, str]:
    """(backend that runs, why), for a backend as the user asked for it.

    Raises:
        RuntimeError: "triton" where it cannot run, with the reason.
        ValueError: an unknown backend.

    """
    return _choose(requested(backend), dtype, device_type, _interpreted())


@cache
def kernels() -> ModuleType:
    """The Triton launchers, imported on first use since importing them imports Triton."""
    from monarch_rocm import kernels as package  # type: ignore[attr-defined]
    from monarch_rocm.kernels import bdmm, bdmm_wgrad, tuning  # noqa: F401

    return package  # type: ignore[no-any-return]


def hidden_groups(backend: str, blkdiag2: torch.Tensor) -> tuple[int, int]:
    """Index-map groups of the hidden features, as output of the first stage and input of the second.

    A backend keeps them in the order that suits it: Triton block by block of the second factor,
    batched products in plain order.
    """
    blocks, _, size = blkdiag2.shape
    if choose(backend, blkdiag2.dtype, blkdiag2.device.type)[0] == "triton":
        return blocks, 1
    return 1, size


def stage(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    group_in: int,
    group_out: int,
    hidden: bool,
    backend: str,
) -> torch.Tensor:
    """One block-diagonal product `(tokens, in) -> (tokens, out_features)` on the path of `backend`."""
    if choose(backend, x.dtype, x.device.type)[0] == "triton":
        return kernels().bdmm.bdmm(x, w, bias, out_features, group_in, group_out)
    return batched.stage(x, w, bias, out_features, group_in, group_out, hidden)


def new_hidden(x: torch.Tensor, features: int, backend: str) -> torch.Tensor:
    """An empty `(..., features)` of hidden features with the strides that `stage` gives them."""
    lead = x.shape[:-1]
    if choose(backend, x.dtype, x.device.type)[0] == "triton":
        return x.new_empty(*lead, features)
    return x.new_empty(features, *lead).movedim(0, -1)


def stage_wgrad(
    g: torch.Tensor,
    a: torch.Tensor,
    blocks: int,
    n_out: int,
    n_in: int,
    group_out: int,
    group_in: int,
    backend: str,
) -> torch.Tensor:
    """Its weight gradient `(blocks, n_out, n_in)` on the path of `backend`."""
    if choose(backend, g.dtype, g.device.type)[0] == "triton":
        return kernels().bdmm_wgrad.bdmm_wgrad(g, a, blocks, n_out, n_in, group_out, group_in)
    return batched.stage_wgrad(g, a, blocks, n_out, n_in, group_out, group_in)


@dataclass(frozen=True)
class Plan:
    """What would run, as `plan` found it.

    `kernels` has an entry a launch: for Triton the kernel, the config's file and its values.
    """

    backend: str
    reason: str
    kernels: tuple[dict[str, Any], ...]

    def __str__(self) -> str:
        lines = [f"{self.backend}: {self.reason}"]
        for kernel in self.kernels:
            lines.append("  " + ", ".join(f"{key} {value}" for key, value in kernel.items()))
        return "\n".join(lines)


def plan(
    layer_or_shape: MonarchLinear | MonarchShape,
    tokens: int,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    *,
    backend: str | None = None,
) -> Plan:
    """Which path and config the forward pass would take, and why. Nothing is run.

    Args:
        layer_or_shape (MonarchLinear or MonarchShape): the layer, or its geometry alone.
        tokens (int): rows of the input, its leading dimensions multiplied.
        dtype (torch.dtype, optional): of input and factors. Default: the layer's, for a shape
            `torch.get_default_dtype()`.
        device (torch.device or str, optional): Default: the layer's, for a shape torch's default.
        backend (str, optional): Default: the layer's, for a shape "auto".

    Returns:
        Plan: `backend`, `reason`, `kernels`.

    Raises:
        RuntimeError: backend "triton" where it cannot run.

    Example:
        >>> print(plan(MonarchShape(512, 512), tokens=64, dtype=torch.float64, device="cpu"))
        torch: ...

    """
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
    if tokens != 0:
        check_size("tokens", tokens)
    chosen, reason = choose(backend, dtype, device.type)
    if chosen == "torch":
        launches: tuple[dict[str, Any], ...] = ({"op": "bmm"}, {"op": "bmm"})
    elif chosen == "reference":
        launches = ({"op": "einsum"}, {"op": "einsum"})
    else:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        tuning = kernels().tuning
        file = tuning.table("bdmm", tuning.architecture(device))[0]
        launches = tuple(
            {"kernel": "bdmm", "file": file, **tuning.lookup("bdmm", device, dtype, n_out, n_in, tokens)}
            for _, n_out, n_in in (shape.factor1, shape.factor2)
        )
    return Plan(chosen, reason, launches)
