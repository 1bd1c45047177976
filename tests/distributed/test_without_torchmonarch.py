"""What works and what is said where torchmonarch is not installed; what a user sees in a terminal."""

import io
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import wire
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from distributed.support import spawn
from monarch_rocm import MonarchLinear
from monarch_rocm.distributed import MonarchParallel, Record, Restart, Restarted, follow, parallelize
from monarch_rocm.distributed.follow import CsvLog, Dashboard, JsonLog, sinks

ROOT = Path(__file__).parents[2]
HIDDEN = """
import sys, importlib.abc
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "monarch" or name.startswith("monarch."):
            raise ModuleNotFoundError(f"No module named {name!r}", name="monarch")
sys.meta_path.insert(0, Hide())
"""


def python(*arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


SCRIPT = (
    HIDDEN
    + """
import torch, torch.distributed as dist, monarch_rocm
from monarch_rocm.distributed import *
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(monarch_rocm.MonarchLinear(8, 8, nblocks=2))
x = torch.ones(2, 8)
whole = model(x).sum()
model = parallelize(model, init_device_mesh("cpu", (2,)), "tp")
loss = model(x).sum()
loss.backward()
assert torch.allclose(loss, whole)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpoints = Checkpoints(sys.argv[1], every=1)
checkpoints.save(1, model, optimizer)
assert checkpoints.load(model, optimizer) == (1, None)
try: Fleet.local(procs=2)
except ImportError as error: print(error)
dist.destroy_process_group()
"""
)


def test_all_but_the_fleet_works_under_torchrun_and_the_fleet_says_what_to_install(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = python(*torchrun, str(script), str(tmp_path / "checkpoints"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("which is not installed. pip install 'torchmonarch>=0.7,<0.9'") == 2
    assert "under torchrun" in done.stdout


def test_importing_the_package_imports_no_torchmonarch():
    done = python(
        "-c", "import sys, monarch_rocm.distributed; print([m for m in sys.modules if m == 'monarch'])"
    )
    assert done.stdout == "[]\n", done.stderr


WAYS = [("replicated", "replicated"), ("replicated", "features"), ("features", "replicated")]
WAYS += [("features", "features"), ("tokens", "tokens")]


def count(rank, ranks):
    """(expected, sent) bytes of a forward and a backward pass, for each way in and out."""
    import time

    found = []
    mesh = init_device_mesh("cpu", (ranks,))
    for enter, leave in WAYS:
        layer = MonarchLinear(256, 512, bias=False, nblocks=4, layout="blocked")
        shape, style = layer.shape, MonarchParallel(input=enter, output=leave)
        model = parallelize(nn.Sequential(layer), mesh, "tp", plan={"0": style})
        x = torch.randn(128, 256)
        x = x if enter == "replicated" else x.chunk(ranks, -1 if enter == "features" else -2)[rank]
        x = x.contiguous().requires_grad_()
        model(x).sum().backward()  # connections are made
        torch.distributed.barrier()
        time.sleep(0.1)
        before = wire.sent()
        for _ in range(4):
            model(x).sum().backward()
        torch.distributed.barrier()
        time.sleep(0.1)
        found.append((sum(style.traffic(shape, 128, ranks, 4)), (wire.sent() - before) / 4))
        torch.distributed.barrier()
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_on_the_wire_are_those_of_the_formula(ranks, tmp_path):
    """As the kernel counts them: gloo adds headers and a barrier, a few hundred bytes a message."""
    for found in spawn(count, ranks, tmp_path, ranks):
        for way, (expected, sent) in zip(WAYS, found, strict=True):
            assert expected <= sent <= expected + 4000, (way, expected, sent)


RECORD = Record(4, 0, {"loss": 0.5, "tokens": 64}, ({"loss": 0.5, "tokens": 64}, {"loss": 0.25}), 0.1)
RESTARTED = Restarted(1, "rank 1 died at step 4", 4, 0, 2.5)


def test_the_dashboard_shows_ranks_metrics_and_restarts():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    board = Dashboard(console, 2, 10)
    board.record(RECORD)
    board.record(RECORD._replace(step=5))
    board.restarted(RESTARTED)
    board.close()
    shown = console.file.getvalue()
    for text in (
        "step 6 of 10",
        "loss",
        "0.25",
        "tokens/s",
        "ms/step",
        "restart 1: rank 1 died at step 4 (2.5 s)",
    ):
        assert text in shown


def test_the_dashboard_takes_the_pace_over_batches(monkeypatch):
    """Ten records at once every tenth of a second are a hundred a second; a restart begins anew."""
    clock = [0.0]
    monkeypatch.setattr(follow.time, "monotonic", lambda: clock[0])
    board = Dashboard(Console(file=io.StringIO(), force_terminal=True), 2, 2000)
    board.close()
    assert board.pace() is None
    for step in range(1000):
        clock[0] = step // 10 / 10
        board.record(RECORD._replace(step=step))
    assert board.pace() == pytest.approx(0.01, rel=0.03)
    board.record(RECORD._replace(step=500, attempt=1))
    assert board.pace() is None
    clock[0] += 60
    board.record(RECORD._replace(step=501, attempt=1))
    assert board.pace() == pytest.approx(60)


def test_the_dashboard_is_quiet_where_nobody_looks(capsys):
    assert sinks((), None, True, 2, 10) == []
    assert capsys.readouterr().out == ""


def test_tensorboard_gets_numbers_and_restarts(monkeypatch):
    """Where it is installed; its writer is played here."""
    calls = []

    class SummaryWriter:
        def __init__(self, folder):
            calls.append(folder)

        def __getattr__(self, name):
            return lambda *arguments: calls.append((name, *arguments))

    played = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", played)
    (board,) = sinks((), "board", False, 2, 10)
    board.record(RECORD._replace(metrics={"loss": 0.5, "note": "text"}))
    board.restarted(RESTARTED)
    board.close()
    assert calls == [
        "board",
        ("add_scalar", "loss", 0.5, 4),
        ("add_text", "restarts", "rank 1 died at step 4", 0),
        ("close",),
    ]


def test_tensorboard_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="tensorboard"):
        sinks((), "board", False, 2, 10)


def test_logs_go_on_where_they_were(tmp_path):
    """A second run appends under the columns of the first."""
    for log in (CsvLog, JsonLog):
        for _ in range(2):
            one = log(tmp_path / log.__name__)
            one.record(RECORD)
            one.restarted(RESTARTED)
            one.close()
    rows = (tmp_path / "CsvLog").read_text().splitlines()
    assert rows[0] == "time,attempt,step,rank,seconds,loss,tokens"
    assert [row.split(",", 1)[1] for row in rows[1:3]] == ["0,4,0,0.100000,0.5,64", "0,4,1,0.100000,0.25,"]
    assert len(rows) == 5
    assert len((tmp_path / "JsonLog").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    "kwargs",
    [{"max": -1}, {"stall_s": 0}, {"start_s": -1}, {"min_procs": 0}],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_restart_refuses(kwargs):
    name, value = next(iter(kwargs.items()))
    with pytest.raises(ValueError, match=f"{name}={value}"):
        Restart(**kwargs)
