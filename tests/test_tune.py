"""`monarch-rocm tune`: a candidate is checked before it is timed, and wins only where it was faster.

Kernels run in Triton's interpreter on tiny shapes, against a clock that says what a test wants.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from support import DEVICE

from monarch_rocm import MonarchShape, cli, dispatch, launches, plan, timing, tune
from monarch_rocm.kernels import space, tuning

pytestmark = pytest.mark.skipif(
    dispatch.why_not_triton(torch.float32, DEVICE) is not None, reason="no Triton"
)
device = torch.device(DEVICE)
arch = tuning.architecture(device)
SHAPE = MonarchShape(32, 48, 2, layout="interleaved")
SPACE = {
    "interleave": {"configs": [{"BT": [1, 2], "BR": [4], "BC": [16], "num_warps": [4], "num_stages": [1]}]},
    "bdmm_wgrad": {
        "configs": [
            {
                "BO": [16],
                "BI": [16],
                "BT": [16],
                "num_warps": [1, 2],
                "num_stages": [1],
                "PROGRAMS": [8],
                "MIN_STEPS": [1],
            }
        ]
    },
    "bdmm": {
        "configs": [
            {"BT": [16, 32], "BO": [16, 32], "BI": [16, 32], "num_warps": [1], "num_stages": [1]},
            {"BT": [32], "BO": [4096], "BI": [16], "num_warps": [1], "num_stages": [1]},
        ]
    },
    "bdmv": {"configs": [{"BT": [4, 16], "BO": [16], "BI": [16], "num_warps": [1], "num_stages": [1]}]},
    "fused": {"configs": [{"BT": [16, 32], "num_warps": [1], "num_stages": [1]}]},
    "chained": {
        "configs": [
            {"BT": [16], "BO": [16], "BI": [16], "PROGRAMS": [2], "num_warps": [1], "num_stages": [1]}
        ]
    },
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty cache of the user's, and a small search space."""
    file = tmp_path / "space.json"
    entries = {kernel: {**entry, "rocm": {}, "knobs": []} for kernel, entry in SPACE.items()}
    file.write_text(json.dumps(entries))
    monkeypatch.setattr(space, "SPACE", file)
    monkeypatch.setenv("MONARCH_ROCM_CACHE_DIR", str(tmp_path / "cache"))
    space.candidates.cache_clear()
    tuning.refresh()
    yield tmp_path / "cache" / arch
    space.candidates.cache_clear()
    tuning.refresh()


@pytest.fixture
def clock(monkeypatch):
    """Sets what runs take, by their config, None for PyTorch's and what "auto" takes."""

    def set_price(price):
        def measure(runs, rounds, train):
            for run in runs.values():
                run()
            rivals = (tune.PYTORCH, tune.AUTO)
            return {name: [price(None if name in rivals else json.loads(name))] * rounds for name in runs}

        monkeypatch.setattr(timing, "measure", measure)

    return set_price


def stage_task():
    """The first stage of a layer: two blocks of 32 x 32, 32 tokens."""
    operations = launches.forward(MonarchShape(64, 96, 2), 32, False)
    return next(task for task in launches.tasks(operations) if task.kernel == "bdmm")


def test_the_fastest_config_wins_and_only_if_it_beats_its_rivals(clock):
    task = stage_task()
    clock(lambda config: 100 if config is None else config["BI"] + config["BT"])
    found = tune.search(task, torch.float32, device, 4)
    assert (found.config["BT"], found.config["BI"]) == (32, 16)
    assert found.wins
    assert (found.time, found.rivals, found.skipped) == (48, {tune.PYTORCH: 100, tune.AUTO: 100}, 0)
    clock(lambda config: 48 if config is None else config["BI"] + config["BT"])
    assert not tune.search(task, torch.float32, device, 4).wins


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU other than AMD's knows no such options")
def test_compiler_options_are_tried_about_the_best_config_on_rocm_alone(clock, monkeypatch):
    task = stage_task()
    knobs = [{"matrix_instr_nonkdim": [16, 32], "kpack": [1, 2]}, {"waves_per_eu": [0, 2, 4]}]
    entries = {"bdmm": {**SPACE["bdmm"], "rocm": {}, "knobs": knobs}}
    space.SPACE.write_text(json.dumps(entries))

    def price(config):
        if config is None:
            return 200
        gain = {"matrix_instr_nonkdim": {32: 4}, "kpack": {2: 2}, "waves_per_eu": {2: 1}}
        return config["BI"] + config["BT"] - sum(gain[name].get(config.get(name), 0) for name in gain)

    clock(price)
    plain = tune.search(task, torch.float32, device, 4)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    found = tune.search(task, torch.float32, device, 4)
    options = {"matrix_instr_nonkdim": 32, "kpack": 2, "waves_per_eu": 2}
    assert found.config == plain.config | options
    assert found.time == plain.time - 7


def test_operations_that_share_a_row_are_judged_by_their_sum(clock):
    task = stage_task()
    twice = replace(task, operations=task.operations * 2)
    clock(lambda config: 100 if config is None else config["BI"])
    found = tune.search(twice, torch.float32, device, 4)
    assert found.time == 32
    assert found.rivals[tune.PYTORCH] == 200


def test_a_better_rival_of_the_same_turn_is_not_beaten(monkeypatch):
    """A kernel also competes with what "auto" runs without it, such as another kernel."""

    def measure(runs, rounds, train):
        price = {tune.PYTORCH: 100, tune.AUTO: 40}
        return {name: [price.get(name, 50)] * rounds for name in runs}

    monkeypatch.setattr(timing, "measure", measure)
    assert not tune.search(stage_task(), torch.float32, device, 4).wins


def test_what_auto_runs_without_the_kernel_is_what_is_timed(clock, monkeypatch):
    """Not the kernel itself, though an earlier row says that it wins."""
    task = stage_task()

    def auto():
        return dispatch.product_for("auto", torch.float32, device, task.n_out, task.n_in, task.tokens)

    meanwhile = []
    clock(lambda config: meanwhile.append(auto()) or (100 if config is None else 50))
    tune.keep(tune.search(task, torch.float32, device, 4), torch.float32, arch)
    assert auto() is not None
    meanwhile.clear()
    tune.search(task, torch.float32, device, 4)
    assert set(meanwhile) == {None}
    assert auto() is not None


def failing(how):
    real = launches.KERNELS["bdmm"].launch

    def launch(operation, operands, config):
        if config["BI"] == 16:
            if how == "raises":
                raise RuntimeError("out of resource: shared memory")
            (y,) = real(operation, operands, config)
            if how == "unwritten":
                return (torch.empty_like(y),)
            y.view(-1)[3] = {"wrong": 9.0, "nan": float("nan")}[how]
            return (y,)
        return real(operation, operands, config)

    return launch


@pytest.mark.parametrize("how", ["raises", "wrong", "nan", "unwritten"])
def test_candidates_that_fail_are_skipped_and_counted(how, clock, monkeypatch):
    """The fastest ones at that."""
    clock(lambda config: 100 if config is None else config["BI"])
    broken = replace(launches.KERNELS["bdmm"], launch=failing(how))
    monkeypatch.setitem(launches.KERNELS, "bdmm", broken)
    found = tune.search(stage_task(), torch.float32, device, 4)
    assert found.config["BI"] == 32
    assert found.skipped == 1
    assert not torch.are_deterministic_algorithms_enabled()


def test_where_no_candidate_runs_the_present_config_stays_and_loses(clock, monkeypatch):
    clock(lambda config: 100)

    def launch(*args):
        raise RuntimeError("no kernel image")

    monkeypatch.setitem(launches.KERNELS, "bdmm", replace(launches.KERNELS["bdmm"], launch=launch))
    task = stage_task()
    present = tuning.lookup("bdmm", device, torch.float32, task.n_out, task.n_in, task.tokens)
    found = tune.search(task, torch.float32, device, 4)
    assert (found.config, found.wins, found.time) == (present["config"], False, None)
    assert found.skipped == len(tune.candidates(task, torch.float32, device))


def test_candidates_fit_shape_and_shared_memory(monkeypatch):
    task = stage_task()
    present, *others = tune.candidates(task, torch.float32, device)
    assert present == tuning.lookup("bdmm", device, torch.float32, 32, 32, 32)["config"]
    assert [(c["BT"], c["BO"], c["BI"]) for c in others] == [(32, 32, 16), (32, 32, 32)]
    monkeypatch.setattr(tune, "_shared_memory", lambda device: 64 * 16 * 4)
    assert tune.candidates(task, torch.float32, device) == [present, others[0]]


@pytest.mark.parametrize(
    ("ours", "faster"),
    [([90] * 8, True), ([99] * 8, False), ([80] * 5 + [120] * 3, False), ([80] * 6 + [120] * 2, True)],
)
def test_faster_means_beyond_noise(ours, faster):
    assert tune.is_faster(ours, [100] * 8) == faster


def test_auto_takes_the_last_winner_of_those_that_could_serve():
    """As `dispatch` does: the kernel for few tokens before the general one, if it won."""
    operations = launches.forward(MonarchShape(64, 96, 2), 4, False)
    tasks = {task.kernel: task for task in launches.tasks(operations) if (task.n_out, task.n_in) == (32, 32)}
    assert tasks["bdmm"].operations == operations[1:2]
    assert tasks["bdmv"].operations == operations[:1]

    def takes(**wins):
        found = [tune.Found(tasks[name], {}, won, 1.0, {}, 0) for name, won in wins.items()]
        return {name: tune.taken(tasks[name], found) for name in wins}

    assert takes(bdmm=False, bdmv=False) == {"bdmm": "PyTorch", "bdmv": "auto without it"}
    assert takes(bdmm=True, bdmv=False) == {"bdmm": "bdmm", "bdmv": "auto without it"}
    assert takes(bdmm=True, bdmv=True) == {"bdmm": "bdmv", "bdmv": "bdmv"}


def tuned(train=True, tokens=(3,)):
    console = Console(record=True, width=240, file=open(os.devnull, "w"))  # noqa: SIM115
    found = tune.tune([SHAPE], tokens, torch.float32, device, train, 4, console)
    return found, console.export_text()


def test_tune_writes_a_row_for_each_launch_and_lookups_take_it(clock, folder):
    clock(lambda config: 100 if config is None else 50 + config["num_warps"])
    found, text = tuned()
    names = {each.task.kernel for each in found}
    assert names == {"bdmm", "bdmv", "bdmm_wgrad", "interleave", "fused"}
    assert {file.stem for file in folder.glob("*.json")} == names
    for each in found:
        task = each.task
        row = tuning.exact(task.kernel, arch, 4, task.n_out, task.n_in, task.tokens)
        assert row["wins"]
        assert row["config"] == each.config
        assert each.time < 100 * len(task.operations)
    assert {each.task.tokens for each in found} == {4}
    chosen = plan(SHAPE, 3, torch.float32, device, backend="auto" if device.type == "cuda" else "triton")
    assert [kernel["file"] for kernel in chosen.kernels] == [folder / "fused.json"]
    for word in ("bdmm_wgrad", "24 x 16", "BT=16", "PyTorch", "auto takes", str(folder)):
        assert word in text


def test_without_train_only_forward_launches_are_tuned(clock):
    clock(lambda config: 100)
    found, _ = tuned(train=False, tokens=(4,))
    assert {each.task.kernel for each in found} == {"interleave", "bdmm", "bdmv", "fused", "chained"}
    assert not any(each.wins for each in found)


def test_tune_replaces_a_truncated_file_and_keeps_other_rows(clock, folder):
    clock(lambda config: 100)
    tuned(train=False, tokens=(4,))
    whole = (folder / "bdmm.json").read_text()
    tuned(train=False, tokens=(2,))
    assert len(tuning.own_table("bdmm", arch)[1]["4"]) == 2 * len(json.loads(whole)["4"])
    (folder / "bdmm.json").write_text(whole[:-20])
    tuning.refresh()
    with pytest.warns(UserWarning, match="is ignored"):
        tuned(train=False, tokens=(4,))
    assert (folder / "bdmm.json").read_text() == whole


AT_ONCE = """
import io, os, sys, torch
from rich.console import Console
from monarch_rocm import MonarchShape, timing, tune
from monarch_rocm.kernels import space, tuning
from pathlib import Path
space.SPACE = Path(sys.argv[1])
timing.measure = lambda runs, rounds, train: {
    name: [100.0 if name[0] != "{" else 50.0] * rounds for name in runs
}

def one():
    console = Console(file=io.StringIO())
    shape = MonarchShape(32, 48, 2)
    for found in tune.tune([shape], [2], torch.float32, torch.device("cpu"), False, 4, console):
        task = found.task
        assert tuning.exact(task.kernel, "default", 4, task.n_out, task.n_in, task.tokens)["wins"]

children = []
for _ in range(8):
    children.append(os.fork())
    if not children[-1]:
        try:
            one()
            os._exit(0)
        finally:
            os._exit(1)
print([os.waitpid(child, 0)[1] for child in children])
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="its processes use the interpreter")
def test_eight_processes_tune_at_once(folder):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error::UserWarning", "-c", AT_ONCE, str(space.SPACE)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == f"{[0] * 8}\n", done.stderr
    assert len(tuning.read(folder / "interleave.json", "interleave")["4"]) == 1


@pytest.mark.gpu
def test_tune_measures_on_the_gpu(folder, capsys):
    arguments = ["tune", "256", "512", "--tokens", "4", "64", "--rounds", "4", "--train"]
    assert cli.main([*arguments, "--dtype", "bfloat16"]) == 0
    assert "written" in capsys.readouterr().out
    rows = tuning.own_table("bdmm", arch)[1]["2"]
    assert rows
    assert Path(plan(MonarchShape(256, 512), 64, torch.bfloat16, "cuda", backend="triton").kernels[0]["file"])
