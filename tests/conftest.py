"""Kernels run on the GPU where there is one, else in Triton's interpreter on the CPU."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Decided when a kernel is decorated, so before the first import of one.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a ROCm or CUDA GPU"))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def poison(monkeypatch):
    """Fresh tensors hold NaN, so that an unwritten output shows."""
    from support import poison_fresh_tensors

    poison_fresh_tensors(monkeypatch)


@pytest.fixture(autouse=True, scope="session")
def mended_interpreter():
    """Triton's interpreter keeps bfloat16 as raw bits, which its dot multiplies and its casts truncate."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    import numpy as np
    import triton.language as tl

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
