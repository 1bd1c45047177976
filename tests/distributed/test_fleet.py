"""One program and its workers, on torchmonarch: records, faults, and nothing left behind."""

import asyncio
import csv
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("monarch.actor", reason="torchmonarch is not installed, or has no wheel for this Python")

from distributed.jobs import Plain, Trainer
from distributed.support import spawn
from monarch_rocm.distributed import Checkpoints, Fleet, Restart, TrainingError
from monarch_rocm.distributed.loop import Seat, Teller, Training
from monarch_rocm.distributed.mark import Mark

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def fleet():
    return Fleet.local(procs=2, device="cpu")


def wait_gone(pids, seconds=15):
    """Whether all processes have ended in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not [pid for pid in pids if alive(pid)]:
            return True
        time.sleep(0.05)
    return False


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def undisturbed(rank, ranks, steps, folder):
    """Losses of the same job in processes that no fleet has started."""
    trainer = Trainer(rank, {}, folder)
    return [trainer.train_step(step)["loss"].item() for step in range(steps)]


FAULTS = {(7, 1): "kill", (12, 0): "raise", (17, 1): "hang"}


@pytest.mark.slow
def test_losses_after_faults_equal_an_undisturbed_run(fleet, tmp_path):
    """A kill, an exception, a hang, and the newest checkpoint damaged: bit for bit the same losses."""
    expected = spawn(undisturbed, 2, tmp_path / "alone", 2, 20, tmp_path)
    build = functools.partial(Trainer, faults=FAULTS, folder=tmp_path)
    checkpoints = Checkpoints(tmp_path / "checkpoints", every=5)
    logs = [tmp_path / "log.csv", tmp_path / "log.jsonl"]
    run = fleet.train(
        build, steps=20, checkpoints=checkpoints, restart=Restart(max=3, stall_s=8), log=logs, dashboard=True
    )
    losses, attempts = {}, {}
    for record in run:
        if (record.step, record.attempt) == (11, 1):
            # The exception comes next: what it would go on from is broken under it.
            newest = checkpoints.folder(10)
            (newest / ".metadata").unlink()
        for rank, metrics in enumerate(record.per_rank):
            assert losses.setdefault((record.step, rank), metrics["loss"]) == metrics["loss"]
        attempts.setdefault(record.attempt, []).append(record.step)
    assert losses == {(step, rank): expected[rank][step] for step in range(20) for rank in (0, 1)}
    result = run.result
    assert (result.steps, result.ranks, result.first_step) == (20, 2, 0)
    kill, error, hang = result.restarts
    assert (kill.rank, kill.failed_step, kill.resumed_step) == (1, 7, 5)
    assert kill.cause.startswith("rank 1 died at step 7: ")
    assert (error.rank, error.failed_step, error.resumed_step) == (0, 12, 5)
    assert error.cause == "rank 0 failed at step 12: ValueError: a bad batch"
    assert (hang.rank, hang.failed_step, hang.resumed_step) == (1, 17, 15)
    assert hang.cause.startswith("rank 1 hangs in step 17: no progress for 8 s, in ")
    assert "jobs.py" in hang.cause
    assert all(0 < restart.seconds < 90 for restart in result.restarts)
    assert result.passed_over == ["step-00000010 is not whole: .metadata is missing"]
    # What a killed process has not sent is lost, no more; what others have to tell all comes, once.
    assert attempts[0] == list(range(len(attempts[0])))
    assert 5 <= len(attempts[0]) <= 7
    assert attempts[1] == list(range(5, 12))
    assert attempts[2] == list(range(5, 17))
    assert attempts[3] == list(range(15, 20))
    rows = list(csv.DictReader(logs[0].open()))
    assert {(int(r["step"]), int(r["rank"])): float(r["loss"]) for r in rows} == losses
    lines = [json.loads(line) for line in logs[1].read_text().splitlines()]
    assert [line["cause"] for line in lines if line["kind"] == "restart"][1] == error.cause
    # A later program goes on from there, and has nothing to do.
    again = fleet.train(build, steps=20, checkpoints=checkpoints).wait()
    assert (again.first_step, again.steps) == (20, 20)


def broken(rank):
    if rank == 1:
        raise KeyError("learning_rate")
    time.sleep(3600)


def test_an_error_in_build_ends_the_run_with_its_cause(fleet):
    """At once, though the other rank would wait and restarts are left."""
    began = time.monotonic()
    with pytest.raises(TrainingError) as caught:
        fleet.train(broken, steps=3, restart=Restart(max=3)).wait()
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 1 failed in build: KeyError: 'learning_rate'"
    assert "in broken" in str(caught.value)
    assert caught.value.rank == 1
    assert time.monotonic() - began < 60


def test_async_records_and_what_is_left_after_a_break(fleet):
    """`async for` sees every step; leaving it ends the workers."""

    async def some():
        found = []
        run = fleet.train(Plain, steps=10_000)
        async for record in run:
            found.append((record.step, *(m["pid"] for m in record.per_rank)))
            if record.step == 5:
                break
        run.close()
        return found

    found = asyncio.run(some())
    assert [step for step, *_ in found] == list(range(6))
    assert wait_gone(found[-1][1:])


def test_an_exception_in_the_users_loop_ends_the_workers(fleet):
    pids = []

    def look():
        for record in fleet.train(Plain, steps=10_000):
            pids.extend(metrics["pid"] for metrics in record.per_rank)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        look()
    assert len(pids) == 2
    assert wait_gone(pids)


def test_a_log_that_cannot_be_written_ends_the_run(fleet, monkeypatch, tmp_path):
    """The user's loop gets the error and does not wait for records for ever."""
    from monarch_rocm.distributed import follow

    def full(self, record):
        raise OSError("no space left on device")

    monkeypatch.setattr(follow.CsvLog, "record", full)
    with pytest.raises(OSError, match="no space left"):
        fleet.train(Plain, steps=10_000, log=tmp_path / "log.csv").wait()


CONTROLLER = """
import sys
sys.path.insert(0, {tests!r})
from distributed.jobs import Plain
from monarch_rocm.distributed import Fleet, Restart
run = Fleet.local(procs=2, device="cpu").train(Plain, steps=100_000, restart=Restart(max=3))
try:
    for record in run:
        if record.step == 3:
            print(*(metrics["pid"] for metrics in record.per_rank), flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("how", ["SIGINT", "SIGKILL"])
def test_no_process_outlives_its_controller(how):
    """Ctrl-C ends the loop, and a killed controller takes its workers along."""
    code = CONTROLLER.format(tests=str(HERE.parent))
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Ctrl-C counts, also where the tests are a shell's background job, which ignores it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as controller:
        try:
            pids = [int(pid) for pid in controller.stdout.readline().split()]
            assert len(pids) == 2
            controller.send_signal(getattr(signal, how))
            assert controller.wait(30) == {"SIGINT": 0, "SIGKILL": -9}[how]
            assert controller.stdout.read() == ("interrupted\n" if how == "SIGINT" else "")
        finally:
            controller.kill()
    assert wait_gone(pids)


def children(pid):
    lists = Path(f"/proc/{pid}/task").glob("*/children")  # by the thread that started them
    return [int(child) for one in lists for child in one.read_text().split()]


def test_no_process_outlives_a_controller_killed_while_they_start():
    """The runtime alone would leave them."""
    code = CONTROLLER.format(tests=str(HERE.parent))
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as controller:
        while len(found := children(controller.pid)) < 2:
            time.sleep(0.01)
        time.sleep(0.2)
        controller.kill()
    assert wait_gone(found)


def test_a_torchrun_script_runs_unmodified(fleet, tmp_path):
    """torchrun's environment, arguments, a process group; an exit code is an error."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, pathlib, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1); dist.all_reduce(x)\n"
        "assert __name__ == '__main__'\n"
        "names = 'RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE'\n"
        "said = [x.item(), *sys.argv[1:], *(os.environ[n] for n in names)]\n"
        "pathlib.Path(__file__).with_name('said' + os.environ['RANK']).write_text(repr(said))\n"
        "dist.destroy_process_group()\n"
        "sys.exit(3 if '--fail' in sys.argv and os.environ['RANK'] == '1' else 0)\n"
    )
    fleet.spmd(script, "--lr", "0.1")
    assert (tmp_path / "said1").read_text() == "[2.0, '--lr', '0.1', '1', '1', '2', '2']"
    with pytest.raises(TrainingError, match=r"rank 1 failed in script: .*exit code 3"):
        fleet.spmd(script, "--fail")
    with pytest.raises(FileNotFoundError, match=r"no\.py"):
        fleet.spmd(tmp_path / "no.py")


@pytest.mark.slow
def test_several_hosts_by_a_job_and_fewer_of_them_after_a_fault(tmp_path):
    """Two hosts of torchmonarch's ProcessJob; the one whose worker is killed is left out."""
    from monarch.job import ProcessJob

    job = ProcessJob({"trainers": 2}, env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    try:
        fleet = Fleet.from_job(job, "trainers", procs=1, device="cpu")
        build = functools.partial(Trainer, faults={(7, 1): "kill"}, folder=tmp_path)
        run = fleet.train(
            build,
            steps=12,
            checkpoints=Checkpoints(tmp_path / "checkpoints", every=5),
            restart=Restart(max=1, min_procs=1),
        )
        ranks = {record.step: len(record.per_rank) for record in run}
    finally:
        job.kill()
    assert ranks == {step: 2 if step < 5 else 1 for step in range(12)}
    assert run.result.restarts[0].rank == 1


@pytest.mark.slow
def test_fewer_processes_after_a_fault_and_all_that_is_told_in_the_end(tmp_path):
    """The one that dies is left out; when restarts are used up, every step is there, and the cause first."""
    build = functools.partial(Trainer, faults={(7, 1): "kill", (9, 0): "raise"}, folder=tmp_path)
    run = Fleet.local(procs=2, device="cpu").train(
        build,
        steps=100,
        checkpoints=Checkpoints(tmp_path / "checkpoints", every=5),
        restart=Restart(max=1, min_procs=1),
    )
    ranks = {}

    def look():
        for record in run:
            ranks[record.step] = len(record.per_rank)

    with pytest.raises(TrainingError) as caught:
        look()
    assert ranks == {step: 2 if step < 5 else 1 for step in range(9)}
    assert run.result.ranks == 1
    first, *rest = str(caught.value).splitlines()
    assert first == "rank 0 failed at step 9: ValueError: a bad batch"
    assert any("jobs.py" in line for line in rest)
    assert rest[-2] == "restarts before it:"
    assert rest[-1].startswith("  1: rank 1 died at step 7: ")
    assert (caught.value.rank, caught.value.step) == (0, 9)


def test_torch_comes_first_in_workers_on_rocm(monkeypatch):
    """Its libraries must be there before torchmonarch looks for the system's."""
    from monarch_rocm.distributed.worker import command_here

    for hip, there in (("7.0", True), (None, False)):
        monkeypatch.setattr(torch.version, "hip", hip)
        code = command_here().args[1]
        compile(code, "birth", "exec")
        assert ("import torch\nrunpy.run_module(" in code) == there


ATTACHED = """
import sys
sys.path.insert(0, {tests!r})
from distributed.jobs import Plain
from monarch_rocm.distributed import Fleet, worker
worker.LEASE_S = 8
run = Fleet.attach([{address!r}], procs=1, device="cpu").train(Plain, steps=100_000)
for record in run:
    if record.step == 3:
        print(*(metrics["pid"] for metrics in record.per_rank), flush=True)
"""


@pytest.mark.slow
def test_attached_workers_train_and_end_after_their_controller():
    """A host started by hand on a loopback address, as on another machine, serves two programs in turn."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "monarch_rocm.distributed", address]
    code = ATTACHED.format(tests=str(HERE.parent), address=address)
    with subprocess.Popen(command, env=environment, start_new_session=True) as host:
        try:
            records = list(Fleet.attach([address], procs=1, device="cpu").train(Plain, steps=3))
            assert [record.step for record in records] == [0, 1, 2]
            with subprocess.Popen(
                [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
            ) as controller:
                pids = [int(pid) for pid in controller.stdout.readline().split()]
                controller.kill()
            assert len(pids) == 1
            assert wait_gone(pids, 30)
        finally:
            os.killpg(host.pid, signal.SIGKILL)


@pytest.mark.slow
def test_the_example_runs():
    """Two workers on the CPU, a loss that falls."""
    command = [sys.executable, str(HERE.parents[1] / "examples" / "train_distributed.py")]
    options = ["--procs=2", "--steps=26", "--width=64", "--depth=1"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 2
    assert losses[1] < losses[0] - 0.5
    assert "26 steps on 2 workers" in done.stdout


def test_mesh_is_torchmonarchs_own(fleet):
    """The way out: actors of one's own."""
    from distributed.actors import Adder

    adder = fleet.mesh.spawn("adder", Adder)
    assert [value for _, value in adder.add.call(2).get()] == [2, 3]
    fleet.mesh.stop().get()


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"build": 3, "steps": 1}, TypeError, "build must be a function"),
        ({"build": Plain, "steps": 0}, ValueError, "steps=0"),
        ({"build": Plain, "steps": 1, "log": "run.txt"}, ValueError, "run.txt"),
        ({"build": functools.partial(Plain, threading.Lock()), "steps": 1}, TypeError, "pickle"),
    ],
    ids=["build", "steps", "log", "pickle"],
)
def test_what_cannot_run_is_refused_before_a_process_starts(fleet, kwargs, error, text):
    with pytest.raises(error, match=text):
        fleet.train(kwargs.pop("build"), **kwargs)


def test_workers_say_what_a_build_lacks():
    """A trainer without an optimizer, a step that returns no dict: errors that name what is wanted."""
    told = []
    teller = Teller(0, 0, told.append, 60, Mark())
    with pytest.raises(TypeError, match="train_step must return a dict"):
        teller.metrics(0, 1.5)
    teller.stop()
    job = Training(object, 1, None, 60, "cpu")
    assert (job.steps, Seat(3, 8, 1, 2, "a", 1).environment()["GROUP_RANK"]) == (1, "1")
