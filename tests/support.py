"""What several tests share: the independent dense formula, shapes, and the error budget."""

import importlib.util
import math
import os
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

from monarch_rocm import MonarchShape, monarch_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# in, out, nblocks, rank: square, wide, narrow, padded, K != L, L not dividing Q, low rank, blocks of
# 1, 4, 12 and 24, fly's structural zeros, more blocks than features.
SHAPES = [
    (12, 12, 3, None),
    (10, 33, 4, None),
    (33, 10, 4, None),
    (7, 5, (2, 3), None),
    (48, 36, (2, 3), 4),
    (64, 64, 4, 2),
    (24, 40, 1, 3),
    (6, 6, 6, 1),
    (16, 16, 4, None),
    (36, 36, 3, None),
    (72, 48, (3, 2), 12),
    (20, 28, 8, None),
    (5, 7, 8, None),
    (100, 75, 5, None),
    (64, 100, (2, 4), 8),
    (30, 70, 4, 4),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LAYOUTS = ["interleaved", "blocked"]
FUSED = {"BT": 16, "num_warps": 4, "num_stages": 1}
CHAINED = {"BT": 16, "BO": 16, "BI": 16, "PROGRAMS": 3, "num_warps": 4, "num_stages": 2}


def shape_id(shape):
    return "-".join(str(part).replace(" ", "") for part in shape)


def dtype_id(dtype):
    return str(dtype).removeprefix("torch.")


by_shape = pytest.mark.parametrize("sizes", SHAPES, ids=shape_id)
by_layout = pytest.mark.parametrize("layout", LAYOUTS)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)


def dense_weight(blkdiag1, blkdiag2, layout):
    """The maths of the README written as loops over hidden features, sharing nothing with the package."""
    blocks_in, width, n_in = blkdiag1.shape
    blocks_out, n_out, _ = blkdiag2.shape
    weight = blkdiag1.new_zeros(blocks_out * n_out, blocks_in * n_in)
    for k in range(blocks_in):
        for q in range(width):
            j = k * width + q
            l, r = j % blocks_out, j // blocks_out
            if layout == "interleaved":
                rows = [s * blocks_out + l for s in range(n_out)]
            else:
                rows = [l * n_out + s for s in range(n_out)]
            weight[rows, k * n_in : (k + 1) * n_in] += torch.outer(blkdiag2[l, :, r], blkdiag1[k, q])
    return weight


def make_shape(sizes, layout="interleaved"):
    in_features, out_features, nblocks, rank = sizes
    return MonarchShape(in_features, out_features, nblocks, rank, layout)


def make_operands(shape, dtype, lead=(9,), bias=True, device=DEVICE, seed=0):
    """x, both factors and a bias of about unit outputs, drawn in float64 and then rounded."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size, scale=1.0):
        values = torch.randn(*size, generator=generator, dtype=torch.float64) * scale
        return values.to(device, dtype).requires_grad_()

    x = draw(*lead, shape.in_features)
    w1 = draw(*shape.factor1, scale=shape.P**-0.5)
    w2 = draw(*shape.factor2, scale=shape.R**-0.5)
    return x, w1, w2, draw(shape.out_features) if bias else None


def forward(shape, operands, backend):
    """Output of a layer of that shape."""
    x, w1, w2, bias = operands
    return monarch_linear(
        x,
        w1,
        w2,
        bias,
        in_features=shape.in_features,
        out_features=shape.out_features,
        layout=shape.layout,
        backend=backend,
    )


def run(shape, operands, backend, grad=None):
    """Output and the gradients of all operands that require one."""
    y = forward(shape, operands, backend)
    wanted = [t for t in operands if t is not None and t.requires_grad]
    grads = torch.autograd.grad(y, wanted, torch.ones_like(y) if grad is None else grad)
    return [y.detach(), *grads]


def run_dense(shape, operands, grad):
    """The same by the independent formula, in float64."""
    x, w1, w2, bias = (None if t is None else t.detach().double().requires_grad_() for t in operands)
    weight = dense_weight(w1, w2, shape.layout)[: shape.out_features, : shape.in_features]
    y = F.linear(x, weight, bias)
    grads = torch.autograd.grad(y, [t for t in (x, w1, w2, bias) if t is not None], grad.double())
    return [y.detach(), *grads]


def poison_fresh_tensors(monkeypatch):
    """Fill what `torch.empty` and `Tensor.new_empty` return with NaN, so that an unwritten output shows."""

    def poisoned(allocate):
        def call(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return call

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


def error_over_budget(got, plain, exact, depth):
    """The error against float64 over what is allowed: twice what plain PyTorch makes in the same dtype.

    Both the root of the mean square and the largest; the greater of the two ratios. Another order of a
    float32 sum over `depth` products may add its own rounding, which grows as the square root.
    """
    error, allowed = got.double() - exact, plain.double() - exact
    order = torch.finfo(torch.float32).eps * math.sqrt(depth)
    ratios = []
    for measure in (lambda e: e.square().mean().sqrt(), lambda e: e.abs().max()):
        limit = float(2 * measure(allowed) + order * measure(exact))
        ratios.append(float(measure(error)) / limit if limit else (math.inf if measure(error) else 0.0))
    return max(ratios)


def assert_within_budget(name, got, plain, exact, depth):
    """`error_over_budget` is at most 1, and nothing is lost."""
    assert got.shape == exact.shape
    assert got.dtype == plain.dtype
    assert got.isfinite().all(), f"{name} has values that are not finite"
    if exact.numel():
        ratio = error_over_budget(got, plain, exact, depth)
        assert ratio <= 1, f"{name}: {ratio:.3g} times the error that is allowed"


def svd_budget(weight):
    """Twice the error of PyTorch's own SVD of the weight, and the rounding of two factors."""
    high, single = (
        (torch.complex128, torch.complex64) if weight.is_complex() else (torch.float64, torch.float32)
    )
    exact = weight.detach().to(high)
    try:
        u, sigma, vh = torch.linalg.svd(weight.detach().to(high if weight.dtype == high else single))
    except torch.linalg.LinAlgError:  # as in complex64 of equal numbers, on CPUs
        u, sigma, vh = torch.linalg.svd(exact)
    plain = (u[:, : len(sigma)] * sigma).to(high) @ vh[: len(sigma)].to(high)
    rounding = 2 * torch.finfo(weight.dtype).eps * torch.linalg.vector_norm(exact)
    return 2 * torch.linalg.vector_norm(plain - exact) + rounding


def force(path, monkeypatch):
    """Launch one family of kernels, whatever the tables say that is fastest."""
    from monarch_rocm import dispatch
    from monarch_rocm.kernels import tuning

    def config_for(kernel, backend, dtype, device, *sizes):
        if backend == "torch" or (path == "batched" and kernel != "interleave"):
            return None
        if kernel in ("fused", "chained"):
            return {"fused": FUSED, "chained": CHAINED}[kernel] if path == kernel else None
        if kernel == "bdmv" and path != "few":
            return None
        return tuning.lookup(kernel, torch.device("cpu"), dtype, *sizes)["config"]

    monkeypatch.setattr(dispatch, "config_for", config_for)
    tuning.refresh()


@contextmanager
def interpreter_mended():
    """Triton's interpreter keeps bfloat16 as raw bits, which its dot multiplies and its casts truncate."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        yield
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    dot, cast = builder.create_dot, builder.cast_impl

    def widen(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = np.ascontiguousarray(handle.data).view(np.uint16).astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def mended_dot(self, a, b, *args, **kwargs):
        return dot(self, widen(a), widen(b), *args, **kwargs)

    def mended_cast(self, src, dst_type):
        if dst_type.scalar == tl.bfloat16 and src.dtype.scalar == tl.float32:
            bits = np.ascontiguousarray(src.data).view(np.uint32)
            rounded = bits + 0x7FFF + ((bits >> 16) & 1)
            rounded = np.where(np.isnan(src.data), bits | 0x400000, rounded)
            return interpreter.TensorHandle((rounded >> 16).astype(np.uint16), tl.bfloat16)
        return cast(self, src, dst_type)

    builder.create_dot, builder.cast_impl = mended_dot, mended_cast
    yield
    builder.create_dot, builder.cast_impl = dot, cast
