"""What works and what is said where torchmonarch is not installed; what a user sees in a terminal."""

import io
import os
import subprocess
import sys
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


def python(code):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_all_but_the_fleet_works_and_the_fleet_says_what_to_install():
    code = HIDDEN + (
        "import tempfile, torch, torch.distributed as dist, monarch_rocm\n"
        "from monarch_rocm.distributed import *\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "model = torch.nn.Sequential(monarch_rocm.MonarchLinear(8, 8, nblocks=2))\n"
        "model = parallelize(model, init_device_mesh('cpu', (1,)), 'tp')\n"
        "model(torch.ones(2, 8)).sum().backward()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "checkpoints = Checkpoints(tempfile.mkdtemp(), every=1)\n"
        "checkpoints.save(1, model, optimizer)\n"
        "assert checkpoints.load(model, optimizer) == (1, None)\n"
        "try: Fleet.local(procs=2)\n"
        "except ImportError as error: print(error)\n"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert "which is not installed. pip install 'torchmonarch>=0.7,<0.9'" in done.stdout
    assert "under torchrun" in done.stdout


def test_importing_the_package_imports_no_torchmonarch():
    done = python("import sys, monarch_rocm.distributed; print([m for m in sys.modules if m == 'monarch'])")
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
