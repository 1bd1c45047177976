"""MONARCH_ROCM_AUTOTUNE=1: a shape is tuned once, by one process, and never while a call is no real one."""

import json
import os
import subprocess
import sys

import pytest
import torch
from support import DEVICE
from torch._subclasses.fake_tensor import FakeTensorMode

from monarch_rocm import MonarchLinear, MonarchShape, autotune, dispatch, launches, ops, timing, tune
from monarch_rocm.kernels import space, store, tuning

pytestmark = pytest.mark.skipif(
    dispatch.why_not_triton(torch.float32, DEVICE) is not None, reason="no Triton"
)
device = torch.device(DEVICE)
arch = tuning.architecture(device)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """The tasks that were measured, with the variable set, an empty cache and a clock of its own."""
    monkeypatch.setenv("MONARCH_ROCM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MONARCH_ROCM_AUTOTUNE", "1")
    monkeypatch.setattr(autotune, "_seen", set())
    monkeypatch.setattr(ops, "_dispatch", autotune.launchers())
    monkeypatch.setattr(space, "candidates", lambda kernel, rocm: ())
    monkeypatch.setattr(
        timing, "measure", lambda runs, rounds, train: {name: [1.0] * rounds for name in runs}
    )
    tasks, search = [], tune.search
    monkeypatch.setattr(tune, "search", lambda task, *args: tasks.append(task) or search(task, *args))
    tuning.refresh()
    yield tasks
    tuning.refresh()


def layer(**options):
    return MonarchLinear(32, 48, nblocks=2, backend="triton", device=device, **options)


def train(module, tokens=4):
    x = torch.randn(tokens, 32, device=device, requires_grad=True)
    module(x).sum().backward()


def test_off_by_default_the_ops_call_dispatch_itself():
    assert os.environ.get("MONARCH_ROCM_AUTOTUNE") is None
    assert ops._dispatch is dispatch


@pytest.mark.parametrize(("value", "on"), [("", False), ("0", False), ("1", True), ("on", True)])
def test_the_variable_is_a_switch(monkeypatch, value, on):
    monkeypatch.setenv("MONARCH_ROCM_AUTOTUNE", value)
    assert autotune.enabled() == on
    assert (autotune.launchers() is not dispatch) == on


def test_every_launch_of_a_training_step_is_tuned_once(measured):
    module = layer()
    train(module)
    once = list(measured)
    assert {(t.kernel, t.n_out, t.n_in, t.tokens) for t in once} == {
        (t.kernel, t.n_out, t.n_in, t.tokens)
        for t in launches.tasks(
            (*launches.forward(module.shape, 4, True), *launches.backward(module.shape, 4))
        )
    }
    train(module)
    train(layer(), tokens=3)  # another layer of the shape, another count in the bucket
    assert measured == once
    train(module, tokens=5)
    assert {task.tokens for task in measured} == {4, 8}


def test_forty_numbers_of_tokens_are_tuned_by_bucket(measured):
    """Ragged batches: no more searches than powers of two, whatever numbers come."""
    module = layer(layout="blocked")
    with torch.no_grad():
        for tokens in range(1, 41):
            module(torch.randn(tokens, 32, device=device))
    kernels = {task.kernel for task in measured}
    assert {task.tokens for task in measured} == {1, 2, 4, 8, 16, 32, 64}
    assert len(measured) <= 7 * 2 * len(kernels)  # buckets, shapes of a factor
    assert len({(t.kernel, t.n_out, t.n_in, t.tokens) for t in measured}) == len(measured)


def test_rows_that_are_there_are_not_measured_again(measured, monkeypatch):
    """As where another process tuned, or `monarch-rocm tune` did."""
    module = layer()
    train(module)
    measured.clear()
    monkeypatch.setattr(autotune, "_seen", set())
    tuning.refresh()
    train(module)
    assert measured == []


def test_who_waited_for_the_lock_reads_what_was_found_meanwhile(measured, monkeypatch):
    rows = []

    class Lock:
        def __enter__(self):
            rows.extend(store.save(*row) for row in found)

        def __exit__(self, *args):
            pass

    module, found = layer(), []
    for task in launches.tasks(launches.forward(module.shape, 4, False)):
        sizes = (task.n_out, task.n_in, task.tokens)
        config = tuning.lookup(task.kernel, device, torch.float32, *sizes)["config"]
        at = dict(zip(("out", "in", "tokens"), sizes, strict=True))
        found.append((task.kernel, arch, 4, {"at": at, "config": config, "wins": False}))
    monkeypatch.setattr(store, "measuring", lambda arch: Lock())
    with torch.no_grad():
        module(torch.randn(4, 32, device=device))
    assert rows
    assert measured == []


def test_nothing_is_measured_under_tracers_or_for_fake_tensors(measured):
    module = layer()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert module(torch.empty(4, 32, device=device)).shape == (4, 48)
    torch.export.export(module, (torch.randn(4, 32, device=device),))
    module(torch.empty(0, 32, device=device))
    assert measured == []
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    y = compiled(torch.randn(4, 32, device=device))  # traced, and then really run
    assert measured
    assert y.shape == (4, 48)


def test_transforms_are_tuned_as_the_calls_that_they_make(measured):
    module, x = layer(), torch.randn(2, 4, 32, device=device)
    y = torch.func.vmap(module)(x)
    torch.testing.assert_close(y, module(x))
    assert {task.tokens for task in measured} == {8}


@pytest.mark.gpu
def test_nothing_is_measured_while_a_graph_is_captured(measured):
    """And what ran then is tuned at the next call outside."""
    module, x = layer(), torch.randn(4, 32, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        module(x)
    assert measured == []
    with torch.no_grad():
        module(x)
    assert measured


def test_batched_products_need_no_tuning(measured):
    train(MonarchLinear(32, 48, nblocks=2, backend="torch", device=device))
    assert measured == []


@pytest.mark.parametrize("error", [OSError("read-only"), torch.OutOfMemoryError("no memory")])
def test_where_it_cannot_tune_the_shipped_configs_stay_and_a_warning_says_so(measured, monkeypatch, error):
    def search(*args):
        measured.append(1)
        raise error

    monkeypatch.setattr(tune, "search", search)
    module, x = layer(), torch.randn(4, 32, device=device)
    with torch.no_grad(), pytest.warns(UserWarning, match=f"shipped configs stay, since {error}"):
        y = module(x)
    torch.testing.assert_close(y, module.to_linear()(x))
    with torch.no_grad():
        module(x)
    assert measured == [1]


RUN = """
import os, torch
from monarch_rocm import MonarchLinear, timing, tune
from monarch_rocm.kernels import space
space.candidates = lambda kernel, rocm: ()
timing.measure = lambda runs, rounds, train: {name: [1.0] * rounds for name in runs}
search = tune.search

def reported(task, *args):
    os.write(1, f"{task}\\n".encode())
    return search(task, *args)

tune.search = reported
for _ in range(7):  # eight processes
    if not os.fork():
        break
with torch.no_grad():
    MonarchLinear(32, 48, nblocks=2, backend="triton")(torch.randn(2, 32))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="its process uses the interpreter")
def test_eight_processes_measure_each_launch_once(tmp_path):
    """The variable reaches them, one of them measures, and the others wait and read."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "MONARCH_ROCM_AUTOTUNE": "1",
        "OMP_NUM_THREADS": "1",
        "MONARCH_ROCM_CACHE_DIR": str(tmp_path),
    }
    command = [sys.executable, "-W", "error::UserWarning", "-c", RUN]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    operations = launches.forward(MonarchShape(32, 48, 2), 2, False)
    assert sorted(done.stdout.splitlines()) == sorted(map(str, launches.tasks(operations)))
    rows = json.loads((tmp_path / "default" / "bdmm.json").read_text())
    assert {row["at"]["tokens"] for row in rows["4"]} == {2}
