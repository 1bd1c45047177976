"""Layers under `torch.compile`: products in the place of ops, where batched products would run anyway."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from support import DEVICE, SHAPES, by_layout, make_operands, make_shape, run, shape_id
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd

from monarch_rocm import MonarchLinear, decompositions, dispatch, monarch_linear
from monarch_rocm.ops import Linear

pytestmark = pytest.mark.skipif(not decompositions.TELLS_EXPORTS, reason="ops stay in PyTorch 2.6")


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


@by_layout
def test_strides_of_inputs_and_gradients_change_nothing(layout):
    """As of gradients that come through a sum, a cat or a transpose."""
    operands = make_operands(make_shape((10, 33, 4, 2), layout), torch.float64, (6,))
    ways = (
        (lambda x: x, lambda y: y.sum()),
        (lambda x: x.t().contiguous().t(), lambda y: torch.cat([y, y.detach()], 1).pow(2).sum()),
        (lambda x: x[:1].expand_as(x), lambda y: (y.t().contiguous() ** 2).sum()),
        (lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2], lambda y: y[:, 5].sum()),
    )
    for begin, end in ways:

        def loss(x, *factors, begin=begin, end=end):
            sizes = {"in_features": 10, "out_features": 33, "layout": layout}
            return end(monarch_linear(begin(x), *factors, **sizes))

        torch.compiler.reset()  # Dynamo counts compilations of one function
        compiled, found = traced(loss)
        got = torch.autograd.grad(compiled(*operands), operands)
        assert not ours(found)
        for one, exact in zip(got, torch.autograd.grad(loss(*operands), operands), strict=True):
            torch.testing.assert_close(one, exact, rtol=1e-12, atol=1e-12)


def test_ops_that_run_a_kernel_stay():
    """Traced as for a GPU whose tables say that kernels win."""
    compiled, found = traced(MonarchLinear(16, 16, nblocks=4, device="meta"))
    kernel = dispatch.Product("bdmm", None, {})
    with (
        mock.patch.object(dispatch, "route", return_value=dispatch.Route(None, None, kernel, kernel)),
        mock.patch.object(dispatch, "product_for", return_value=kernel),
        mock.patch.object(dispatch, "config_for", return_value={}),
        pytest.raises((KeyError, TypeError), match=r"BO|not callable"),  # when it runs, of what it lacks
    ):
        compiled(torch.empty(3, 16, device="meta")).sum().backward()
    backward = {f"monarch_rocm.{op}.default" for op in ("stage", "stage_wgrad")}
    late = {"monarch_rocm.linear.default"}  # all that torch 2.8 compiles before the forward pass fails
    assert ours(found) in (late, late | backward)
    assert not products(found)


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_of_one_block_is_two_plain_products(bias):
    module = MonarchLinear(16, 20, nblocks=1, rank=3, bias=bias, device=DEVICE, dtype=torch.float64)
    for x in (torch.randn(2, 5, 16, dtype=torch.float64, device=DEVICE), torch.randn_like(module.weight)):
        torch.compiler.reset()
        compiled, found = traced(module)
        y = compiled(x)
        torch.testing.assert_close(y, module(x))
        assert y.is_contiguous()
        assert not ours(found)
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


def test_ops_stay_where_an_export_looks_like_a_compilation(monkeypatch):
    """As in PyTorch 2.6: what is exported would else hold the products of this device."""
    monkeypatch.setattr(decompositions, "TELLS_EXPORTS", False)
    module = MonarchLinear(16, 16, nblocks=4, device=DEVICE)
    x = torch.randn(3, 16, device=DEVICE)
    compiled, found = traced(module)
    torch.testing.assert_close(compiled(x), module(x))
    assert ours(found)
    assert not products(found)


def test_ops_of_layers_that_recompute_stay():
    """As products, the compiler would find that it has the hidden features already, and keep them."""
    module = MonarchLinear(16, 16, nblocks=4, bias=False, recompute=True, device=DEVICE)
    compiled, found = traced(module)
    x = torch.randn(3, 16, device=DEVICE, requires_grad=True)
    got, wanted = (
        torch.autograd.grad(run(x).square().sum(), (x, *module.parameters())) for run in (compiled, module)
    )
    torch.testing.assert_close(got, wanted)
    assert not products(found)
    assert found.count("monarch_rocm.stage.default") == 3  # the recomputed one, and both input gradients


def test_ops_stay_where_factors_vary():
    """Sizes that are not known while compiling cannot be looked up."""
    compiled, found = traced(lambda *operands: monarch_linear(*operands))
    for sizes in ((16, 16, 4, None), (24, 24, 4, None), (20, 36, 4, None)):
        operands = [
            t.detach() for t in make_operands(make_shape(sizes), torch.float64, (20,), bias=False)[:3]
        ]
        torch.testing.assert_close(compiled(*operands), monarch_linear(*operands))
    assert "monarch_rocm.linear.default" in ours(found)


def test_no_rows():
    module = MonarchLinear(16, 16, nblocks=4, device=DEVICE)
    compiled, found = traced(module)
    y = compiled(torch.randn(0, 16, device=DEVICE))
    y.sum().backward()
    assert y.shape == (0, 16)
    assert not products(found)
    assert all(not parameter.grad.any() for parameter in module.parameters())


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_transforms_inside_of_compiled_functions_are_right_or_refused(transform):
    module = MonarchLinear(10, 12, nblocks=(2, 3), device=DEVICE).double()
    x = torch.randn(4, 10, dtype=torch.float64, device=DEVICE)
    if transform == "vmap":
        function = torch.vmap(module)
        torch.testing.assert_close(torch.compile(function, backend="eager")(x), function(x))
    else:
        function = torch.func.grad(lambda x: module(x).square().sum())
        with pytest.raises(Exception, match=r"torch\.func has no gradients"):
            torch.compile(function, backend="eager", fullgraph=True)(x)


def test_second_derivatives_by_compiled_autograd():
    """Of a graph in which hidden features have a gradient of their own."""
    shape = make_shape((10, 12, (2, 3), None))
    operands = make_operands(shape, torch.float64, (4,))[:3]

    def twice(context):
        y, _ = Linear.apply(*operands, None, 12, "interleaved", True, "torch")
        (first,) = torch.autograd.grad(y.pow(3).sum(), operands[2], create_graph=True)
        for operand in operands:
            operand.grad = None
        with context:
            first.square().sum().backward()
        return [operand.grad for operand in operands]

    compiled = compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager"))
    torch.testing.assert_close(twice(compiled), twice(nullcontext()))


def test_marks_tell_config_tables_apart(monkeypatch):
    """Compiled graphs lie in caches on disk, under what stands in them."""
    tuning = dispatch.kernels().tuning
    before = decompositions._digest.__wrapped__(0)
    assert before == decompositions._digest.__wrapped__(1)
    monkeypatch.setattr(tuning, "own_table", lambda kernel, arch: (None, {"2": [kernel], "4": []}))
    assert before != decompositions._digest.__wrapped__(0)


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
