"""The registered ops and their gradients.

`monarch_rocm::linear` is a whole layer, `monarch_rocm::stage` one block-diagonal product,
`monarch_rocm::stage_wgrad` its weight gradient and `monarch_rocm::interleave` the step between the
layouts. The last three are their own and each other's derivatives, so that gradients of any order
stay within these ops.

They are plain `define`/`impl` ops behind `autograd.Function`s, since `custom_op` with
`register_autograd` fails `vmap(grad)` and answers a forward-mode derivative with zero.
"""

from __future__ import annotations

from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.nn import Parameter
from torch.utils.flop_counter import register_flop_formula

from monarch_rocm import autotune, decompositions, dispatch
from monarch_rocm.hidden import new_hidden
from monarch_rocm.shape import MonarchShape

_LIBRARY = torch.library.Library("monarch_rocm", "DEF")
_dispatch = autotune.launchers()
_SCHEMAS = (
    # y (..., out_features) and, with `keep`, the hidden features (..., K*Q), else none of them
    "linear(Tensor x, Tensor blkdiag1, Tensor blkdiag2, Tensor? bias, SymInt out_features, str layout, "
    "bool keep, str backend) -> (Tensor, Tensor)",
    "stage(Tensor x, Tensor w, SymInt out_features, SymInt group_in, SymInt group_out, bool hidden, "
    "str backend) -> Tensor",
    "stage_wgrad(Tensor g, Tensor a, SymInt blocks, SymInt n_out, SymInt n_in, SymInt group_out, "
    "SymInt group_in, str backend) -> Tensor",
    "interleave(Tensor x, SymInt rows, SymInt columns, SymInt out_features, str backend) -> Tensor",
)
for _schema in _SCHEMAS:
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def _impl(name: str) -> Any:
    return torch.library.impl(_LIBRARY, name, "CompositeExplicitAutograd")


def _rows(x: Tensor) -> Tensor:
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def _like(rows: Tensor, x: Tensor) -> Tensor:
    """`rows (tokens, features)` with the leading dimensions of `x`, and no view for autograd: an
    output that is one could not be changed in place.
    """
    if x.ndim == 2 and not rows._is_view():
        return rows
    return torch.ops.aten._unsafe_view(rows, [*x.shape[:-1], rows.shape[-1]])


@_impl("linear")
def _linear(
    x: Tensor,
    blkdiag1: Tensor,
    blkdiag2: Tensor,
    bias: Tensor | None,
    out_features: int,
    layout: str,
    keep: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    y, h = _run(x, blkdiag1, blkdiag2, bias, out_features, layout, keep, backend)
    return _like(y, x), _like(h, x) if keep else x.new_empty(*x.shape[:-1], 0)


def _run(
    x: Tensor,
    blkdiag1: Tensor,
    blkdiag2: Tensor,
    bias: Tensor | None,
    out_features: int,
    layout: str,
    keep: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    path = dispatch.path_of(backend, x.dtype, x.device.type)
    interleaved = layout == "interleaved"
    bias = None if bias is None else bias.contiguous()
    return _dispatch.linear(_rows(x), blkdiag1, blkdiag2, bias, out_features, interleaved, keep, path)


@_impl("stage")
def _stage(
    x: Tensor, w: Tensor, out_features: int, group_in: int, group_out: int, hidden: bool, backend: str
) -> Tensor:
    path = dispatch.path_of(backend, x.dtype, x.device.type)
    y = _dispatch.stage(_rows(x), w, out_features, group_in, group_out, hidden, path)
    return _like(y, x)


@_impl("stage_wgrad")
def _stage_wgrad(
    g: Tensor,
    a: Tensor,
    blocks: int,
    n_out: int,
    n_in: int,
    group_out: int,
    group_in: int,
    backend: str,
) -> Tensor:
    path = dispatch.path_of(backend, g.dtype, g.device.type)
    return _dispatch.stage_wgrad(_rows(g), _rows(a), blocks, n_out, n_in, group_out, group_in, path)


@_impl("interleave")
def _interleave(x: Tensor, rows: int, columns: int, out_features: int, backend: str) -> Tensor:
    path = dispatch.path_of(backend, x.dtype, x.device.type)
    y = _dispatch.interleave(_rows(x), rows, columns, out_features, None, path)
    return _like(y, x)


@torch.library.register_fake("monarch_rocm::linear", lib=_LIBRARY)
def _linear_fake(x, blkdiag1, blkdiag2, bias, out_features, layout, keep, backend):  # type: ignore[no-untyped-def]
    lead = x.shape[:-1]
    hidden = blkdiag1.shape[0] * blkdiag1.shape[1]
    h = new_hidden(x, lead, hidden) if keep else x.new_empty(*lead, 0)
    return x.new_empty(*lead, out_features), h


@torch.library.register_fake("monarch_rocm::stage", lib=_LIBRARY)
def _stage_fake(x, w, out_features, group_in, group_out, hidden, backend):  # type: ignore[no-untyped-def]
    if hidden:
        return new_hidden(x, x.shape[:-1], out_features)
    return x.new_empty(*x.shape[:-1], out_features)


@torch.library.register_fake("monarch_rocm::interleave", lib=_LIBRARY)
def _interleave_fake(x, rows, columns, out_features, backend):  # type: ignore[no-untyped-def]
    return x.new_empty(*x.shape[:-1], out_features)


@torch.library.register_fake("monarch_rocm::stage_wgrad", lib=_LIBRARY)
def _stage_wgrad_fake(g, a, blocks, n_out, n_in, group_out, group_in, backend):  # type: ignore[no-untyped-def]
    return g.new_empty(blocks, n_out, n_in)


def _vmap(name: str, leading: bool) -> None:
    """Register a batching rule. With `leading`, a batch of the first operand alone is more tokens."""
    op = getattr(torch.ops.monarch_rocm, name)

    def rule(info, in_dims, *args):  # type: ignore[no-untyped-def]
        if leading and all(dim is None for dim in in_dims[1:]):
            out = op(args[0].movedim(in_dims[0], 0), *args[1:])
            return out, (0, 0) if isinstance(out, tuple) else 0
        size = info.batch_size

        def sample(arg: Any, dim: int | None, i: int) -> Any:
            if dim is None:
                return arg
            return arg.select(dim, i) if size else arg.new_zeros(arg.movedim(dim, 0).shape[1:])

        # An empty batch takes its shapes from one sample of zeros.
        samples = [
            op(*(sample(arg, dim, i) for arg, dim in zip(args, in_dims, strict=True)))
            for i in range(max(1, size))
        ]
        if isinstance(samples[0], tuple):
            return tuple(torch.stack(parts)[:size] for parts in zip(*samples, strict=True)), (0, 0)
        return torch.stack(samples)[:size], 0

    torch.library.register_vmap(f"monarch_rocm::{name}", rule, lib=_LIBRARY)


_vmap("linear", leading=True)
_vmap("stage", leading=True)
_vmap("stage_wgrad", leading=False)
_vmap("interleave", leading=True)


def _tokens(shape: Any) -> int:
    return int(torch.Size(shape[:-1]).numel())


@register_flop_formula(torch.ops.monarch_rocm.linear)
def _linear_flops(x, blkdiag1, blkdiag2, *args, out_shape=None, **kwargs) -> int:  # type: ignore[no-untyped-def]
    return 2 * _tokens(x) * int(torch.Size(blkdiag1).numel() + torch.Size(blkdiag2).numel())


@register_flop_formula(torch.ops.monarch_rocm.stage)
def _stage_flops(x, w, *args, out_shape=None, **kwargs) -> int:  # type: ignore[no-untyped-def]
    return 2 * _tokens(x) * int(torch.Size(w).numel())


@register_flop_formula(torch.ops.monarch_rocm.stage_wgrad)
def _stage_wgrad_flops(g, a, blocks, n_out, n_in, *args, out_shape=None, **kwargs) -> int:  # type: ignore[no-untyped-def]
    return 2 * _tokens(g) * blocks * n_out * n_in


def _eager() -> bool:
    """Whether nothing stands between a call and its kernels: no transform, mode or tracer."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._is_tracing()
        and forward_ad._current_level < 0
    )


def _all_plain(args: tuple[Any, ...]) -> bool:
    """Whether no argument is what only the dispatcher knows: a tensor subclass, many gradients in one, as of
    `is_grads_batched=True`, or a view whose minus sign is still to be applied, as of `x.conj().imag`.
    """
    for arg in args:
        if type(arg) in _TENSORS:
            if arg.is_neg() or _is_batched(arg):
                return False
        elif type(arg) not in _OTHERS and isinstance(arg, Tensor):
            return False
    return True


_is_batched = torch._C._functorch.is_legacy_batchedtensor
_TENSORS = (Tensor, Parameter)
_OTHERS = (int, bool, str, NoneType)


def _call(function: type[Function], *args: Any) -> Any:
    """Apply `function` the shortest way that is right.

    `Function.apply` binds its arguments by signature, and an op goes through the dispatcher: together
    they cost more than a small layer takes. Eager calls go around both, to the same `impl`.
    """
    if not _eager() or not _all_plain(args):
        return function.apply(*args)
    if torch.is_grad_enabled() and any([isinstance(arg, Tensor) and arg.requires_grad for arg in args]):  # noqa: C419
        return super(Function, function.Eager).apply(*args)  # type: ignore[attr-defined]
    return function.Eager.forward(*args)  # type: ignore[attr-defined]


class Stage(Function):
    """Differentiable `monarch_rocm::stage`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, w, out_features, group_in, group_out, hidden, backend):  # type: ignore[no-untyped-def]
        return torch.ops.monarch_rocm.stage(x, w, out_features, group_in, group_out, hidden, backend)

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        x, w, _, *ctx.groups, ctx.hidden, ctx.backend = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        x, w = ctx.saved_tensors
        group_in, group_out = ctx.groups
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _call(Stage, dy, w.mH, x.shape[-1], group_out, group_in, not ctx.hidden, ctx.backend)
        if ctx.needs_input_grad[1]:
            dw = _call(StageWgrad, dy, x, *w.shape, group_out, group_in, ctx.backend)
        return dx, dw, None, None, None, None, None


class StageWgrad(Function):
    """Differentiable `monarch_rocm::stage_wgrad`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(g, a, blocks, n_out, n_in, group_out, group_in, backend):  # type: ignore[no-untyped-def]
        return torch.ops.monarch_rocm.stage_wgrad(g, a, blocks, n_out, n_in, group_out, group_in, backend)

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        g, a, _, _, _, *ctx.groups, ctx.backend = inputs
        ctx.save_for_backward(g, a)

    @staticmethod
    def backward(ctx, ddw):  # type: ignore[no-untyped-def]
        g, a = ctx.saved_tensors
        group_out, group_in = ctx.groups
        dg = da = None
        if ctx.needs_input_grad[0]:
            hidden = group_out != 1
            dg = _call(Stage, a, ddw, g.shape[-1], group_in, group_out, hidden, ctx.backend)
        if ctx.needs_input_grad[1]:
            hidden = group_in != 1
            da = _call(Stage, g, ddw.mH, a.shape[-1], group_out, group_in, hidden, ctx.backend)
        return dg, da, None, None, None, None, None, None


class Interleave(Function):
    """Differentiable `monarch_rocm::interleave`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, rows, columns, out_features, backend):  # type: ignore[no-untyped-def]
        return torch.ops.monarch_rocm.interleave(x, rows, columns, out_features, backend)

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        x, *ctx.matrix, _, ctx.backend = inputs
        ctx.in_features = x.shape[-1]

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        rows, columns = ctx.matrix
        dx = _call(Interleave, dy, columns, rows, ctx.in_features, ctx.backend)
        return dx, None, None, None, None


class Linear(Function):
    """Differentiable `monarch_rocm::linear`; returns (y, h).

    Only what a gradient needs is saved or computed: no weight gradient for a frozen factor, no
    input gradient for an input that needs none. Without `keep`, the hidden features are not saved but
    computed once more.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x, blkdiag1, blkdiag2, bias, out_features, layout, keep, backend):  # type: ignore[no-untyped-def]
        return torch.ops.monarch_rocm.linear(x, blkdiag1, blkdiag2, bias, out_features, layout, keep, backend)

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        x, blkdiag1, blkdiag2, _, _, layout, keep, backend = inputs
        ctx.set_materialize_grads(False)
        _save(ctx, x, blkdiag1, blkdiag2, output[1] if keep else None, layout, backend)

    @staticmethod
    def backward(ctx, dy, dh):  # type: ignore[no-untyped-def]
        x, blkdiag1, blkdiag2, h = ctx.saved_tensors
        return _linear_backward(ctx, x, blkdiag1, blkdiag2, h, dy, dh)


class EagerLinear(Function):
    """`Linear` in the form that costs the host least, for eager calls; returns y.

    The hidden features that it keeps have no graph: a backward pass that is itself to be differentiated
    computes them once more.
    """

    @staticmethod
    def forward(ctx, x, blkdiag1, blkdiag2, bias, out_features, layout, keep, backend):  # type: ignore[no-untyped-def]
        y, h = _run(x, blkdiag1, blkdiag2, bias, out_features, layout, keep, backend)
        _save(ctx, x, blkdiag1, blkdiag2, h if keep else None, layout, backend)
        return _like(y, x)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        x, blkdiag1, blkdiag2, h = ctx.saved_tensors
        if torch.is_grad_enabled() and ctx.needs_input_grad[1]:
            h = None
        return _linear_backward(ctx, x, blkdiag1, blkdiag2, h, dy, None)


def _save(ctx, x, blkdiag1, blkdiag2, h, layout, backend):  # type: ignore[no-untyped-def]
    need_x, need_1, need_2 = ctx.needs_input_grad[:3]
    recompute = need_2 and (h is None or need_1)  # if gradients of gradients are asked for
    ctx.layout, ctx.backend, ctx.in_features = layout, backend, x.shape[-1]
    ctx.factor1, ctx.factor2 = blkdiag1.shape, blkdiag2.shape
    ctx.save_for_backward(
        x if need_1 or recompute else None,
        blkdiag1 if need_x or recompute else None,
        blkdiag2 if need_x or need_1 else None,
        h if need_2 else None,
    )


def _linear_backward(ctx, x, blkdiag1, blkdiag2, h, dy, dh):  # type: ignore[no-untyped-def]
    need_x, need_1, need_2, need_bias = ctx.needs_input_grad[:4]
    blocks, n_out, n_in = ctx.factor2
    backend = ctx.backend
    dx = d1 = d2 = dbias = None
    if dy is not None and need_bias:
        dbias = dy.sum_to_size(dy.shape[-1])
    if dy is not None and (need_x or need_1 or need_2):
        if ctx.layout == "interleaved":
            dy = _call(Interleave, dy, n_out, blocks, blocks * n_out, backend)
        if need_2:
            if h is None:
                h = _call(Stage, x, blkdiag1, blocks * n_in, 1, 1, True, backend)
            d2 = _call(StageWgrad, dy, h, *ctx.factor2, 1, n_in, backend)
        if need_x or need_1:
            through = _call(Stage, dy, blkdiag2.mH, blocks * n_in, 1, n_in, True, backend)
            dh = through if dh is None else dh + through
    if dh is not None:
        if need_1:
            d1 = _call(StageWgrad, dh, x, *ctx.factor1, 1, 1, backend)
        if need_x:
            dx = _call(Stage, dh, blkdiag1.mH, ctx.in_features, 1, 1, False, backend)
    return dx, d1, d2, dbias, None, None, None, None


def _register(name: str, function: type[Function], impl: Any) -> None:
    """Make `function` the op's autograd, for whoever calls the op by its name, as exported graphs do."""
    op = getattr(torch.ops.monarch_rocm, name)

    def autograd(*args: Any) -> Any:
        if not torch.is_grad_enabled() and _eager() and _all_plain(args):
            return impl(*args)  # as in a compiled graph: the dispatcher would come to the same
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if forward_ad._current_level >= 0 and any(
            forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
        ):
            raise NotImplementedError(f"monarch_rocm::{name} has no forward-mode derivative")
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            try:
                # Not `function.apply`, which would look for transforms: this is below them.
                return super(Function, function).apply(*args)  # type: ignore[misc]
            except RuntimeError as error:
                if not torch._C._are_functorch_transforms_active():
                    raise
                raise NotImplementedError(
                    f"torch.func has no gradients of monarch_rocm::{name} called by its name, as under "
                    "torch.compile: transform what is not compiled"
                ) from error
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    _LIBRARY.impl(name, autograd, "Autograd")
    function.Eager = type(function.__name__, (function,), {"forward": staticmethod(impl)})  # type: ignore[attr-defined]


_register("linear", Linear, _linear)
_register("stage", Stage, _stage)
_register("stage_wgrad", StageWgrad, _stage_wgrad)
_register("interleave", Interleave, _interleave)


def monarch_linear(
    x: Tensor,
    blkdiag1: Tensor,
    blkdiag2: Tensor,
    bias: Tensor | None,
    shape: MonarchShape,
    backend: str,
    recompute: bool,
) -> Tensor:
    """A whole layer on checked operands of one dtype and device."""
    out_features, layout = shape.out_features, "interleaved" if shape.reorders else "blocked"
    operands = (x, blkdiag1, blkdiag2) if bias is None else (x, blkdiag1, blkdiag2, bias)
    if torch.compiler.is_compiling():
        # The op, not its `Function`: Dynamo traces that in its own way, in which gradients go missing.
        keep = torch.is_grad_enabled() and not recompute
        if not recompute:
            backend = decompositions.mark(backend, x.dtype, x.device.type)
        y, _ = torch.ops.monarch_rocm.linear(x, blkdiag1, blkdiag2, bias, out_features, layout, keep, backend)
    elif not _eager() or not _all_plain(operands):
        gradients = torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()
        keep = gradients and not recompute
        y, _ = Linear.apply(x, blkdiag1, blkdiag2, bias, out_features, layout, keep, backend)
    elif torch.is_grad_enabled() and any([operand.requires_grad for operand in operands]):  # noqa: C419
        keep = blkdiag2.requires_grad and not recompute
        arguments = (x, blkdiag1, blkdiag2, bias, out_features, layout, keep, backend)
        if keep and x.requires_grad and not blkdiag1.requires_grad:
            # `EagerLinear` would have to keep x for gradients of gradients alone.
            y, _ = super(Function, Linear.Eager).apply(*arguments)  # type: ignore[attr-defined]
        else:
            y = super(Function, EagerLinear).apply(*arguments)  # type: ignore[misc]
    else:
        y, _ = _run(x, blkdiag1, blkdiag2, bias, out_features, layout, False, backend)
        y = _like(y, x)
    return y  # type: ignore[no-any-return]
