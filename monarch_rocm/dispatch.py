"""Which path a layer runs on, and why. The one place that knows of all paths."""

from __future__ import annotations

import importlib.util
import os
import warnings
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

from monarch_rocm import batched
from monarch_rocm.kernels.tuning import FEW
from monarch_rocm.tracing import constant

BACKENDS = ("auto", "triton", "torch", "reference")
MARK = "@"  # after an op's backend: `decompositions` may replace the op
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OLDEST_TRITON = (3, 4)
WHOLE = ("chained", "fused")  # kernels that take a whole layer
ALIGNED = 16  # tokens in which hidden features, whose tokens lie side by side, are loaded and stored wide


def check_backend(backend: str) -> str:
    """Raise unless `backend` is a known one."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, but backend={backend!r} was given")
    return backend


@constant
def requested(backend: str) -> str:
    """`backend`, or what the environment variable MONARCH_ROCM_BACKEND says in place of "auto".

    `torch.compile` reads the variable when it compiles.
    """
    if backend != "auto":
        return check_backend(backend)
    from_environment = os.environ.get("MONARCH_ROCM_BACKEND") or "auto"
    if from_environment not in BACKENDS:
        raise ValueError(f"MONARCH_ROCM_BACKEND={from_environment!r}, which is none of {BACKENDS}")
    return from_environment


@cache
def triton_state() -> tuple[str, str | None]:
    """(version of Triton, why it cannot be used or None)."""
    if importlib.util.find_spec("triton") is None:
        return (
            "not installed",
            "Triton is not installed (ROCm's torch brings it; elsewhere: pip install triton)",
        )
    try:
        import triton
    except Exception as error:
        return f"broken: {error}", f"Triton fails to import: {error}"
    version = str(triton.__version__)
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TRITON:
        return version, f"Triton {version} is older than {'.'.join(map(str, OLDEST_TRITON))}"
    return version, None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def why_not_triton(dtype: torch.dtype, device_type: str) -> str | None:
    """The reason why Triton kernels cannot run there, None where they can."""
    if dtype not in TRITON_DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in TRITON_DTYPES)
        return f"the kernels take {names}, not {str(dtype).removeprefix('torch.')}"
    if device_type != "cuda" and not (device_type == "cpu" and _interpreted()):
        return f"the tensors are on {device_type!r}, not on a ROCm or CUDA GPU"
    reason = triton_state()[1]
    if reason is None and device_type == "cpu":
        # Triton decides when a function is decorated, its own when it is imported.
        from triton.language import cdiv

        if type(cdiv).__name__ != "InterpretedFunction" or not kernels().tuning.interprets():
            return "TRITON_INTERPRET was set after Triton was imported; set it before Python starts"
    return reason


@cache
def _choose(backend: str, dtype: torch.dtype, device_type: str, interpreted: bool) -> tuple[str, str]:
    backend = backend.partition(MARK)[0]
    if backend in ("torch", "reference"):
        return backend, f"backend={backend!r} was asked for"
    if backend == "auto" and device_type == "cpu":
        return "torch", "on the CPU, where Triton has only an interpreter for tests"
    reason = why_not_triton(dtype, device_type)
    if backend == "triton":
        if reason is not None:
            raise RuntimeError(f"backend='triton' cannot run: {reason}. backend='auto' takes what can")
        if device_type == "cpu" and dtype == torch.bfloat16:
            warnings.warn(
                "Triton's interpreter multiplies the raw bits of bfloat16: results on the CPU are wrong "
                "unless it is mended as tests/conftest.py does",
                stacklevel=2,
            )
        return "triton", "backend='triton' was asked for"
    if reason is not None:
        return "torch", reason
    return "auto", "Triton kernels where the config tables say that they win, else batched products"


@constant
def choose(backend: str, dtype: torch.dtype, device_type: str) -> tuple[str, str]:
    """(path, why), for a backend as the user asked for it.

    The path is "reference", "torch", "triton", or "auto" where kernels and batched products take
    turns. The functions below expect such a path.

    Raises:
        RuntimeError: "triton" where it cannot run, with the reason.
        ValueError: an unknown backend.
    """
    return _choose(requested(backend), dtype, device_type, device_type == "cpu" and _interpreted())


def path_of(backend: str, dtype: torch.dtype, device_type: str) -> str:
    """The path of an op's `backend`, in which "auto" has taken the environment's place already, and
    which `decompositions` may have marked.

    Raises:
        RuntimeError: "triton" where it cannot run, with the reason.
        ValueError: "reference", which is no path of the registered ops.
    """
    path = _choose(backend, dtype, device_type, device_type == "cpu" and _interpreted())[0]
    if path == "reference":
        raise ValueError("the registered ops have no backend 'reference': call monarch_rocm.monarch_linear")
    return path


@cache
def kernels() -> ModuleType:
    """The Triton launchers, imported on first use since importing them imports Triton."""
    from monarch_rocm import kernels as package  # type: ignore[attr-defined]
    from monarch_rocm.kernels import bdmm, bdmm_wgrad, bdmv, chained, fused, interleave, tuning  # noqa: F401

    return package  # type: ignore[no-any-return]


def config_for(
    kernel: str,
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    n_out: int,
    n_in: int,
    tokens: int,
) -> dict[str, int] | None:
    """Launch parameters of a kernel, None where batched products run in its place.

    "triton" always runs a kernel for a stage; "auto" runs one, and either a kernel for the whole layer,
    where the config table says that it won.
    """
    if path == "torch":
        return None
    row = kernels().tuning.lookup(kernel, device, dtype, n_out, n_in, tokens)
    if row["wins"] or (path == "triton" and kernel not in WHOLE):
        return row["config"]
    return None


class Product(NamedTuple):
    """What runs one stage: a kernel's name, its launcher, and its launch parameters."""

    kernel: str
    run: Any
    config: dict[str, int]


@cache
def _product(
    generation: int,
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    n_out: int,
    n_in: int,
    tokens: int,
    aligned: bool,
) -> Product | None:
    for name in ("bdmv", "bdmm") if tokens <= FEW else ("bdmm",):
        config = config_for(name, path, dtype, device, n_out, n_in, tokens)
        # Of other numbers of tokens, `bdmm` must load and store hidden features one by one.
        if config is not None and (name == "bdmv" or aligned or path == "triton"):
            return Product(name, getattr(getattr(kernels(), name), name), config)
    return None


def product_for(
    path: str, dtype: torch.dtype, device: torch.device, n_out: int, n_in: int, tokens: int
) -> Product | None:
    """What runs one stage, None for a batched product.

    Tokens count by bucket, and by whether `ALIGNED` divides them.
    """
    if path == "torch":
        return None
    tuning = kernels().tuning
    count = (tuning.bucket_of(tokens), tokens % ALIGNED == 0)
    return _product(tuning.generation, path, dtype, device, n_out, n_in, *count)


def fused_sizes(factor1: Any, factor2: Any) -> tuple[int, int] | None:
    """By what the fused kernel's table is looked up, the widest sides of the layer and of its blocks;
    None where it cannot serve the shape.
    """
    (blocks, n_hidden, _), (out_blocks, _, width) = factor1, factor2
    powers = (blocks, out_blocks, n_hidden, width)
    if n_hidden % out_blocks or min(n_hidden, width) < 16 or any(n & (n - 1) for n in powers):
        return None
    return widest(factor1, factor2)


def widest(factor1: Any, factor2: Any) -> tuple[int, int]:
    """The widest sides of a layer and of its blocks."""
    (blocks, n_hidden, n_in), (out_blocks, n_out, width) = factor1, factor2
    return max(blocks * n_in, out_blocks * n_out, blocks * n_hidden), max(n_in, n_out, n_hidden, width)


class Route(NamedTuple):
    """What a layer runs on: one launch with these parameters, or for each stage a launcher.

    `chained` goes before `fused`; None for a stage is a batched product.
    """

    chained: dict[str, int] | None
    fused: dict[str, int] | None
    first: Product | None
    second: Product | None


@cache
def _route(
    generation: int,
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    factor1: Any,
    factor2: Any,
    interleaved: bool,
    keep: bool,
    tokens: int,
    aligned: bool,
) -> Route:
    first, second = (
        _product(generation, path, dtype, device, n_out, n_in, tokens, aligned)
        for _, n_out, n_in in (factor1, factor2)
    )
    sizes = fused_sizes(factor1, factor2)
    fused = None if sizes is None else config_for("fused", path, dtype, device, *sizes, tokens)
    chained = None
    if not keep and not (interleaved and fused is not None):  # which stores those without a pass
        chained = config_for("chained", path, dtype, device, *widest(factor1, factor2), tokens)
    return Route(chained, fused, first, second)


BATCHED = Route(None, None, None, None)


def route(
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    factor1: Any,
    factor2: Any,
    interleaved: bool,
    keep: bool,
    tokens: int,
) -> Route:
    """The route of a layer with factors of these shapes; tokens count as for `product_for`."""
    if path == "torch":
        return BATCHED
    tuning = kernels().tuning
    count = (tuning.bucket_of(tokens), tokens % ALIGNED == 0)
    return _route(tuning.generation, path, dtype, device, factor1, factor2, interleaved, keep, *count)


def linear(
    x: torch.Tensor,
    blkdiag1: torch.Tensor,
    blkdiag2: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    interleaved: bool,
    keep: bool,
    path: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer on `x (tokens, in)`: outputs `(tokens, out_features)` and hidden features `(tokens, K*Q)`.

    The hidden features are in plain order and lie as `new_hidden` says; they may be missing unless `keep`.
    """
    factor1, factor2 = blkdiag1.shape, blkdiag2.shape
    found = route(path, x.dtype, x.device, factor1, factor2, interleaved, keep, x.shape[0])
    chained, fused, first, second = found
    factors = blkdiag1, blkdiag2, bias
    if chained is not None:
        return run_chained(x, *factors, out_features, interleaved, chained, path), x.new_empty(0)
    if fused is not None:
        return kernels().fused.fused(x, *factors, out_features, interleaved, keep, fused)
    if first is not None and second is not None and first.kernel == second.kernel == "bdmv":
        layer = kernels().bdmv.bdmv_layer
        return layer(x, *factors, out_features, interleaved, keep, first.config, second.config, found)
    (blocks, n_hidden, _), (out_blocks, n_out, n_in) = factor1, factor2
    if blocks == out_blocks == 1 and first is second is None and not keep:
        return batched.low_rank(x, *factors), x.new_empty(0)
    h = multiply(first, x, blkdiag1, None, blocks * n_hidden, 1, 1, True, inside=True)
    if interleaved and (second is None or second.kernel != "bdmv"):
        # Many tokens: numbers that are stored one by one cost more than a pass.
        z = multiply(second, h, blkdiag2, None, out_blocks * n_out, n_in, 1, False)
        y = interleave(z, out_blocks, n_out, out_features, bias, path)
    else:
        y = multiply(second, h, blkdiag2, bias, out_features, n_in, n_out if interleaved else 1, False)
    if keep and first is None:
        # What autograd keeps has strides that are known from the shape alone, whatever suited the product.
        h = h.t().contiguous().t()
    return y, h


def run_chained(
    x: torch.Tensor,
    blkdiag1: torch.Tensor,
    blkdiag2: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    interleaved: bool,
    config: dict[str, int],
    path: str,
) -> torch.Tensor:
    """Outputs of a layer by the kernel that takes both stages in one launch, and a pass where interleaved."""
    run = kernels().chained.chained
    if not interleaved:
        return run(x, blkdiag1, blkdiag2, bias, out_features, config)
    out_blocks, n_out, _ = blkdiag2.shape
    z = run(x, blkdiag1, blkdiag2, None, out_blocks * n_out, config)
    return interleave(z, out_blocks, n_out, out_features, bias, path)


def multiply(
    product: Product | None,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    group_in: int,
    group_out: int,
    hidden: bool,
    inside: bool = False,
) -> torch.Tensor:
    """One stage `(tokens, in) -> (tokens, out_features)` by `product`, None for a batched one."""
    if product is not None:
        return product.run(x, w, bias, out_features, group_in, group_out, hidden, product.config)
    y = batched.stage(x, w, out_features, group_in, group_out, hidden, inside)
    return y if bias is None else y.add_(bias)


def stage(
    x: torch.Tensor,
    w: torch.Tensor,
    out_features: int,
    group_in: int,
    group_out: int,
    hidden: bool,
    path: str,
    inside: bool = False,
) -> torch.Tensor:
    """One block-diagonal product `(tokens, in) -> (tokens, out_features)` on `path`."""
    _, n_out, n_in = w.shape
    product = product_for(path, x.dtype, x.device, n_out, n_in, x.shape[0])
    return multiply(product, x, w, None, out_features, group_in, group_out, hidden, inside)


def stage_wgrad(
    g: torch.Tensor,
    a: torch.Tensor,
    blocks: int,
    n_out: int,
    n_in: int,
    group_out: int,
    group_in: int,
    path: str,
) -> torch.Tensor:
    """Its weight gradient `(blocks, n_out, n_in)` on `path`."""
    config = config_for("bdmm_wgrad", path, g.dtype, g.device, n_out, n_in, g.shape[0])
    if config is None:
        return batched.stage_wgrad(g, a, blocks, n_out, n_in, group_out, group_in)
    return kernels().bdmm_wgrad.bdmm_wgrad(g, a, blocks, n_out, n_in, group_out, group_in, config)


def interleave(
    x: torch.Tensor,
    rows: int,
    columns: int,
    out_features: int,
    bias: torch.Tensor | None,
    path: str,
) -> torch.Tensor:
    """Each row of `x` as a matrix `(rows, columns)`, transposed, on `path`."""
    config = config_for("interleave", path, x.dtype, x.device, rows, columns, x.shape[0])
    if config is None:
        return batched.interleave(x, rows, columns, out_features, bias)
    return kernels().interleave.interleave(x, rows, columns, out_features, bias, config)
