"""Layers under `torch.compile`: products in the place of ops, where batched products would run anyway."""

from unittest import mock

import pytest
import torch
from support import DEVICE, SHAPES, by_layout, make_operands, make_shape, run, shape_id
from torch._dynamo.backends.common import aot_autograd

from monarch_rocm import MonarchLinear, decompositions, dispatch, monarch_linear


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """Also on the CPU, where ops otherwise stay."""
    monkeypatch.setattr(decompositions, "OPAQUE", ())
    torch.compiler.reset()


def traced(function):
    """`function` compiled, and the ops of all graphs that this made so far, by name."""
    found = []

    def note(graph, _):
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    return torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=note)), found


def ours(found):
    return {name for name in found if name.startswith("monarch_rocm")}


def products(found):
    return sum(name == "aten.bmm.default" for name in found)


@by_layout
@pytest.mark.parametrize("sizes", SHAPES[1::3], ids=shape_id)
def test_outputs_and_gradients_are_those_of_the_ops(sizes, layout):
    """Float64, by PyTorch's batched products alone: two forward, four for the gradients."""
    shape = make_shape(sizes, layout)
    operands = make_operands(shape, torch.float64, (3, 4))
    grad = torch.randn(3, 4, shape.out_features, dtype=torch.float64, device=DEVICE)
    compiled, found = traced(
        lambda *operands: monarch_linear(
            *operands, in_features=shape.in_features, out_features=shape.out_features, layout=layout
        )
    )
    y = compiled(*operands)
    got = [y.detach(), *torch.autograd.grad(y, operands, grad)]
    for one, other in zip(got, run(shape, operands, "auto", grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert y.is_contiguous()
    if shape.R > 1:  # else a backward product looks like a recomputed one
        assert not ours(found)
        assert products(found) == 6
    assert not any("zeros" in name for name in found)


def test_ops_that_run_a_kernel_stay():
    """Traced as for a GPU whose tables say that kernels win."""
    compiled, found = traced(MonarchLinear(16, 16, nblocks=4, device="meta"))
    kernel = dispatch.Product("bdmm", None, {})
    with (
        mock.patch.object(dispatch, "route", return_value=dispatch.Route(None, None, kernel, kernel)),
        mock.patch.object(dispatch, "product_for", return_value=kernel),
        mock.patch.object(dispatch, "config_for", return_value={}),
        pytest.raises(KeyError, match="BO"),  # when it runs, of the empty config
    ):
        compiled(torch.empty(3, 16, device="meta")).sum().backward()
    assert ours(found) == {f"monarch_rocm.{op}.default" for op in ("linear", "stage", "stage_wgrad")}
    assert not products(found)


@torch.no_grad()
def test_ops_stay_where_tokens_are_not_known():
    module = MonarchLinear(16, 16, nblocks=4, device=DEVICE)
    compiled, found = traced(module)
    for tokens in (3, 5, 7):
        x = torch.randn(tokens, 16, device=DEVICE)
        torch.testing.assert_close(compiled(x), module(x))
    assert products(found) == 2  # of the first compilation, for three tokens alone
    assert found.count("monarch_rocm.linear.default") == 1


def test_exported_programs_keep_the_op():
    """They may run elsewhere than where they were traced; also after something was compiled."""
    module = MonarchLinear(16, 16, nblocks=4, device=DEVICE)
    x = torch.randn(3, 16, device=DEVICE)
    traced(module)[0](x)
    program = torch.export.export(module, (x,), strict=False)
    assert ours(str(node.target) for node in program.graph.nodes) == {"monarch_rocm.linear.default"}


def test_recomputed_hidden_features_are_computed_twice():
    """By an op in the backward graph: of two equal products the compiler would keep the first."""
    module = MonarchLinear(16, 16, nblocks=4, bias=False, recompute=True, device=DEVICE)
    compiled, found = traced(module)
    x = torch.randn(3, 16, device=DEVICE, requires_grad=True)
    grads = torch.autograd.grad(compiled(x).sum(), (x, *module.parameters()))
    for got, wanted in zip(
        grads, torch.autograd.grad(module(x).sum(), (x, *module.parameters())), strict=True
    ):
        torch.testing.assert_close(got, wanted)
    assert products(found) == 6
    assert ours(found) == {"monarch_rocm.stage.default"}


def test_autotuned_ops_stay(monkeypatch):
    """MONARCH_ROCM_AUTOTUNE=1 measures ops when they run."""
    monkeypatch.setenv("MONARCH_ROCM_AUTOTUNE", "1")
    compiled, found = traced(MonarchLinear(16, 16, nblocks=4, device=DEVICE))
    compiled(torch.randn(3, 16, device=DEVICE))
    assert ours(found) == {"monarch_rocm.linear.default"}


@pytest.mark.skipif(DEVICE != "cpu", reason="about the CPU")
def test_ops_stay_on_the_cpu(monkeypatch):
    """There `batched` chooses other orders in memory, which the compiler would not."""
    monkeypatch.undo()
    compiled, found = traced(MonarchLinear(16, 16, nblocks=4))
    compiled(torch.randn(3, 16))
    assert ours(found) == {"monarch_rocm.linear.default"}
