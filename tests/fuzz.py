"""Properties that must hold of any layer and of any damaged file, tried on what hypothesis thinks of.

`make fuzz` runs them for ten minutes, each time on new examples, and prints how many it ran;
`tests/test_fuzz.py` runs a few of them, the same ones every time.
"""

import argparse
import copy
import json
import math
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from sub_blocks import sub_blocks
from support import DEVICE, DTYPES, LAYOUTS, force, interpreter_mended, svd_budget
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from monarch_rocm import (
    MonarchConfig,
    MonarchLinear,
    MonarchShape,
    decompositions,
    dispatch,
    healing,
    interop,
    monarch_linear,
    monarch_weight,
    monarchize,
    project,
    restructure,
    structure,
)

NO_TRITON = dispatch.why_not_triton(torch.float32, DEVICE)
PATHS = ("staged", "batched", "fused", "few", "chained")
RUNS = [("torch", None), ("reference", None)] + ([] if NO_TRITON else [("triton", path) for path in PATHS])
WIDE = {torch.float64: torch.float64, torch.complex64: torch.complex128, torch.complex128: torch.complex128}
FEW_NUMBERS = 256  # below, errors have no statistics
VIEWS = {
    "plain": lambda t: t,
    "every second": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
    "features first": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
    "cut out": lambda t: torch.cat([torch.full_like(t, math.nan), t], -1)[..., t.shape[-1] :],
    "one row": lambda t: t[:1].expand_as(t),
    "one number": lambda t: t.flatten()[:1].as_strided(t.shape, [0] * t.ndim) if t.numel() else t,
    # A conjugate, or a minus sign, that is still to be applied, as in `x.conj().imag`.
    "lazy": lambda t: t.conj().resolve_conj().conj() if t.is_complex() else torch._neg_view(-t),
}
counted: Counter = Counter()


@st.composite
def shapes(draw, most=40):
    """Any geometry: widths that blocks do not divide, more blocks than features, ranks above and below."""
    size = st.integers(1, most)
    some, one = st.integers(1, 7), st.just(1)
    pairs = (st.tuples(some, some), st.tuples(some, one), st.tuples(one, some))
    nblocks = st.one_of(one, st.integers(1, 9), *pairs)
    rank = st.one_of(st.none(), st.integers(1, 5))
    powers = st.tuples(
        st.sampled_from([16, 32, 64]), st.sampled_from([16, 32, 64]), st.sampled_from([1, 2, 4])
    )
    layout = draw(st.sampled_from(LAYOUTS))
    if draw(st.integers(0, 3)) == 0:  # sizes that `fused` takes
        wide, high, blocks = draw(powers)
        return MonarchShape(wide, high, blocks, None, layout)
    blocks = draw(nblocks)
    outputs = st.integers(1, blocks if isinstance(blocks, int) else blocks[1])  # blocks of one output
    out_features = draw(st.one_of(size, size, outputs))
    return MonarchShape(draw(size), out_features, blocks, draw(rank), layout)


@st.composite
def layers(draw):
    backend, path = draw(st.sampled_from(RUNS))
    dtypes = DTYPES if backend == "triton" else [*DTYPES, *WIDE]
    tokens = st.integers(0, 16 if path == "few" else 40)
    lead = draw(st.one_of(st.tuples(tokens), st.just(()), st.tuples(st.integers(0, 3), st.integers(0, 5))))
    names = ("x", "blkdiag1", "blkdiag2", "bias", "grad")
    return {
        "shape": draw(shapes()),
        "backend": backend,
        "path": path,
        "dtype": draw(st.sampled_from(dtypes)),
        "lead": lead,
        "bias": draw(st.booleans()),
        "views": {name: draw(st.sampled_from(sorted(VIEWS))) for name in names},
        "wanted": draw(st.sets(st.sampled_from(names[:4]))),
        "recompute": draw(st.booleans()),
        "way": draw(st.one_of(st.just("eager"), st.sampled_from(sorted(WAYS)))),
        "seed": draw(st.integers(0, 2**16)),
    }


class Marked(torch.Tensor):
    """A subclass that changes nothing."""


def within(context):
    """Call a layer in a context."""

    def way(ours, case):
        def call(*given):
            with context():
                return ours(*given)

        return call

    return way


def in_place(ours, case):
    """Outputs belong to the caller, who may write over them."""
    return lambda *given: ours(*given).add_(0)


def of_subclass(ours, case):
    def call(*given):
        y = ours(*(None if t is None else t.as_subclass(Marked) for t in given))
        assert type(y) is Marked
        return y.as_subclass(torch.Tensor)

    return call


def in_autocast(ours, case):
    """Wider operands, which autocast rounds; float64 and complex numbers stay as they are."""
    low = case["dtype"] in (torch.bfloat16, torch.float16)
    if case["dtype"] == torch.float32:
        return ours

    def call(*given):
        with torch.autocast(DEVICE, case["dtype"] if low else torch.bfloat16):
            return ours(*(t.float() if low and t is not None else t for t in given))

    return call


def mapped(ours, case):
    """By `vmap` over the innermost tokens."""

    def call(x, *rest):
        if x.ndim == 1:
            return ours(x, *rest)
        axis = x.ndim - 2
        return torch.vmap(ours, (axis, None, None, None), axis)(x, *rest).contiguous()

    return call


def mapped_layers(ours, case):
    """By `vmap` over tokens that have a layer each."""

    def call(x, *rest):
        if x.ndim == 1:
            return ours(x, *rest)
        layers = (None if t is None else t.expand(len(x), *t.shape) for t in rest)
        return torch.vmap(ours, (0, 0, 0, 0 if rest[-1] is not None else None))(x, *layers).contiguous()

    return call


def compiled(ours, case):
    def call(*given):
        torch.compiler.reset()
        dynamic = bool(case["seed"] % 2) or None
        return torch.compile(ours, fullgraph=True, dynamic=dynamic, backend="aot_eager")(*given)

    return call


class Held(nn.Module):
    def __init__(self, ours, operands):
        super().__init__()
        self.ours, self.operands = ours, operands

    def forward(self, x):
        return self.ours(x, *self.operands)


def exported(ours, case):
    return lambda x, *rest: torch.export.export(Held(ours, rest), (x,), strict=False).module()(x)


def traced(ours, case):
    return lambda *given: make_fx(ours)(*given)(*given)


def checkpointed(ours, case):
    return lambda *given: checkpoint(ours, *given, use_reentrant=False)


def checked(ours, case):
    """What the op promises to compilers: strides, and that no output is an input."""
    shape = case["shape"]

    def call(*given):
        # PyTorch 2.8 cannot clone some inputs of no numbers.
        if case["backend"] != "reference" and given[0].numel():
            keep = bool(case["wanted"])
            arguments = (*given, shape.out_features, shape.layout, keep, case["backend"])
            tests = ("test_schema", "test_faketensor")
            torch.library.opcheck(torch.ops.monarch_rocm.linear, arguments, test_utils=tests)
        return ours(*given)

    return call


# How a layer is called, and of what gradients can then be asked for.
OPERANDS = {"x", "blkdiag1", "blkdiag2", "bias"}
WAYS = {
    "eager": (lambda ours, case: ours, OPERANDS),
    "no grad": (within(torch.no_grad), set()),
    "inference": (within(torch.inference_mode), set()),
    "deterministic": (lambda ours, case: ours, OPERANDS),
    "in place": (in_place, OPERANDS),
    "of a subclass": (of_subclass, OPERANDS),
    "autocast": (in_autocast, OPERANDS),
    "batched gradients": (lambda ours, case: ours, OPERANDS),
    "vmap": (mapped, OPERANDS),
    "vmap of layers": (mapped_layers, {"x"}),  # sums over samples would be rounded one by one
    "compiled": (compiled, OPERANDS),
    "compiled as on a GPU": (compiled, OPERANDS),
    "exported": (exported, {"x"}),
    "traced": (traced, set()),
    "checkpoint": (checkpointed, OPERANDS),
    "opcheck": (checked, OPERANDS),
}

values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.integers(-2, 9),
        st.floats(),
        st.text(max_size=5),
        st.sampled_from(["interleaved", "blocked", "torch", "auto", "0", "1.a"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def damaged(draw, whole):
    """A copy of what JSON holds with one to three changes: a part gone, replaced, doubled, renamed."""
    found = {"": copy.deepcopy(whole)}
    for _ in range(draw(st.integers(1, 3))):
        parent, key, part = found, "", found[""]
        while isinstance(part, (dict, list)) and part and draw(st.integers(0, 5)):
            keys = sorted(part) if isinstance(part, dict) else range(len(part))
            parent, key = part, draw(st.sampled_from(keys))
            part = parent[key]
        change = draw(st.sampled_from(["replace", "drop", "rename", "near"]))
        if parent is not found and change == "drop":
            del parent[key]
        elif parent is not found and change == "rename" and isinstance(parent, dict):
            parent[draw(st.text(max_size=6))] = parent.pop(key)
        elif change == "near" and type(part) is int:
            parent[key] = part + draw(st.sampled_from([-1, 1, 2**31, -part]))
        else:
            parent[key] = draw(values)
    return found[""]


def plain(shape, x, w1, w2, bias):
    """A layer by PyTorch's own products, block by block, with PyTorch's own gradients."""
    x = F.pad(x, (0, shape.K * shape.P - shape.in_features)).unflatten(-1, (shape.K, shape.P))
    h = torch.cat([x[..., k, :] @ w1[k].mT for k in range(shape.K)], -1)
    z = [h[..., l :: shape.L] @ w2[l].mT for l in range(shape.L)]
    y = torch.stack(z, -1).flatten(-2) if shape.layout == "interleaved" else torch.cat(z, -1)
    y = y[..., : shape.out_features]
    return y if bias is None else y + bias


def gradients(function, operands, wanted, grad, batched=False):
    """Output and the wanted gradients, by name; `batched` with those of another in one pass."""
    operands = {
        name: None if t is None else t.detach().requires_grad_(name in wanted) for name, t in operands.items()
    }
    y = function(*operands.values())
    names = [name for name in wanted if operands[name] is not None]
    if batched:
        grad = torch.stack([grad, -grad])
    differentiated = [operands[name] for name in names]
    found = torch.autograd.grad(y, differentiated, grad, is_grads_batched=batched) if names else ()
    found = [each[0] if batched else each for each in found]
    return {"y": y.detach(), **dict(zip(names, found, strict=True))}


@contextmanager
def surrounded(case):
    """What is in force while a layer and its gradients run."""
    with pytest.MonkeyPatch.context() as patch:
        if case["path"] is not None:
            force(case["path"], patch)
        if case["way"] == "compiled as on a GPU":
            patch.setattr(decompositions, "OPAQUE", ())
        torch.use_deterministic_algorithms(case["way"] == "deterministic")
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)
    if case["path"] is not None:
        dispatch.kernels().tuning.refresh()


def check_layer(case):
    """Every backend errs at most twice as much as plain PyTorch in the same dtype, against float64, however
    the layer is called; outputs are contiguous and nobody else's, and operands stay as they were.

    A float32 sum in another order may add its rounding. Where few numbers are compared, or few differ, a
    lucky rounding of PyTorch's may not decide: each number may then be off by one rounding of all that it
    is a sum of, the least bound that holds for any way of computing it.
    """
    shape, dtype, lead = case["shape"], case["dtype"], case["lead"]
    generator = torch.Generator().manual_seed(case["seed"])
    high = WIDE.get(dtype, torch.float64)

    def number(*size, scale=1.0, name="x"):
        drawn = torch.randn(*size, generator=generator, dtype=high) * scale
        return VIEWS[case["views"][name]](drawn.to(DEVICE, dtype))

    operands = {
        "x": number(*lead, shape.in_features),
        "blkdiag1": number(*shape.factor1, scale=shape.P**-0.5, name="blkdiag1"),
        "blkdiag2": number(*shape.factor2, scale=shape.R**-0.5, name="blkdiag2"),
        "bias": number(shape.out_features, name="bias") if case["bias"] else None,
    }
    grad = number(*lead, shape.out_features, name="grad")
    way, allowed = WAYS[case["way"]]
    wanted = sorted(case["wanted"] & allowed)
    counted[f"layers, {case['way']}"] += 1
    sizes = {"in_features": shape.in_features, "out_features": shape.out_features, "layout": shape.layout}

    def ours(*given):
        return monarch_linear(*given, **sizes, backend=case["backend"], recompute=case["recompute"])

    def formula(*given):
        return plain(shape, *given)

    before = [t if t is None else t.clone() for t in operands.values()]
    with surrounded(case):
        batched = case["way"] == "batched gradients"
        got = gradients(way(ours, case), operands, wanted, grad, batched)
    memory = {t.untyped_storage().data_ptr() for t in (*operands.values(), grad) if t is not None}
    assert not got["y"].numel() or got["y"].untyped_storage().data_ptr() not in memory
    for old, new in zip(before, operands.values(), strict=True):
        assert old is new is None or torch.equal(old, new)
    usual = gradients(formula, operands, wanted, grad)

    def widened(change):
        given = {name: None if t is None else change(t.to(high)) for name, t in operands.items()}
        return gradients(formula, given, wanted, change(grad.to(high)))

    exact, sums = widened(lambda t: t), widened(torch.abs)
    eps = torch.finfo(dtype).eps
    depth = max(shape.P, shape.R, math.prod(lead))
    order = (torch.finfo(torch.float32).eps if dtype in DTYPES else eps) * math.sqrt(depth)
    alike = not {"one row", "one number"}.isdisjoint(case["views"].values())
    assert got.keys() == usual.keys()
    for name, value in got.items():
        assert (value.shape, value.dtype) == (exact[name].shape, dtype), name
        assert name != "y" or value.is_contiguous()
        if not value.numel():
            continue
        assert value.isfinite().all(), f"{name} is not finite"
        for measure in (lambda e: float(e.abs().square().mean().sqrt()), lambda e: float(e.abs().max())):
            error = measure(value.to(high) - exact[name])
            allowed = 2 * measure(usual[name].to(high) - exact[name]) + order * measure(exact[name])
            if value.numel() < FEW_NUMBERS or alike:
                allowed += eps * measure(sums[name])
            assert error <= allowed, f"{name} is off by {error:.3g}, where {allowed:.3g} is allowed"


@st.composite
def weights(draw):
    return {
        "shape": draw(shapes(24)),
        "dtype": draw(st.sampled_from([*DTYPES, torch.float64, torch.complex64])),
        "scale": draw(st.sampled_from([1.0, 0.0, 1e-3, 100.0])),
        "view": draw(st.sampled_from(["plain", "every second", "features first", "one number", "lazy"])),
        "seed": draw(st.integers(0, 2**16)),
    }


def check_projection(case):
    """No factors are nearer: the error is what each sub-block's own SVD discards."""
    shape, dtype = case["shape"], case["dtype"]
    generator = torch.Generator().manual_seed(case["seed"])
    high = WIDE.get(dtype, torch.float64)
    drawn = (
        torch.randn(shape.out_features, shape.in_features, generator=generator, dtype=high) * case["scale"]
    )
    weight = VIEWS[case["view"]](drawn.to(dtype))
    rank = shape.Q // shape.L if shape.Q % shape.L == 0 else None  # fly's sizes otherwise
    one, two = project(weight, shape.nblocks, rank, layout=shape.layout)
    assert (one.shape, two.shape) == (shape.factor1, shape.factor2)
    assert (one.dtype, two.dtype) == (dtype, dtype)
    padded = F.pad(
        weight.to(high), (0, shape.K * shape.P - shape.in_features, 0, shape.L * shape.S - shape.out_features)
    )
    discarded = sum(
        float(torch.linalg.svdvals(block)[kept:].square().sum())
        for block, kept in sub_blocks(weight.to(high), shape)
    )
    dense = monarch_weight(one.to(high), two.to(high), layout=shape.layout)
    change = dense[: shape.out_features, : shape.in_features] - weight.to(high)
    error = float(torch.linalg.vector_norm(dense - padded))
    assert float(torch.linalg.vector_norm(change)) <= error * (1 + 1e-12)
    assert abs(error - math.sqrt(discarded)) <= float(svd_budget(weight)) + 1e-12 * math.sqrt(discarded)


FORMATS = [
    ("fly", {}),
    ("torch_structured", {}),
    ("blockdiag_butterfly", {}),
    ("block_diagonal", {}),
    *(("kronecker_sparse", {"algo": algo}) for algo in interop.ALGOS),
    ("btt", {}),
    ("gralora", {}),
    *(("block_low_rank", {"form": form}) for form in interop.FORMS),
]


def make(shape, bias, dtype=torch.float32):
    factors = (torch.randn(size).to(dtype) for size in (shape.factor1, shape.factor2))
    one, two = (nn.Parameter(factor) for factor in factors)
    vector = nn.Parameter(torch.randn(shape.out_features).to(dtype)) if bias else None
    return MonarchLinear._assemble(shape, one, two, vector, "auto", recompute=False)


def says_why(error, words=""):
    """A refusal in words, not the bare key or index that some look-up missed."""
    assert " " in str(error)
    assert words in str(error)


def check_interop(case):
    """A layer is refused by a format, or comes back from it to the bit."""
    shape, bias, (form, kwargs) = case
    layer = make(shape, bias)
    read, write = getattr(interop, f"from_{form}"), getattr(interop, f"to_{form}")
    try:
        state = write(layer, "a.", **kwargs)
    except ValueError as error:
        says_why(error, "cannot hold a layer")
        return
    counted[f"interop, {form} holds it"] += 1
    if form == "kronecker_sparse":
        kwargs = {**kwargs, "patterns": [(shape.K, shape.Q, shape.P, 1), (1, shape.S, shape.R, shape.L)]}
    padded = {"in_features": shape.in_features, "out_features": shape.out_features}
    more = padded if form in ("fly", "torch_structured", "block_diagonal") else {}
    again = read(state, "a.", **kwargs, **more)
    assert again.shape == layer.shape
    assert all(torch.equal(again.state_dict()[name], value) for name, value in layer.state_dict().items())


@st.composite
def states(draw):
    """A state dict of some format with a tensor gone, doubled, cut, of another kind, or no tensor at all."""
    form, kwargs = draw(st.sampled_from(FORMATS))
    shape = MonarchShape(12, 12, 3, 4, "blocked" if form in ("btt", "gralora") else "interleaved")
    if form in ("fly", "torch_structured"):
        shape = MonarchShape(12, 12, 3)
    layer = make(shape, form != "gralora")
    if form == "block_diagonal":
        layer = interop.from_block_diagonal({"weight": torch.randn(3, 4, 4), "bias": torch.randn(12)})
    state = getattr(interop, f"to_{form}")(layer, **kwargs)
    if form == "kronecker_sparse":
        kwargs = {**kwargs, "patterns": [(3, 12, 4, 1), (1, 4, 12, 3)]}
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(sorted(state)))
        tensor = state[name]
        changes = {
            "drop": lambda name=name: state.pop(name),
            "rename": lambda name=name: state.update({name + draw(st.text(max_size=3)): state.pop(name)}),
            "double": lambda t=tensor: state.update({draw(st.text(max_size=4)): t}),
            "no tensor": lambda name=name: state.update({name: draw(values)}),
        }
        if isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.numel():
            axis = draw(st.integers(0, tensor.ndim - 1))
            dtype = draw(st.sampled_from([torch.int8, torch.bool, torch.float64, torch.complex64]))
            changes |= {
                "cut": lambda name=name, t=tensor, axis=axis: state.update(
                    {name: t.narrow(axis, 0, draw(st.integers(0, t.shape[axis] - 1)))}
                ),
                "grow": lambda name=name, t=tensor, axis=axis: state.update({name: torch.cat([t, t], axis)}),
                "flat": lambda name=name, t=tensor: state.update({name: t.flatten()}),
                "turned": lambda name=name, t=tensor: state.update({name: t.movedim(0, -1)}),
                "dtype": lambda name=name, t=tensor, dtype=dtype: state.update({name: t.to(dtype)}),
                "meta": lambda name=name, t=tensor: state.update({name: t.to("meta")}),
            }
        changes[draw(st.sampled_from(sorted(changes)))]()
        if not state:
            break
    return form, kwargs, state


def check_damaged_state(case):
    """A state is refused with a clear error, or is a layer that runs."""
    form, kwargs, state = case
    try:
        layer = getattr(interop, f"from_{form}")(state, **kwargs)
    except ValueError as error:
        says_why(error)
        return
    counted["states that were sound all the same"] += 1
    x = torch.zeros(2, layer.in_features, dtype=layer.blkdiag1.dtype, device=layer.blkdiag1.device)
    assert layer(x).shape == (2, layer.out_features)


def dense_model():
    one, two = nn.Linear(12, 16), nn.Linear(12, 16)
    two.weight = one.weight
    model = nn.ModuleDict({"a": one, "b": nn.Sequential(nn.Linear(16, 12, bias=False), two)})
    model["c"] = nn.Embedding(12, 16)
    return model


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    CONVERTED = monarchize(dense_model(), MonarchConfig(nblocks=2, rank=2))[0]
STRUCTURE = structure(CONVERTED)
STATE = CONVERTED.state_dict()


def check_damaged_structure(found):
    """Refused with a clear error and nothing replaced, or a model that runs."""
    model = dense_model()
    before = {name: type(module) for name, module in model.named_modules()}
    try:
        restructure(model, found)
    except (ValueError, TypeError) as error:
        says_why(error)
        assert {name: type(module) for name, module in model.named_modules()} == before
        return
    counted["structures that were sound all the same"] += 1
    for module in model.modules():
        if isinstance(module, MonarchLinear):
            module.reset_parameters()
            if module.backend == "triton":
                module.backend = "torch"
            assert module(torch.zeros(3, module.in_features)).shape == (3, module.out_features)
    assert type(model["c"]) is nn.Embedding
    structure(model)


def check_damaged_config(found):
    """Refused with a clear error, or a config that goes through JSON and makes a layer."""
    try:
        config = MonarchConfig.from_dict(found)
    except (ValueError, TypeError) as error:
        says_why(error)
        return
    assert MonarchConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def check_damaged_table(text):
    """A broken table of configs is passed over with a warning that names it, and its shapes are served."""
    tuning = dispatch.kernels().tuning
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONARCH_ROCM_CACHE_DIR", folder)
        tuning.refresh()
        tuning._ignored.clear()
        file = tuning.own_file("bdmm", "default")
        file.parent.mkdir(parents=True)
        file.write_bytes(text)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            row = tuning.lookup("bdmm", torch.device("cpu"), torch.float32, 64, 64, 128)
        tuning.check_row(row, "bdmm")
        assert all(str(file) in str(warning.message) for warning in caught)
        try:
            tuning.read(file, "bdmm")
        except (ValueError, RecursionError):
            assert caught
    tuning.refresh()


with tempfile.TemporaryDirectory() as _folder:
    _file = Path(_folder) / "heal.pt"
    _student = MonarchLinear(8, 8, nblocks=2)
    _trained = dict(_student.named_parameters())
    _optimizer = torch.optim.AdamW(_trained.values(), 1e-3)
    _student(torch.ones(2, 8)).sum().backward()
    _optimizer.step()
    healing._save(_file, {"steps": 3}, [1.0, 0.5], _trained, _optimizer)
    CHECKPOINT = _file.read_bytes()


def check_damaged_checkpoint(content):
    """A file that `heal` should go on from is refused and the student left as it was, or its numbers load."""
    student = MonarchLinear(8, 8, nblocks=2)
    before = {name: value.clone() for name, value in student.state_dict().items()}
    trained = dict(student.named_parameters())
    optimizer = torch.optim.AdamW(trained.values(), 1e-3)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "heal.pt"
        file.write_bytes(content)
        try:
            losses = healing._resume(file, {"steps": 3}, trained, optimizer)
        except ValueError as error:
            says_why(error, str(file))
            assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())
            return
    counted["checkpoints that loaded all the same"] += 1
    assert all(isinstance(loss, float) for loss in losses)
    student(torch.ones(2, 8)).sum().backward()
    optimizer.step()


TABLE = {
    "2": [],
    "4": [
        {
            "at": {"out": 64, "in": 64, "tokens": 128},
            "config": {"BT": 64, "BO": 16, "BI": 16, "num_warps": 4, "num_stages": 1},
            "wins": True,
        },
        {
            "max": {"out": 64},
            "config": {"BT": 64, "BO": 16, "BI": 16, "num_warps": 4, "num_stages": 1},
            "wins": False,
        },
    ],
}


@st.composite
def broken_bytes(draw, whole):
    """Bytes cut short, or with a few of them changed."""
    content = bytearray(whole)
    if draw(st.booleans()):
        content = content[: draw(st.integers(0, len(content)))]
    for _ in range(draw(st.integers(0, 8))):
        if content:
            content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    return bytes(content)


def as_text(found):
    return json.dumps(found).encode()


# Each with its strategy, and with how many examples the suite runs.
PROPERTIES = {
    "layer": (check_layer, layers(), 30),
    "projection": (check_projection, weights(), 25),
    "interop": (
        check_interop,
        st.tuples(shapes(16), st.booleans(), st.sampled_from(FORMATS)),
        60,
    ),
    "damaged state": (check_damaged_state, states(), 60),
    "damaged structure": (check_damaged_structure, damaged(STRUCTURE), 60),
    "damaged config": (check_damaged_config, damaged(MonarchConfig(nblocks=(2, 4), rank=3).to_dict()), 60),
    "damaged checkpoint": (check_damaged_checkpoint, broken_bytes(CHECKPOINT), 40),
}
if not NO_TRITON:
    tables = st.one_of(damaged(TABLE).map(as_text), broken_bytes(as_text(TABLE)))
    PROPERTIES["damaged table"] = (check_damaged_table, tables, 40)


def run(name, examples, start=None):
    """Try a property on so many examples, from a seed, or on the same ones every time."""
    check, strategy, _ = PROPERTIES[name]

    def property(case):
        counted[name] += 1
        check(case)

    property = given(strategy)(property)
    if start is not None:
        property = seed(start)(property)
    property = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=start is None,
        print_blob=False,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )(property)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        property()


def main():
    parser = argparse.ArgumentParser(description="Fuzz the layers, the formats and the loaders.")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to run (default: 10)")
    parser.add_argument("--seed", type=int, default=None, help="where to start (default: the time)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    first = int(time.time()) if options.seed is None else options.seed
    until = time.monotonic() + 60 * options.minutes
    finds, spent, number = {}, Counter(), first
    with interpreter_mended():
        while time.monotonic() < until and len(finds) < len(PROPERTIES):
            # As much time for layers as for all else.
            due = {n: spent[n] / (len(PROPERTIES) - 1 if n == "layer" else 1) for n in PROPERTIES}
            name = min((n for n in PROPERTIES if n not in finds), key=due.__getitem__)
            begun = time.monotonic()
            try:
                run(name, 50, number)
            except Exception:
                finds[name] = number
                print(f"{name}, seed {number}:\n{traceback.format_exc()}", flush=True)
            spent[name] += time.monotonic() - begun
            number += 1
    print(f"seeds {first} to {number - 1}, {sum(spent.values()):.0f} s")
    for name in PROPERTIES:
        print(f"{counted[name]:8,} examples of {name} ({spent[name]:.0f} s)")
    for name, count in sorted(counted.items()):
        if name not in PROPERTIES:
            print(f"{count:8,} {name}")
    total = sum(counted[name] for name in PROPERTIES)
    print(f"{total:,} examples, {len(finds)} finds" + "".join(f"; {n}: seed {s}" for n, s in finds.items()))
    sys.exit(bool(finds))


if __name__ == "__main__":
    main()
