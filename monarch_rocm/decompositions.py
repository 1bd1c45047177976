"""What `torch.compile` sees of a layer whose stages are batched products: those products.

A registered op is opaque to a compiler, and costs the host more than a product does. Where `dispatch`
would run batched products on a GPU anyway, the compiler gets them in the op's place: what lies between
them, the passes between layouts above all, fuses with what stands around the layer, and the products are
called directly. Ops that run a kernel stay ops, as do all of them where sizes are not known when
compiling, since the path depends on them, and those of layers that recompute hidden features, which
the compiler would find that it has already.

Calls that may be replaced are marked: their `backend` ends in a digest of what the choice depends on, so
that graphs in the compiler's caches are those of the same config tables.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from monarch_rocm import autotune, batched, dispatch
from monarch_rocm.tracing import constant

OPAQUE = ("cpu",)  # devices on which ops stay: there `batched` chooses other orders in memory
TELLS_EXPORTS = hasattr(torch.compiler, "is_exporting")  # from compilations; PyTorch 2.6 does not


@constant
def mark(backend: str, dtype: torch.dtype, device_type: str) -> str:
    """`backend` with a mark where ops may be replaced, else as it is; called while a layer is traced."""
    path = dispatch.path_of(backend, dtype, device_type)
    # What is exported may run elsewhere, and MONARCH_ROCM_AUTOTUNE measures ops when they run.
    if device_type in OPAQUE or not TELLS_EXPORTS or torch.compiler.is_exporting() or autotune.enabled():
        return backend
    _register()
    return (
        backend + dispatch.MARK + ("" if path == "torch" else _digest(dispatch.kernels().tuning.generation))
    )


@cache
def _digest(generation: int) -> str:
    """Of the config tables of the current device."""
    tuning = dispatch.kernels().tuning
    arch = tuning.architecture(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    tables = [
        rows
        for kernel in tuning.PARAMETERS
        for _, rows in (tuning.own_table(kernel, arch), tuning.table(kernel, arch))
    ]
    return hashlib.sha256(json.dumps([arch, tables]).encode()).hexdigest()[:16]


@cache
def _register() -> None:
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

    for decompose in (_linear, _stage, _stage_wgrad, _interleave):
        name = f"monarch_rocm::{decompose.__name__[1:]}"
        torch.library.register_torch_dispatch(name, ProxyTorchDispatchMode, partial(_rule, decompose))


def _rule(decompose: Any, mode: Any, op: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Trace `decompose` in place of a marked `op`, whose last argument is its backend, where it can."""
    if not kwargs and dispatch.MARK in args[-1]:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if all(type(size) is int and size for tensor in tensors for size in tensor.shape):
            with mode:
                found = decompose(*args)
            if found is not None:
                return found
    return mode.__torch_dispatch__(op, types, args, kwargs)


def _linear(
    x: Tensor,
    blkdiag1: Tensor,
    blkdiag2: Tensor,
    bias: Tensor | None,
    out_features: int,
    layout: str,
    keep: bool,
    backend: str,
) -> tuple[Tensor, Tensor] | None:
    path = dispatch.path_of(backend, x.dtype, x.device.type)
    factor1, factor2 = blkdiag1.shape, blkdiag2.shape
    interleaved = layout == "interleaved"
    tokens = x.shape[:-1].numel()
    route = dispatch.route(path, x.dtype, x.device, factor1, factor2, interleaved, keep, tokens)
    if route != dispatch.BATCHED:
        return None
    (blocks, n_hidden, _), (out_blocks, n_out, n_in) = factor1, factor2
    if blocks == out_blocks == 1 and not keep:
        return batched.low_rank(x, blkdiag1, blkdiag2, bias), x.new_empty(*x.shape[:-1], 0)
    h = _hidden(_product(x, blkdiag1, 1, True), x, blocks * n_hidden)
    width = out_blocks * n_out if interleaved else out_features
    y = _features(_product(h, blkdiag2, n_in, False), x, width)
    if interleaved:
        y = torch.ops.monarch_rocm.interleave(y, out_blocks, n_out, out_features, backend)
    if bias is not None:
        y = y + bias
    return y, h if keep else x.new_empty(*x.shape[:-1], 0)


def _stage(
    x: Tensor, w: Tensor, out_features: int, group_in: int, group_out: int, hidden: bool, backend: str
) -> Tensor | None:
    path = dispatch.path_of(backend, x.dtype, x.device.type)
    _, n_out, n_in = w.shape
    tokens = x.shape[:-1].numel()
    if dispatch.product_for(path, x.dtype, x.device, n_out, n_in, tokens) is not None:
        return None
    if hidden:
        product = _product(x, w, group_in, True)
        return _hidden(product if group_out == 1 else product.transpose(0, 1), x, out_features)
    if group_out != 1:
        return None
    return _features(_product(x, w, group_in, False), x, out_features)


def _product(x: Tensor, w: Tensor, group_in: int, tokens_last: bool) -> Tensor:
    """`(blocks, n_out, tokens)` or `(blocks, tokens, n_out)`."""
    blocks, _, n_in = w.shape
    a = batched.split(x.reshape(-1, x.shape[-1]), blocks, n_in, group_in)
    return torch.bmm(w, a.mT) if tokens_last else torch.bmm(a, w.mT)


def _hidden(product: Tensor, x: Tensor, features: int) -> Tensor:
    """Hidden features with the leading dimensions of `x`, from their two indices and tokens."""
    return product.reshape(features, *x.shape[:-1]).movedim(0, -1)


def _features(product: Tensor, x: Tensor, features: int) -> Tensor:
    """Features block by block with the leading dimensions of `x`."""
    y = product.transpose(0, 1).reshape(*x.shape[:-1], -1)
    return y[..., :features].contiguous()


def _stage_wgrad(
    g: Tensor, a: Tensor, blocks: int, n_out: int, n_in: int, group_out: int, group_in: int, backend: str
) -> Tensor | None:
    path = dispatch.path_of(backend, g.dtype, g.device.type)
    g, a = (each.reshape(-1, each.shape[-1]) for each in (g, a))
    if dispatch.config_for("bdmm_wgrad", path, g.dtype, g.device, n_out, n_in, g.shape[0]) is not None:
        return None
    return batched.stage_wgrad(g, a, blocks, n_out, n_in, group_out, group_in)


def _interleave(x: Tensor, rows: int, columns: int, out_features: int, backend: str) -> Tensor | None:
    if dispatch.path_of(backend, x.dtype, x.device.type) == "triton":
        return None
    # Also where the kernel wins alone: a pass that fuses with its neighbours costs less.
    y = F.pad(x, (0, rows * columns - x.shape[-1])).unflatten(-1, (rows, columns))
    return y.transpose(-1, -2).flatten(-2)[..., :out_features].contiguous()
