"""`monarch_linear`: checks, autocast, and the choice between the reference and the registered ops."""

from __future__ import annotations

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from monarch_rocm import autocast, dispatch, ops, reference
from monarch_rocm.shape import MonarchShape


def monarch_linear(
    x: Tensor,
    blkdiag1: Tensor,
    blkdiag2: Tensor,
    bias: Tensor | None = None,
    *,
    in_features: int | None = None,
    out_features: int | None = None,
    layout: str = "interleaved",
    backend: str = "auto",
    recompute: bool = False,
) -> Tensor:
    """Apply a Monarch matrix, `y = x @ monarch_weight(blkdiag1, blkdiag2).T + bias`.

    Args:
        x (Tensor): `(..., in_features)`, any rank from 1 and any strides; zero rows are fine.
        blkdiag1 (Tensor): `(K, Q, P)`, dtype and device of `x`.
        blkdiag2 (Tensor): `(L, S, R)`, likewise, with `K*Q == L*R`.
        bias (Tensor, optional): `(out_features,)`, likewise.
        in_features, out_features (int, optional): widths where the factors are padded. Default:
            `K*P` and `L*S`.
        layout (str): "interleaved" (default) or "blocked".
        backend (str): "auto" (default), "triton", "torch" or "reference"; the environment variable
            MONARCH_ROCM_BACKEND replaces "auto".
        recompute (bool): save memory in training: keep no hidden features for the backward pass, which
            then multiplies by the first factor once more.

    Returns:
        Tensor: `(..., out_features)`, contiguous. Under autocast, in the autocast dtype.

    Raises:
        TypeError: an operand that is no tensor.
        RuntimeError: a last dimension, dtype or device that does not fit, as `F.linear` raises; a
            backend "triton" that cannot run there, with the reason.
        ValueError: factors that do not fit each other, an unknown `layout` or `backend`.

    Source: Dao et al., "Monarch", 2022, section 3.

    Example:
        >>> x, w1, w2 = torch.randn(5, 12), torch.randn(3, 4, 4), torch.randn(2, 7, 6)
        >>> y = monarch_linear(x, w1, w2)
        >>> y.shape, torch.allclose(y, x @ monarch_weight(w1, w2).T, atol=1e-5)
        (torch.Size([5, 14]), True)
    """
    if has_torch_function((x, blkdiag1, blkdiag2)):
        return handle_torch_function(  # type: ignore[no-any-return]
            monarch_linear,
            (x, blkdiag1, blkdiag2),
            x,
            blkdiag1,
            blkdiag2,
            bias,
            in_features=in_features,
            out_features=out_features,
            layout=layout,
            backend=backend,
            recompute=recompute,
        )
    if bias is not None and not isinstance(bias, Tensor):
        raise TypeError(f"bias must be a torch.Tensor or None, but it is a {type(bias).__name__}")
    shape = MonarchShape.from_factors(blkdiag1.shape, blkdiag2.shape, in_features, out_features, layout)
    return apply(x, blkdiag1, blkdiag2, bias, shape, backend, recompute)


def apply(
    x: Tensor,
    blkdiag1: Tensor,
    blkdiag2: Tensor,
    bias: Tensor | None,
    shape: MonarchShape,
    backend: str,
    recompute: bool = False,
) -> Tensor:
    """`monarch_linear` with a geometry computed before."""
    if has_torch_function((x, blkdiag1, blkdiag2)):
        return monarch_linear(
            x,
            blkdiag1,
            blkdiag2,
            bias,
            in_features=shape.in_features,
            out_features=shape.out_features,
            layout=shape.layout,
            backend=backend,
            recompute=recompute,
        )
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor, but it is a {type(x).__name__}")
    dtype = autocast.active_dtype(x.device.type)
    if dtype is not None:
        x, blkdiag1, blkdiag2 = (autocast.cast(t, dtype) for t in (x, blkdiag1, blkdiag2))
        bias = None if bias is None else autocast.cast(bias, dtype)
    _check(x, blkdiag1, blkdiag2, bias, shape)
    backend = dispatch.requested(backend)
    if backend == "reference":
        return reference.monarch_linear(x, blkdiag1, blkdiag2, bias, shape)
    return ops.monarch_linear(x, blkdiag1, blkdiag2, bias, shape, backend, recompute)


def _check(x: Tensor, blkdiag1: Tensor, blkdiag2: Tensor, bias: Tensor | None, shape: MonarchShape) -> None:
    # One pass that asks each tensor once; only where something is off is it asked what.
    dtype, device = x.dtype, x.device
    if (
        x.ndim
        and x.shape[-1] == shape.in_features
        and blkdiag1.shape == shape.factor1
        and blkdiag2.shape == shape.factor2
        and dtype == blkdiag1.dtype == blkdiag2.dtype
        and device == blkdiag1.device == blkdiag2.device
        and (dtype.is_floating_point or dtype.is_complex)
        and (
            bias is None
            or (bias.shape == (shape.out_features,) and bias.dtype == dtype and bias.device == device)
        )
    ):
        return
    raise RuntimeError(_complaint(x, blkdiag1, blkdiag2, bias, shape))


def _complaint(
    x: Tensor, blkdiag1: Tensor, blkdiag2: Tensor, bias: Tensor | None, shape: MonarchShape
) -> str:
    if x.ndim == 0 or x.shape[-1] != shape.in_features:
        return f"the last dimension of x must be in_features={shape.in_features}, but x is {tuple(x.shape)}"
    if blkdiag1.shape != shape.factor1 or blkdiag2.shape != shape.factor2:
        return (
            f"a layer {shape} has factors {shape.factor1} and {shape.factor2}, "
            f"but they are {tuple(blkdiag1.shape)} and {tuple(blkdiag2.shape)}"
        )
    if bias is not None and bias.shape != (shape.out_features,):
        return f"bias must be ({shape.out_features},), one number an output, but it is {tuple(bias.shape)}"
    operands = {"x": x, "blkdiag1": blkdiag1, "blkdiag2": blkdiag2}
    if bias is not None:
        operands["bias"] = bias
    for what in ("dtype", "device"):
        found = {name: getattr(tensor, what) for name, tensor in operands.items()}
        if any(value != found["x"] for value in found.values()):
            listed = ", ".join(f"{name} {value}" for name, value in found.items())
            return f"all operands must have one {what}, but they have: {listed}"
    return f"x must be a floating-point tensor, but it is {x.dtype}"
