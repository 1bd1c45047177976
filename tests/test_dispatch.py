"""Which path runs, and that a choice is never silent."""

import pytest
import torch
from support import DEVICE

from monarch_rocm import MonarchLinear, MonarchShape, dispatch, monarch_linear, plan

SHAPE = MonarchShape(64, 64, 4)


def operands(dtype=torch.float32):
    return [torch.randn(size, dtype=dtype, device=DEVICE) for size in ((3, 64), SHAPE.factor1, SHAPE.factor2)]


def test_cpu_takes_batched_products_and_says_why():
    chosen = plan(SHAPE, 10, torch.float32, "cpu")
    assert chosen.backend == "torch"
    assert "on the CPU" in chosen.reason
    assert str(chosen).startswith("torch: ")


def test_layers_bring_their_own_defaults():
    layer = MonarchLinear(64, 64, dtype=torch.float64, backend="reference")
    assert plan(layer, 1).backend == "reference"


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [(torch.float64, "bfloat16, float16, float32, not float64"), (torch.complex64, "not complex64")],
)
def test_triton_refuses_dtypes_with_the_reason(dtype, reason):
    with pytest.raises(RuntimeError, match=reason):
        monarch_linear(*operands(dtype), backend="triton")


def test_triton_refuses_the_cpu_with_the_reason(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    x, w1, w2 = (t.cpu() for t in operands())
    with pytest.raises(RuntimeError, match=r"backend='triton' cannot run: .*'cpu'"):
        monarch_linear(x, w1, w2, backend="triton")


def test_triton_that_is_missing_or_old_is_named(monkeypatch):
    for version, said in ((None, "not installed"), ("3.2.0", "older than 3.4"), ("3.4.0+git", None)):
        monkeypatch.setattr(dispatch, "triton_version", lambda version=version: version)
        reason = dispatch.why_not_triton(torch.float32, "cuda")
        assert reason is None if said is None else said in reason


def test_environment_replaces_auto_and_only_auto(monkeypatch):
    monkeypatch.setenv("MONARCH_ROCM_BACKEND", "reference")
    assert plan(SHAPE, 1, torch.float32, "cpu").backend == "reference"
    assert plan(SHAPE, 1, torch.float32, "cpu", backend="torch").backend == "torch"
    called = []
    monkeypatch.setattr("monarch_rocm.reference.monarch_linear", lambda *args: called.append(1) or args[0])
    monarch_linear(*operands())
    assert called == [1]
    monkeypatch.setenv("MONARCH_ROCM_BACKEND", "hip")
    with pytest.raises(ValueError, match="MONARCH_ROCM_BACKEND='hip'"):
        monarch_linear(*operands())


@pytest.mark.parametrize("tokens", [-1, 1.5])
def test_plan_refuses_impossible_tokens(tokens):
    with pytest.raises((TypeError, ValueError), match="tokens"):
        plan(SHAPE, tokens)


@pytest.mark.skipif(dispatch.why_not_triton(torch.float32, DEVICE) is not None, reason="no Triton")
def test_plan_names_kernel_file_and_values():
    chosen = plan(SHAPE, 100, torch.float32, DEVICE, backend="triton")
    assert chosen.backend == "triton"
    assert len(chosen.kernels) == 2
    for kernel in chosen.kernels:
        assert kernel["kernel"] == "bdmm"
        assert kernel["file"].name == "bdmm.json"
        assert kernel["BT"] >= 16
    assert plan(SHAPE, 0, torch.float32, DEVICE).backend
