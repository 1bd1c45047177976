"""The registered ops: autograd of any order, transforms, compile, export, and what each gradient costs."""

import copy
import io
import itertools

import pytest
import torch
from support import (
    DEVICE,
    assert_within_budget,
    by_layout,
    dense_weight,
    make_operands,
    make_shape,
    run,
    run_dense,
)
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from monarch_rocm import MonarchConfig, MonarchLinear, MonarchShape, monarch_linear, monarchize, ops
from monarch_rocm.dispatch import kernels, why_not_triton

SHAPE = (7, 5, (2, 3), None)
BACKENDS = ["torch", "reference"]
if why_not_triton(torch.float32, DEVICE) is None:
    BACKENDS.append("triton")
by_backend = pytest.mark.parametrize("backend", BACKENDS)
pytestmark = pytest.mark.filterwarnings("ignore:a Monarch layer")


def layer(backend="torch", dtype=torch.float64, **kwargs):
    return MonarchLinear(7, 5, dtype=dtype, device=DEVICE, nblocks=(2, 3), backend=backend, **kwargs)


def call(backend="torch", layout="interleaved"):
    return lambda x, w1, w2, b: monarch_linear(
        x, w1, w2, b, in_features=7, out_features=5, layout=layout, backend=backend
    )


@pytest.mark.parametrize("backend", ["torch", "reference"])
@by_layout
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_gradients_of_first_and_second_order(backend, layout, dtype):
    operands = make_operands(make_shape(SHAPE, layout), torch.float64, (2, 3))
    if dtype.is_complex:
        operands = [(t.detach() * torch.exp(1j * torch.rand_like(t))).requires_grad_() for t in operands]
    assert torch.autograd.gradcheck(call(backend, layout), operands)
    assert torch.autograd.gradgradcheck(call(backend, layout), operands)


@pytest.mark.slow
@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton is not installed")
def test_second_order_through_the_kernels_equals_the_reference():
    def second(backend, dtype=torch.float32):
        operands = make_operands(make_shape(SHAPE), torch.float32, (4,))
        x, w1, w2, bias = (t.detach().to(dtype).requires_grad_() for t in operands)
        y = call(backend)(x, w1, w2, bias)
        first = torch.autograd.grad(y.pow(2).sum(), (x, w1, w2), create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in first), (x, w1, w2, bias))

    found = second("triton"), second("reference"), second("reference", torch.float64)
    for name, *values in zip(("x", "blkdiag1", "blkdiag2", "bias"), *found, strict=True):
        assert_within_budget(name, *values, depth=7)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "reference"])
@by_layout
def test_opcheck(backend, layout):
    dtype = torch.float32
    shape = make_shape(SHAPE, layout)
    x, w1, w2, b = (t.detach() for t in make_operands(shape, dtype, (2, 3)))
    hidden = shape.K * shape.Q
    registered = torch.ops.monarch_rocm
    torch.library.opcheck(registered.linear, (x, w1, w2, b, 5, layout, True, backend))
    torch.library.opcheck(registered.linear, (x, w1, w2, b, 5, layout, False, backend))
    torch.library.opcheck(registered.stage, (x, w1, hidden, 1, 1, True, backend))
    torch.library.opcheck(registered.stage, (x, w1, hidden, 1, 1, False, backend))
    h = torch.randn(2, 3, hidden, device=DEVICE)
    torch.library.opcheck(registered.stage_wgrad, (h, x, *shape.factor1, 1, 1, backend))
    for matrix in ((2, 4, 7), (1, 7, 7), (7, 1, 7), (4, 2, 8)):
        torch.library.opcheck(registered.interleave, (x, *matrix, backend))
        torch.library.opcheck(registered.interleave, (x[:0], *matrix, backend))
    torch.library.opcheck(registered.linear, (x[:0], w1, w2, b, 5, layout, True, backend))


@by_backend
def test_vmap_of_grad_gives_gradients_by_sample(backend):
    module = layer(backend, torch.float32)
    x = torch.randn(3, 4, 7, device=DEVICE)
    params = {k: v.detach() for k, v in module.named_parameters()}

    def loss(params, x):
        return torch.func.functional_call(module, params, (x,)).pow(2).sum()

    got = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x)
    plain = copy.deepcopy(module)
    plain.backend = "reference"
    for i in range(3):
        ones = []
        for each in (plain, copy.deepcopy(plain).double()):
            each.zero_grad()
            each(x[i].to(each.bias.dtype)).pow(2).sum().backward()
            ones.append({name: parameter.grad for name, parameter in each.named_parameters()})
        for name in params:
            assert_within_budget(name, got[name][i], *(one[name] for one in ones), depth=7)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_jacrev_is_the_weight(backend):
    module = layer(backend)
    x = torch.randn(7, dtype=torch.float64, device=DEVICE)
    torch.testing.assert_close(torch.func.jacrev(module)(x), module.weight)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_vmap_over_layers(backend):
    modules = [layer(backend) for _ in range(3)]
    params, _ = torch.func.stack_module_state(modules)
    x = torch.randn(4, 7, dtype=torch.float64, device=DEVICE)
    got = torch.func.vmap(lambda p: torch.func.functional_call(modules[0], p, (x,)))(params)
    torch.testing.assert_close(got, torch.stack([module(x) for module in modules]))


@by_backend
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_many_gradients_in_one_pass_are_each_right(backend):
    """`is_grads_batched`, and with it the vectorized `jacobian` and `hessian`, as for `nn.Linear`."""
    module = layer(backend, torch.float32)
    x = torch.randn(4, 7, device=DEVICE, requires_grad=True)
    wanted = (x, *module.parameters())
    y, grads = module(x), torch.randn(3, 4, 5, device=DEVICE)
    found = torch.autograd.grad(y, wanted, grads, is_grads_batched=True, retain_graph=True)
    for i, grad in enumerate(grads):
        one = torch.autograd.grad(y, wanted, grad, retain_graph=True)
        torch.testing.assert_close([each[i] for each in found], list(one))
    functions = torch.autograd.functional
    jacobian = functions.jacobian(module, x[0].detach(), vectorize=True)
    factors = module.blkdiag1.detach(), module.blkdiag2.detach()
    plain, exact = (
        dense_weight(*(t.to(dtype) for t in factors), "interleaved")[:5, :7]
        for dtype in (torch.float32, torch.float64)
    )
    assert_within_budget("jacobian", jacobian, plain, exact, depth=7)

    class Back(torch.autograd.Function):
        """A layer that a backward pass calls."""

        @staticmethod
        def forward(ctx, x):
            return x.new_empty(4, 7)

        @staticmethod
        def backward(ctx, dy):
            return module(dy)

    grads = torch.randn(3, 4, 7, device=DEVICE)
    for enabled in () if backend == "reference" else (False, True):  # whose einsum such gradients cannot pass
        z = torch.zeros(4, 5, device=DEVICE, requires_grad=True)
        found = torch.autograd.grad(Back.apply(z), z, grads, is_grads_batched=True, create_graph=enabled)
        torch.testing.assert_close(found, (module(grads),))
    if backend == "triton":
        return  # the same ops, whose kernels the interpreter runs too slowly

    def cubes(*operands):
        return call(backend)(*operands).pow(3).sum()

    operands = tuple(t.detach() for t in make_operands(make_shape(SHAPE), torch.float64, (2,)))
    found, exact = (functions.hessian(cubes, operands, vectorize=vectorize) for vectorize in (True, False))
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("no_grad", [False, True])
def test_forward_mode_raises_rather_than_answer_zero(no_grad):
    module = layer().requires_grad_(not no_grad)
    x = torch.randn(2, 7, dtype=torch.float64, device=DEVICE)
    with torch.set_grad_enabled(not no_grad), pytest.raises(NotImplementedError):
        torch.func.jvp(module, (x,), (x,))
    with torch.autograd.forward_ad.dual_level(), torch.set_grad_enabled(not no_grad):
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(NotImplementedError):
            module(dual)


def test_forward_mode_raises_for_exported_layers_too():
    module = layer().requires_grad_(False)
    x = torch.randn(3, 7, dtype=torch.float64, device=DEVICE)
    exported = torch.export.export(module, (x,)).module()
    with pytest.raises(NotImplementedError):
        torch.func.jvp(exported, (x,), (x,))


def test_vmap_of_grad_over_an_empty_batch():
    module = layer()
    params = {name: value.detach() for name, value in module.named_parameters()}
    x = torch.randn(0, 7, dtype=torch.float64, device=DEVICE)

    def loss(params, x):
        return torch.func.functional_call(module, params, (x,)).sum()

    got = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x)
    assert {name: g.shape for name, g in got.items()} == {n: (0, *p.shape) for n, p in params.items()}


def test_compiled_layers_do_not_guard_on_the_environment(monkeypatch):
    torch.compiler.reset()
    module = torch.compile(MonarchLinear(8, 8, nblocks=2, device=DEVICE), fullgraph=True, backend="eager")
    x = torch.randn(3, 8, device=DEVICE)
    exact = module(x)
    with torch.compiler.set_stance("fail_on_recompile"):
        monkeypatch.setenv("MONARCH_ROCM_BACKEND", "reference")
        assert torch.equal(module(x), exact)


@by_backend
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
def test_compile_without_graph_breaks_for_any_batch(backend, autocast):
    torch.compiler.reset()  # Dynamo counts recompilations of one forward over all tests
    module = layer(backend, torch.float32)
    compiled = torch.compile(copy.deepcopy(module), fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (2, 5, 9):
        x = torch.randn(tokens, 7, device=DEVICE)
        results = []
        for one in (module, compiled):
            x = x.detach().requires_grad_()
            with torch.autocast(DEVICE, autocast, enabled=autocast is not None):
                y = one(x)
            y.float().sum().backward()
            results.append((y, x.grad, one.blkdiag1.grad, one.blkdiag2.grad, one.bias.grad))
        for eager, fast in zip(*results, strict=True):
            assert eager.dtype == fast.dtype
            torch.testing.assert_close(fast, eager)


@by_layout
def test_sizes_that_vary_compile_without_graph_breaks(layout):
    """Found by fuzzing: given in_features and out_features that are not known while compiling failed."""
    torch.compiler.reset()

    def padded(x, w1, w2, bias):
        sizes = {"in_features": x.shape[-1], "out_features": bias.shape[0]}
        return monarch_linear(x, w1, w2, bias, **sizes, layout=layout)

    compiled = torch.compile(padded, fullgraph=True, dynamic=True, backend="aot_eager")
    for sizes in (SHAPE, (11, 14, (2, 3), None)):
        operands = make_operands(make_shape(sizes, layout), torch.float64)
        y = compiled(*operands)
        torch.testing.assert_close(y, padded(*operands))
        got, wanted = (torch.autograd.grad(out.sum(), operands) for out in (y, padded(*operands)))
        torch.testing.assert_close(got, wanted)


@pytest.mark.slow
def test_compile_with_inductor():
    module = layer("torch", torch.float32)
    model = torch.nn.Sequential(module, torch.nn.GELU())
    x = torch.randn(6, 7, device=DEVICE, requires_grad=True)
    try:
        y = torch.compile(model, fullgraph=True)(x)
    except torch._inductor.exc.InductorError as error:
        pytest.skip(f"no compiler for Inductor: {error}")
    torch.testing.assert_close(y, model(x))
    (got,) = torch.autograd.grad(y.sum(), x)
    (exact,) = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(got, exact)


@pytest.mark.parametrize(("widths", "nblocks"), [((12, 12, 12), 1), ((12, 4, 12), 4), ((12, 12, 12), 2)])
def test_ops_return_tensors_of_their_own(widths, nblocks):
    """Also where interleaving moves nothing: a compiler may write over an op's input afterwards."""
    x = torch.randn(4, 12, device=DEVICE)
    for rows, columns in ((1, 12), (12, 1), (3, 4)):
        y = torch.ops.monarch_rocm.interleave(x, rows, columns, 12, "torch")
        assert y.data_ptr() != x.data_ptr()
    layers = [MonarchLinear(a, b, nblocks=nblocks, device=DEVICE) for a, b in itertools.pairwise(widths)]
    model = torch.nn.Sequential(layers[0], torch.nn.GELU(), layers[1])
    grad = torch.randn(4, 12, device=DEVICE)
    kept = grad.clone()
    (dx,) = torch.autograd.grad(model(x.requires_grad_()), x, grad)
    dx.mul_(5)
    assert torch.equal(grad, kept)


@pytest.mark.slow
@pytest.mark.parametrize(("widths", "nblocks"), [((12, 12, 12), 1), ((12, 4, 12), 4), ((12, 12, 12), 2)])
def test_gradients_compiled_with_inductor(widths, nblocks):
    layers = [
        MonarchLinear(a, b, nblocks=nblocks, device=DEVICE, dtype=torch.float64, backend="torch")
        for a, b in itertools.pairwise(widths)
    ]
    model = torch.nn.Sequential(layers[0], torch.nn.GELU(), layers[1])
    x = torch.randn(64, 12, dtype=torch.float64, device=DEVICE)

    def gradients(f):
        return torch.autograd.grad((f(x).sin() ** 2).sum(), list(model.parameters()))

    torch.compiler.reset()
    try:
        got = gradients(torch.compile(model))
    except torch._inductor.exc.InductorError as error:
        pytest.skip(f"no compiler for Inductor: {error}")
    for one, two in zip(got, gradients(model), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.filterwarnings("ignore")
def test_trace_of_a_frozen_layer_takes_any_batch():
    module = layer().eval().requires_grad_(False)
    x = torch.randn(5, 7, dtype=torch.float64, device=DEVICE)
    with torch.no_grad():
        traced = torch.jit.trace(module, x[:3], check_trace=False)
        assert torch.equal(traced(x), module(x))


@by_backend
def test_export_keeps_the_op_and_any_batch(backend):
    module = layer(backend, torch.float32)
    x = torch.randn(4, 7, device=DEVICE)
    exported = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    if backend != "reference":
        assert "monarch_rocm.linear" in str(exported.graph)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    x = torch.randn(9, 7, device=DEVICE)
    loaded = torch.export.load(file).module()
    torch.testing.assert_close(loaded(x), module(x))
    loaded(x).sum().backward()
    module(x).sum().backward()
    torch.testing.assert_close(loaded.blkdiag1.grad, module.blkdiag1.grad)


def test_fx_symbolic_trace_keeps_one_call():
    model = torch.nn.Sequential(layer(), torch.nn.ReLU())
    traced = torch.fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [monarch_linear]
    x = torch.randn(4, 7, dtype=torch.float64, device=DEVICE)
    assert torch.equal(traced(x), model(x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    module = layer()
    x = torch.randn(3, 7, dtype=torch.float64, device=DEVICE, requires_grad=True)
    y = torch.randn(3, 5, dtype=torch.float64, device=DEVICE)
    exact = torch.autograd.grad(module(x), (x, *module.parameters()), y)
    checkpoint(module, x, use_reentrant=reentrant).backward(y)
    for got, wanted in zip((x, *module.parameters()), exact, strict=True):
        assert torch.equal(got.grad, wanted)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_flops_of_a_forward_are_twice_tokens_times_parameters(backend):
    module = layer(backend)
    x = torch.randn(2, 3, 7, dtype=torch.float64, device=DEVICE, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        y = module(x)
    forward = 2 * 6 * module.shape.num_parameters
    assert counter.get_total_flops() == forward
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == 2 * forward


@pytest.mark.parametrize(
    ("frozen", "launches"),
    [
        ((), ["stage_wgrad", "stage", "stage_wgrad", "stage"]),
        (("blkdiag1",), ["stage_wgrad", "stage", "stage"]),
        (("blkdiag2",), ["stage", "stage_wgrad", "stage"]),
        (("x",), ["stage_wgrad", "stage", "stage_wgrad"]),
        (("x", "blkdiag1"), ["stage_wgrad"]),
        (("blkdiag1", "blkdiag2"), ["stage", "stage"]),
        (("x", "blkdiag1", "blkdiag2"), []),
    ],
    ids=str,
)
def test_only_wanted_gradients_are_computed(frozen, launches, monkeypatch):
    module = layer()
    x = torch.randn(3, 7, dtype=torch.float64, device=DEVICE, requires_grad="x" not in frozen)
    for name in frozen:
        if name != "x":
            getattr(module, name).requires_grad_(False)
    y = module(x)
    seen = []
    for name in ("stage", "stage_wgrad"):
        real = getattr(ops.dispatch, name)
        monkeypatch.setattr(
            ops.dispatch, name, lambda *a, name=name, real=real: (seen.append(name), real(*a))[1]
        )
    y.sum().backward()
    assert seen == launches
    assert module.bias.grad is not None


def test_frozen_layer_saves_neither_input_nor_hidden_features():
    def saved(module, x):
        tensors = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: tensors.append(t.shape) or t, lambda t: t):
            module(x)
        return tensors

    module = layer()
    x = torch.randn(3, 7, dtype=torch.float64, device=DEVICE, requires_grad=True)
    hidden = module.shape.K * module.shape.Q
    assert sorted(saved(module, x)) == sorted(
        [x.shape, (3, hidden), module.shape.factor1, module.shape.factor2]
    )
    module.requires_grad_(False)
    assert sorted(saved(module, x)) == sorted([module.shape.factor1, module.shape.factor2])
    assert saved(module, x.detach()) == []


@pytest.mark.parametrize(
    ("wanted", "saved"),
    [
        ("x", "blkdiag1 blkdiag2"),
        ("blkdiag1", "x blkdiag2"),
        ("blkdiag2", "h"),
        ("x blkdiag2", "blkdiag1 blkdiag2 h"),
        ("blkdiag1 blkdiag2", "x blkdiag1 blkdiag2 h"),
        ("x blkdiag1 blkdiag2", "x blkdiag1 blkdiag2 h"),
    ],
)
def test_only_what_gradients_need_is_saved(wanted, saved):
    x, w1, w2, _ = make_operands(make_shape((12, 18, 3, None)), torch.float32)
    operands = {"x": x, "blkdiag1": w1, "blkdiag2": w2}
    for name, tensor in operands.items():
        tensor.requires_grad_(name in wanted.split())
    names = {tensor.data_ptr(): name for name, tensor in operands.items()}
    found = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: found.append(names.get(tensor.data_ptr(), "h")), lambda _: None
    )
    with hooks:
        monarch_linear(x, w1, w2)
    assert sorted(found) == sorted(saved.split())


@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "reference"])
def test_recompute_keeps_no_hidden_features_and_changes_no_gradient(backend):
    def gradients(recompute):
        saved = []
        x, *factors = (t.clone().requires_grad_() for t in operands)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
            y = monarch_linear(x, *factors, backend=backend, recompute=recompute)
        return torch.autograd.grad(y.square().sum(), (x, *factors), create_graph=True), saved

    shape = MonarchShape(18, 12, 3)
    operands = [torch.randn(size, device=DEVICE) for size in ((5, 18), shape.factor1, shape.factor2)]
    kept, saved = gradients(False)
    computed, less = gradients(True)
    assert all(torch.equal(a, b) for a, b in zip(kept, computed, strict=True))
    hidden = (5, shape.K * shape.Q)
    assert hidden in saved
    assert sorted(less) == sorted(size for size in saved if size != hidden)
    assert MonarchLinear(12, 18, nblocks=3, recompute=True).recompute
    assert MonarchLinear.from_linear(torch.nn.Linear(12, 18), nblocks=3, recompute=True).recompute
    model, _ = monarchize(torch.nn.Linear(12, 18), MonarchConfig(nblocks=3, recompute=True))
    assert model.recompute


def test_compiled_inference_keeps_no_hidden_features(monkeypatch):
    asked = []
    real = ops._dispatch.linear
    monkeypatch.setattr(ops._dispatch, "linear", lambda *args: asked.append(args[6]) or real(*args))
    module, x = MonarchLinear(12, 18, nblocks=3), torch.randn(5, 12)
    compiled = torch.compile(module, backend="aot_eager")
    with torch.no_grad():
        compiled(x)
    compiled(x).sum().backward()
    assert asked == [False, True]


def test_change_of_the_input_after_the_forward_raises():
    module = layer()
    for make in (lambda: torch.randn(3, 7), lambda: torch.randn(2, 3, 7), lambda: torch.randn(7)):
        x = make().to(DEVICE, torch.float64)
        y = module(x)
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@by_backend
@pytest.mark.parametrize("nblocks", [1, 2], ids=str)
def test_a_minus_sign_that_a_view_has_yet_to_apply_is_applied(backend, nblocks):
    """As in `x.conj().imag`, also of gradients that come through complex numbers: kernels read memory."""

    def lazy(t):
        view = torch.complex(torch.zeros_like(t), -t).conj().imag
        assert view.is_neg()
        return view

    shape = MonarchShape(16, 12, nblocks, rank=2)
    operands = make_operands(shape, torch.float32)
    views = [lazy(t.detach()).requires_grad_() for t in operands]
    grad = torch.randn(9, 12, device=DEVICE)
    plain, exact = run(shape, operands, "reference", grad), run_dense(shape, operands, grad)
    with torch.no_grad():
        inference = [monarch_linear(*views, backend=backend)]
    for got in (inference, run(shape, views, backend, grad), run(shape, operands, backend, lazy(grad))):
        for name, *values in zip(("y", "x", "blkdiag1", "blkdiag2", "bias"), got, plain, exact, strict=False):
            assert_within_budget(name, *values, depth=16)


def test_ops_have_no_reference_backend():
    x, w1, w2, b = (t.detach() for t in make_operands(make_shape(SHAPE), torch.float32, (2,)))
    with pytest.raises(ValueError, match="no backend 'reference'"):
        torch.ops.monarch_rocm.linear(x, w1, w2, b, 5, "blocked", True, "reference")


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton is not installed")
def test_frozen_factors_launch_no_weight_gradient_kernel(monkeypatch):
    module = layer("triton", torch.float32).requires_grad_(False)
    monkeypatch.setattr(kernels().bdmm_wgrad, "bdmm_wgrad", None)
    x = torch.randn(3, 7, device=DEVICE, requires_grad=True)
    module(x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference(mode):
    module = layer()
    x = torch.randn(3, 7, dtype=torch.float64, device=DEVICE)
    with mode():
        y = module(x)
    assert torch.equal(y, module(x))
    assert not y.requires_grad
