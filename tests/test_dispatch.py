"""Which path runs, and that a choice is never silent."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_plan_of_a_gpu_that_is_not_there():
    pytest.importorskip("triton", minversion="3.4")
    with pytest.raises(RuntimeError, match="no ROCm or CUDA GPU"):
        plan(SHAPE, 8192, torch.bfloat16, "cuda")


def test_plan_counts_flops_and_bytes():
    blocked = plan(MonarchShape(64, 64, 4, layout="blocked"), 10, torch.float32, "cpu")
    assert blocked.flops == 2 * 10 * SHAPE.num_parameters
    assert blocked.bytes == 4 * (10 * 4 * 64 + SHAPE.num_parameters)
    assert [each["op"] for each in blocked.kernels] == ["bmm", "bmm"]
    interleaved = plan(SHAPE, 10, torch.float32, "cpu")
    assert interleaved.bytes == blocked.bytes + 4 * 10 * 2 * 64
    assert plan(SHAPE, 0, torch.float32, "cpu").flops == 0


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


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (None, "not installed"),
        ("raise RuntimeError('no driver')", "fails to import: no driver"),
        ("__version__ = '3.2.0'", "older than 3.4"),
        ("__version__ = '3.4.0+git'", None),
    ],
)
def test_triton_that_is_missing_broken_or_old_is_named(source, said, monkeypatch, tmp_path):
    if source is None:
        monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
    else:
        (tmp_path / "triton.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "triton", raising=False)
    state = dispatch.triton_state.__wrapped__()
    assert state[1] is None if said is None else said in state[1]
    monkeypatch.setattr(dispatch, "triton_state", lambda: state)
    assert dispatch.why_not_triton(torch.float32, "cuda") == state[1]


@pytest.mark.parametrize("imported", ["triton", "monarch_rocm.kernels.bdmm"])
def test_interpreter_that_was_asked_for_too_late_is_named(imported):
    pytest.importorskip("triton", minversion="3.4")
    code = (
        f"import os, torch, {imported}, monarch_rocm\n"
        "os.environ['TRITON_INTERPRET'] = '1'\n"
        "monarch_rocm.MonarchLinear(64, 64, backend='triton')(torch.randn(3, 64))\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert "set it before Python starts" in done.stderr


def test_interpreted_bfloat16_warns(monkeypatch):
    pytest.importorskip("triton", minversion="3.4")
    monkeypatch.setattr(dispatch, "why_not_triton", lambda *args: None)
    with pytest.warns(UserWarning, match="raw bits of bfloat16"):
        dispatch._choose.__wrapped__("triton", torch.bfloat16, "cpu", True)


def test_environment_replaces_auto_and_only_auto(monkeypatch):
    monkeypatch.setenv("MONARCH_ROCM_BACKEND", "reference")
    assert plan(SHAPE, 1, torch.float32, "cpu").backend == "reference"
    assert plan(SHAPE, 1, torch.float32, "cpu", backend="torch").backend == "torch"
    called = []
    monkeypatch.setattr("monarch_rocm.reference.monarch_linear", lambda *args: called.append(1) or args[0])
    monarch_linear(*operands())
    assert called == [1]
    monkeypatch.setenv("MONARCH_ROCM_BACKEND", "")
    assert plan(SHAPE, 1, torch.float32, "cpu").backend == "torch"
    monkeypatch.setenv("MONARCH_ROCM_BACKEND", "hip")
    with pytest.raises(ValueError, match="MONARCH_ROCM_BACKEND='hip'"):
        monarch_linear(*operands())


@pytest.mark.parametrize("tokens", [-1, 1.5])
def test_plan_refuses_impossible_tokens(tokens):
    with pytest.raises((TypeError, ValueError), match="tokens"):
        plan(SHAPE, tokens)


@pytest.mark.parametrize(
    ("what", "dtype", "said"),
    [(torch.nn.Linear(3, 3), None, "Linear"), (SHAPE, "float16", "float16"), (SHAPE, torch.int32, "int32")],
)
def test_plan_refuses_what_no_layer_is(what, dtype, said):
    with pytest.raises(TypeError, match=said):
        plan(what, 5, dtype)


@pytest.mark.skipif(dispatch.why_not_triton(torch.float32, DEVICE) is not None, reason="no Triton")
def test_plan_names_kernel_file_and_values():
    chosen = plan(SHAPE, 100, torch.float32, DEVICE, backend="triton")
    assert chosen.backend == "triton"
    assert [kernel["kernel"] for kernel in chosen.kernels] == ["bdmm", "bdmm", "interleave"]
    for kernel in chosen.kernels:
        assert kernel["file"].name == f"{kernel['kernel']}.json"
        assert kernel["BT"] >= 1
    assert plan(SHAPE, 0, torch.float32, DEVICE).backend


def test_auto_leaves_numbers_of_tokens_that_hidden_features_cannot_be_loaded_wide_for(monkeypatch):
    pytest.importorskip("triton", minversion="3.4")
    from monarch_rocm.kernels import tuning

    row = {"max": {}, "config": {"BT": 64}, "wins": True}
    monkeypatch.setattr(tuning, "lookup", lambda *args: row)
    tuning.refresh()
    for tokens, kernel in ((48, "bdmm"), (47, None), (16, "bdmv"), (15, "bdmv")):
        found = dispatch.product_for("auto", torch.float16, torch.device("cpu"), 64, 64, tokens)
        assert (found and found.kernel) == kernel
    assert dispatch.product_for("triton", torch.float16, torch.device("cpu"), 64, 64, 47).kernel == "bdmm"
    tuning.refresh()


@pytest.mark.parametrize(("nblocks", "out_features"), [((4, 1), 24), ((2, 12), 12), (1, 20)])
def test_outputs_that_stay_in_order_go_through_no_pass(nblocks, out_features, monkeypatch):
    """With one output block, or blocks of one output, the layouts are one, and no copy is made."""
    monkeypatch.setattr(dispatch, "interleave", None)
    layer = MonarchLinear(16, out_features, nblocks=nblocks, rank=2, device=DEVICE, dtype=torch.float64)
    assert layer.shape.layout == "interleaved"
    x = torch.randn(5, 16, device=DEVICE, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    torch.testing.assert_close(y, x @ layer.weight.mT + layer.bias)
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(dx, 2 * y @ layer.weight)
    assert "transposing copy" not in str(plan(layer, 5))


def test_a_layer_of_one_block_is_two_plain_products(monkeypatch):
    """Low rank costs the host no more than two `nn.Linear`; other layers stay products of batches."""
    monkeypatch.setattr(torch, "bmm", None)
    for bias in (True, False):
        layer = MonarchLinear(16, 20, nblocks=1, rank=3, bias=bias, device=DEVICE, dtype=torch.float64)
        x = torch.randn(2, 5, 16, device=DEVICE, dtype=torch.float64)
        with torch.no_grad():
            torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
    assert [each["op"] for each in plan(layer, 10).kernels] == ["linear", "linear"]
    with pytest.raises(TypeError), torch.no_grad():
        MonarchLinear(16, 20, nblocks=2, device=DEVICE, dtype=torch.float64)(x)
