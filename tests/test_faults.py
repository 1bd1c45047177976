"""Kinds of faults that users of other layers and kernels reported, tried on all of ours.

docs/limits.md says which report each test answers.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import (
    DEVICE,
    assert_within_budget,
    by_layout,
    force,
    forward,
    make_operands,
    make_shape,
    run,
    run_dense,
)
from torch import nn
from torch.profiler import ProfilerActivity, profile

import monarch_rocm
from monarch_rocm import MonarchConfig, MonarchLinear, MonarchShape, adapters, dispatch, restructure

ROOT = Path(__file__).parent.parent
KERNELS = sorted((ROOT / "kernels").glob("*.py"))
NO_TRITON = dispatch.why_not_triton(torch.float32, DEVICE)
needs_triton = pytest.mark.skipif(NO_TRITON is not None, reason="no Triton")
pytestmark = pytest.mark.filterwarnings("ignore:a Monarch layer")

OPS = {
    "linear": lambda draw: ((draw(6, 12), draw(3, 6, 4), draw(2, 7, 9), draw(14)), (14, "interleaved", True)),
    "linear, blocked": lambda draw: (
        (draw(6, 11), draw(3, 6, 4), draw(2, 7, 9), draw(13)),
        (13, "blocked", False),
    ),
    "stage": lambda draw: ((draw(6, 12), draw(3, 6, 4)), (18, 1, 1, False)),
    "stage, dealt": lambda draw: ((draw(6, 18), draw(2, 7, 9)), (14, 9, 1, True)),
    "stage_wgrad": lambda draw: ((draw(6, 18), draw(6, 12)), (3, 6, 4, 1, 1)),
    "stage_wgrad, dealt": lambda draw: ((draw(6, 14), draw(6, 18)), (2, 7, 9, 1, 9)),
    "interleave": lambda draw: ((draw(6, 12),), (3, 4, 12)),
    "interleave, cut": lambda draw: ((draw(6, 12),), (4, 3, 10)),
}
VIEWS = {
    "transposed": lambda t: t.mT.contiguous().mT if t.ndim > 1 else torch.stack([t, t], -1)[..., 0],
    "every second": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
    "cut out": lambda t: torch.cat([torch.full_like(t, float("nan")), t], -1)[..., t.shape[-1] :],
    "stride 0 along rows": lambda t: t[:1].expand_as(t),
    "stride 0 along features": lambda t: t[..., :1].expand_as(t),
    "one number": lambda t: t.flatten()[:1].as_strided(t.shape, [0] * t.ndim),
}

# For the interpreter; test_kernels.test_any_strides tries the other views on whole layers.
FEW_OPS, FEW_VIEWS = list(OPS)[2:], ("every second", "one number")


@pytest.mark.parametrize(
    ("backend", "name", "view"),
    [("torch", name, view) for name in OPS for view in VIEWS]
    + [("triton", name, view) for name in FEW_OPS for view in FEW_VIEWS if NO_TRITON is None],
)
def test_every_op_reads_operands_and_gradients_of_any_stride(backend, name, view):
    """Of each registered op, each operand in turn and then the gradient: as if all were contiguous."""
    dtype = torch.float64 if backend == "torch" else torch.float32
    op = getattr(torch.ops.monarch_rocm, name.partition(",")[0])

    def call(tensors, arguments, grad):
        tensors = [tensor.detach().requires_grad_() for tensor in tensors]
        y = _outputs(op, tensors, arguments, backend)
        return [y.detach(), *torch.autograd.grad(y, tensors, grad)]

    tensors, arguments = OPS[name](lambda *size: torch.randn(*size, dtype=dtype, device=DEVICE))
    grad = torch.randn_like(_outputs(op, tensors, arguments, backend))
    for place in range(len(tensors) + 1):
        given = [VIEWS[view](t) if place == i else t for i, t in enumerate(tensors)]
        wanted = VIEWS[view](grad) if place == len(tensors) else grad
        plain = call([t.contiguous() for t in given], arguments, wanted.contiguous())
        for got, exact in zip(call(given, arguments, wanted), plain, strict=True):
            torch.testing.assert_close(got, exact)


def _outputs(op, tensors, arguments, backend):
    y = op(*tensors, *arguments, backend)
    return y[0] if isinstance(y, tuple) else y


class Bands:
    """Fresh floating tensors lie between bands of NaN, which must stay, and hold NaN themselves."""

    WIDTH = 4096

    def __init__(self, monkeypatch):
        self.made = []
        for owner, name in (
            (torch, "empty"),
            (torch.Tensor, "new_empty"),
            (torch.Tensor, "new_empty_strided"),
        ):
            monkeypatch.setattr(owner, name, self.within(getattr(owner, name)))

    def within(self, allocate):
        def call(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if not tensor.is_floating_point() or not tensor.numel():
                return tensor
            return self.put(tensor)

        return call

    def put(self, tensor):
        """The same numbers at the same strides, between bands."""
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        span = 1 + sum((size - 1) * stride for size, stride in steps)
        buffer = torch.full((span + 2 * self.WIDTH,), float("nan"), dtype=tensor.dtype, device=tensor.device)
        self.made.append((buffer, span))
        return buffer.as_strided(tensor.shape, tensor.stride(), self.WIDTH)

    def hold(self):
        return bool(self.made) and all(
            buffer[: self.WIDTH].isnan().all() and buffer[self.WIDTH + span :].isnan().all()
            for buffer, span in self.made
        )


def test_bands_see_a_write_past_the_end(monkeypatch):
    """The judge of the next test can say no."""
    bands = Bands(monkeypatch)
    y = torch.empty(3, 4)
    y.zero_()
    assert bands.hold()
    y.as_strided((1,), (1,), Bands.WIDTH + 12).zero_()
    assert not bands.hold()


@needs_triton
@pytest.mark.slow
@by_layout
@pytest.mark.parametrize("path", ["staged", "fused", "few", "chained"])
def test_kernels_touch_nothing_outside_their_tensors(layout, path, monkeypatch):
    """Sizes that no tile divides: what lies beside inputs is never used, what lies beside outputs stays."""
    force(path, monkeypatch)
    shape = make_shape((101, 53, 5, None), layout)
    tokens = 13 if path == "few" else 67
    operands = make_operands(shape, torch.float32, (tokens,))
    grad = torch.randn(tokens, 53, device=DEVICE)
    plain, exact = run(shape, operands, "torch", grad), run_dense(shape, operands, grad)
    bands = Bands(monkeypatch)
    inside = []
    for operand in operands:
        inside.append(bands.put(operand.detach()).copy_(operand.detach()).requires_grad_(path != "chained"))
    wanted = bands.put(grad).copy_(grad)
    if path == "chained":
        got, plain, exact = [outputs_alone(shape, inside)], plain[:1], exact[:1]
    else:
        got = run(shape, inside, "triton", wanted)
    assert bands.hold()
    for one, two, three in zip(got, plain, exact, strict=True):
        assert_within_budget(path, one, two, three, depth=tokens)
    dispatch.kernels().tuning.refresh()


def outputs_alone(shape, operands):
    return forward(shape, operands, "triton").detach()


@needs_triton
@pytest.mark.slow
def test_kernels_get_whole_numbers_and_multiply_matrices_alone(monkeypatch):
    """No float argument, which Inductor hands over as float64; no dot of three dimensions but those of
    `fused`, which stand in no loop: there some versions of Triton cannot compile them.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    passed, dots = [], {}
    for module in vars(dispatch.kernels()).values():
        if hasattr(module, "launch") and callable(module.launch):
            real = module.launch
            monkeypatch.setattr(
                module, "launch", lambda *args, real=real: passed.append(args[3:]) or real(*args)
            )
    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot
    monkeypatch.setattr(
        builder, "create_dot", lambda self, a, b, *args: dots[path].add(a.data.ndim) or dot(self, a, b, *args)
    )
    for path in ("staged", "fused", "few", "chained"):
        force(path, monkeypatch)
        dots[path] = set()
        for layout in ("interleaved", "blocked"):
            shape = make_shape((64, 64, 4, 4), layout)
            operands = make_operands(shape, torch.float32, (16,))
            run(shape, operands, "triton")
            outputs_alone(shape, [operand.detach() for operand in operands])
    numbers = [n for scalars, strides, constants in passed for n in (*scalars, *strides, *constants.values())]
    assert len(passed) > 20
    assert {type(n) for n in numbers} <= {int, bool}
    if DEVICE == "cpu":
        assert dots == {"staged": {2}, "fused": {2, 3}, "few": {2}, "chained": {2}}
    dispatch.kernels().tuning.refresh()


@pytest.mark.parametrize("file", KERNELS, ids=lambda file: file.stem)
def test_kernels_are_exact_deterministic_and_on_one_axis(file):
    """Every product in full float32 (not TF32 or xf32), no atomics, and programs on the grid's first axis,
    which alone takes more than 65,535 of them.
    """
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if node.func.attr == "dot":
            assert ast.unparse(keywords["input_precision"]) == "'ieee'"
        if node.func.attr == "program_id":
            assert ast.unparse(node.args[0]) == "0"
        assert not node.func.attr.startswith("atomic")
    if file.stem == "fused":
        loops = [
            node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, (ast.For, ast.While))
        ]
        assert not any("dot" in ast.unparse(loop) for loop in loops)


@needs_triton
def test_launches_know_which_kernels_come_to_a_loop_again():
    """Those with several loops, for which Triton before 3.9 makes races (`launch.options`)."""
    from monarch_rocm.kernels import launch, tuning

    loops = {
        node.name: sum(isinstance(each, (ast.For, ast.While)) for each in ast.walk(node))
        for file in KERNELS
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(each).startswith("triton.jit") for each in node.decorator_list)
    }
    assert {name.removesuffix("_kernel") for name in loops if name.endswith("_kernel")} >= set(
        tuning.PARAMETERS
    )
    assert all(name.endswith("_kernel") or not count for name, count in loops.items()), "a helper has a loop"
    assert {name for name, count in loops.items() if count > 1} == launch.LOOPED_AGAIN


@needs_triton
def test_cdna_configs_keep_few_stages():
    """AMD's guide: two for one product, one where a kernel fuses two; more needs too much local memory."""
    from monarch_rocm.kernels import tuning

    for arch in ("gfx90a", "gfx942", "gfx950"):
        for kernel in tuning.PARAMETERS:
            rows = [row for part in tuning.table(kernel, arch)[1].values() for row in part]
            assert rows
            for row in rows:
                assert row["config"]["num_stages"] <= 2
                if kernel in dispatch.WHOLE:
                    assert row["config"]["num_stages"] == 1 or not row["wins"]


@pytest.mark.slow
@needs_triton
def test_processes_choose_alike():
    """Kernels and configs are the same in every process, whatever it did before and however it hashes."""
    code = (
        "import sys, torch\n"
        "from monarch_rocm.kernels import tuning\n"
        "sizes = [(o, i, t) for o in (16, 48, 512) for i in (16, 300, 1024) for t in (1, 7, 100, 8192)]\n"
        "if sys.argv[1] == '1': sizes.reverse()\n"
        "found = {(k, a, s): str(tuning._lookup(k, a, b, *s[:2], tuning.bucket_of(s[2])))\n"
        "    for k in tuning.PARAMETERS for a in ('sm90', 'gfx942') for b in (2, 4) for s in sizes}\n"
        "print(sorted(found.items()))\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, seed],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    said = [process.communicate()[0] for process in processes]
    assert said[0] == said[1]
    assert len(said[0]) > 10_000


@needs_triton
@pytest.mark.parametrize(("current", "entered"), [(0, [1]), (1, [])])
def test_launches_go_to_the_tensors_device(current, entered, monkeypatch):
    """With another device current, as under `device_map="auto"`; on a machine without any."""
    from monarch_rocm.kernels import launch

    devices, ran = [current], []

    class On:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            devices.append(self.device)
            entered_now.append(self.device)

        def __exit__(self, *_):
            devices.pop()

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **constants: ran.append(devices[-1])

    entered_now = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices[-1])
    monkeypatch.setattr(torch.cuda, "device", On)
    monkeypatch.setattr(launch.tuning, "architecture", lambda device: "sm90")
    tensor = SimpleNamespace(
        get_device=lambda: 1, dtype=torch.float16, data_ptr=lambda: 0, device=None, itemsize=2
    )
    launch.launch(Kernel(), 1, (tensor,), (5,), (1,), launch.Constants())
    assert ran == [1]
    assert entered_now == entered


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_layers_run_on_a_device_that_is_not_current():
    torch.cuda.set_device(0)
    for tokens in (1, 16, 300):
        layer = MonarchLinear(256, 256, device="cuda:1", backend="triton")
        x = torch.randn(tokens, 256, device="cuda:1", requires_grad=True)
        layer(x).sum().backward()
        with torch.cuda.device(1):
            exact = torch.autograd.grad(layer(x).sum(), x)[0]
        assert torch.equal(x.grad, exact)
        assert torch.cuda.current_device() == 0


def test_everything_can_be_made_with_its_defaults():
    """No default of ours is one that its own checks refuse."""
    layer = MonarchLinear(64, 32)
    assert MonarchConfig() == MonarchConfig.from_dict(MonarchConfig().to_dict())
    assert MonarchShape(64, 32) == layer.shape
    assert MonarchLinear.from_linear(nn.Linear(64, 32)).shape == layer.shape
    assert adapters.MonarchAdapter(nn.Linear(64, 32))(torch.zeros(1, 64)).shape == (1, 32)
    assert adapters.adapt(nn.Sequential(nn.Linear(64, 32))) == ["0"]
    assert isinstance(monarch_rocm.monarchize(nn.Sequential(nn.Linear(64, 32)))[0][0], MonarchLinear)
    assert monarch_rocm.Budget(0.9)
    assert monarch_rocm.plan(layer, tokens=1).flops


@pytest.mark.parametrize("backend", ["torch", "reference", *([] if NO_TRITON else ["triton"])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_checkpoint_of_the_first_version_means_what_it_meant(backend, dtype):
    """Padded, of unequal blocks, of either layout; whole numbers, so that its outputs are exact."""
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("the kernels do not take float64")
    saved = json.loads((ROOT / "tests" / "data" / "checkpoint.json").read_text())
    with torch.device(DEVICE):
        dense = nn.Sequential(nn.Linear(7, 10), nn.Linear(10, 6, bias=False), nn.Linear(6, 9)).to(dtype)
    model = restructure(dense, saved["structure"])
    model.load_state_dict({name: torch.tensor(value) for name, value in saved["state"].items()}, strict=True)
    for layer in model:
        layer.backend = backend
    x = torch.tensor(saved["x"], dtype=dtype, device=DEVICE)
    assert torch.equal(model(x), torch.tensor(saved["y"], dtype=dtype, device=DEVICE))


def test_layers_move_to_the_meta_device_whole():
    layer = MonarchLinear(10, 33, nblocks=4).to("meta")
    assert all(parameter.is_meta for parameter in layer.parameters())
    assert layer.weight.is_meta
    assert layer(torch.empty(3, 10, device="meta")).shape == (3, 33)


def peak(module, x):
    """Bytes that a training step holds at most, beyond what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        module(x).sum().backward()
    events = [
        (event.start_ns(), event.nbytes())
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    held = most = 0
    for _, size in sorted(events):
        held += size
        most = max(most, held)
    return most


@by_layout
@pytest.mark.parametrize("trains", [True, False], ids=["dx", "no dx"])
@pytest.mark.parametrize("sizes", [(256, 1024), (1024, 256), (512, 512)], ids=str)
def test_a_training_step_takes_no_more_memory_than_dense_and_the_hidden_features(layout, trains, sizes):
    """With the temporary of the layouts' pass where outputs are interleaved. Where dense has no gradient of
    its input to hold, the gradient of the hidden features stands in that place.
    """
    x = torch.randn(512, sizes[0], requires_grad=trains)
    layer, dense = MonarchLinear(*sizes, layout=layout, backend="torch"), nn.Linear(*sizes)
    hidden = 4 * 512 * layer.shape.K * layer.shape.Q
    instead = 0 if trains else hidden
    passed = 4 * 512 * sizes[1] if layout == "interleaved" else 0
    most = peak(layer, x)
    assert most > hidden
    assert most <= peak(dense, x) + hidden + instead + passed


@pytest.mark.parametrize(
    "given", [nn.Linear(64, 32), MonarchLinear(64, 32, nblocks=2)], ids=["dense", "other"]
)
def test_states_of_other_layers_are_refused_by_name_and_change_nothing(given):
    layer = MonarchLinear(64, 32, nblocks=4)
    kept = {name: value.clone() for name, value in layer.state_dict().items()}
    with pytest.raises(RuntimeError, match="blkdiag1"):
        layer.load_state_dict(given.state_dict())
    if isinstance(given, nn.Linear):
        assert all(torch.equal(layer.state_dict()[n], v) for n, v in kept.items() if n != "bias")
