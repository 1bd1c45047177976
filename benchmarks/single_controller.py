"""A fleet against torchrun: the same model and step function, under one controller and under torchrun.

    python benchmarks/single_controller.py steady start recovery faults tp --out benchmarks/results

- steady: ms a step, by the clock and of rank 0's processor time, of torchrun, of the same script under
  `fleet.spmd`, and of `fleet.train` with metrics of every step streamed back. All three run at once and
  take turns, `SLICE` steps each, so that a busy machine slows all alike; ratios are of neighbouring turns.
- start: from the command to the end of the first step.
- recovery: from the SIGKILL of a worker to the end of the first new step, against
  `torchrun --max-restarts`, with and without standby processes.
- faults: random faults in a row, and the final loss against an undisturbed run's.
- tp: bytes that tensor parallelism sends a step, by formula and by the kernel's count (gloo), and time,
  against Megatron's column and row split of the dense layers.

On two GPUs: `python benchmarks/single_controller.py steady start recovery tp --device cuda --out ...`. On one
the first three work, with `--procs 1`.
"""

import argparse
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import wire
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from monarch_rocm import MonarchLinear
from monarch_rocm.distributed import Checkpoints, Fleet, MonarchParallel, NormParallel, Restart, parallelize

SLICE = 50  # steps of a turn
DRIVERS = ("torchrun", "spmd", "train")
GIVE_UP = 120  # seconds after a kill; a recovery of so many is none


class Trainer:
    """Perceptrons with residuals on random data, the same under every driver.

    Args:
        plan (dict): `width`, `depth`, `batch`, `device`, and what the measurement needs.
    """

    def __init__(self, rank, plan):
        own_session()
        torch.manual_seed(0)
        width, self.plan, self.rank = plan["width"], plan, rank
        self.device = "cuda" if plan["device"] == "cuda" else "cpu"
        blocks = []
        for _ in range(plan["depth"]):
            up = MonarchLinear(width, 4 * width, nblocks=4, device=self.device)
            down = MonarchLinear(4 * width, width, nblocks=4, device=self.device)
            blocks += [nn.LayerNorm(width, device=self.device), up, nn.GELU(), down]
        ranks = dist.get_world_size()
        self.model = parallelize(nn.Sequential(*blocks), init_device_mesh(self.device, (ranks,)), "ddp")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.ends = []
        if "pid" in plan and rank == ranks - 1:
            Path(plan["pid"]).write_text(str(os.getpid()))

    def train_step(self, step):
        plan = self.plan
        if "turns" in plan and step % SLICE == 0:
            self.take_turn(step)
        self.fault(step)
        generator = torch.Generator().manual_seed(2 * step + self.rank)
        x = torch.randn(plan["batch"], plan["width"], generator=generator).to(self.device)
        loss = (self.model(x) - x.roll(1, -1)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.device == "cuda" and "pace" in plan:
            torch.cuda.synchronize()
        self.ends.append(time.time())
        if "ends" in plan and self.rank == 0:
            with Path(plan["ends"]).open("a") as file:
                file.write(f"{step} {self.ends[-1]}\n")
        if "pace" in plan:
            time.sleep(plan["pace"])
        return {"loss": loss.detach()}

    def take_turn(self, step):
        """Leave the turn to the next driver and wait for one's own; then time from a common point."""
        turns, name = Path(self.plan["turns"]), self.plan["driver"]
        if self.rank == 0:
            if step:
                if self.device == "cuda":
                    torch.cuda.synchronize()
                ends = [*self.ends, time.time()] if self.device == "cuda" else self.ends
                taken = ends[-1] - self.began
                burnt = time.process_time() - self.burnt
                with (turns / f"{name}.ms").open("a") as file:
                    file.write(f"{1e3 * taken / SLICE} {1e3 * burnt / SLICE}\n")
                pass_turn(turns, name)
            while step + 1 < self.plan["steps"] and (turns / "turn").read_text() != name:
                time.sleep(0.005)
        dist.barrier()
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.ends, self.began, self.burnt = [], time.time(), time.process_time()

    def fault(self, step):
        """A fault of the plan, once."""
        kind = self.plan.get("faults", {}).get((step, self.rank))
        if kind is None:
            return
        mark = Path(self.plan["marks"]) / f"{step}-{self.rank}"
        if mark.exists():
            return
        mark.touch()
        if kind == "damage":  # the newest checkpoint, and then the process
            folders = sorted(Path(self.plan["checkpoints"]).glob("step-*"))
            if folders:
                data = sorted(folders[-1].glob("*.distcp"))[0]
                data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
        if kind in ("kill", "damage"):
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "hang":
            time.sleep(3600)
        raise ValueError("a random fault")


def own_session():
    """Linux may share processors out between sessions, and torchrun gives each worker one of its own."""
    if os.getsid(0) != os.getpid():
        os.setpgid(0, os.getpgid(os.getppid()))  # a leader of a group cannot leave its session
        os.setsid()


def pass_turn(turns, name):
    draft = turns / f"turn.{name}"
    draft.write_text(DRIVERS[(DRIVERS.index(name) + 1) % len(DRIVERS)])
    draft.replace(turns / "turn")


def script(plan):
    """What torchrun runs, and `fleet.spmd`: the loop that everybody writes."""
    rank = int(os.environ["RANK"])
    if plan["device"] == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if plan["device"] == "cuda" else "gloo")
    trainer = Trainer(rank, plan)
    first, checkpoints = 0, None
    if "checkpoints" in plan:
        checkpoints = Checkpoints(plan["checkpoints"], every=plan["every"])
        loaded = checkpoints.load(trainer.model, trainer.optimizer)
        first = 0 if loaded is None else loaded[0]
    for step in range(first, plan["steps"]):
        trainer.train_step(step)
        if checkpoints is not None and checkpoints.due(step + 1, plan["steps"]):
            checkpoints.save(step + 1, trainer.model, trainer.optimizer)
    del trainer  # whose DDP, freed after the group, can wait for a thread of gloo's for ever (torch 2.13)
    dist.destroy_process_group()


def controller(plan):
    """The same under `fleet.train` or `fleet.spmd`."""
    fleet = Fleet.local(procs=plan["procs"], device=plan["device"])
    if plan["driver"] == "spmd":
        fleet.spmd(__file__, "worker", write(plan))
        return
    checkpoints = Checkpoints(plan["checkpoints"], every=plan["every"]) if "checkpoints" in plan else None
    restart = Restart(max=plan.get("restarts", 0), standby=plan.get("standby", True), stall_s=600)
    build = functools.partial(Trainer, plan=plan)
    for _ in fleet.train(build, steps=plan["steps"], checkpoints=checkpoints, restart=restart):
        pass


def write(plan):
    folder = tempfile.mkdtemp(dir=plan["folder"])
    path = Path(folder) / "plan.json"
    path.write_text(json.dumps(plan))
    return str(path)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def launch(plan):
    """Start a driver, as a user's shell would."""
    if plan["driver"] == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={plan['procs']}"]
        command += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
        command += [f"--max-restarts={plan.get('restarts', 0)}", __file__, "worker", write(plan)]
    else:
        command = [sys.executable, __file__, "controller", write(plan)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    log = (Path(plan["folder"]) / f"{plan['driver']}.log").open("a")
    return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def finish(process, plan):
    code = process.wait()
    if code:
        log = Path(plan["folder"]) / f"{plan['driver']}.log"
        raise RuntimeError(f"{plan['driver']} ended with {code}:\n{log.read_text()[-3000:]}")


def common(args):
    """What every plan of a comparison has."""
    return {**sizes(args.device), "procs": args.procs}


def sizes(device):
    if device == "cuda":
        return {"width": 2048, "depth": 4, "batch": 4096, "device": "cuda"}
    return {"width": 256, "depth": 2, "batch": 64, "device": "cpu"}


def steady(args, folder):
    """Paired turns of the three drivers."""
    (folder / "turn").write_text(DRIVERS[0])
    plan = {**common(args), "folder": str(folder), "turns": str(folder)}
    plan["steps"] = SLICE * args.turns + 1  # the step after the last turn ends it
    processes = [(launch({**plan, "driver": name}), {**plan, "driver": name}) for name in DRIVERS]
    for process, its in processes:
        finish(process, its)
    warm = 2  # turns in which caches fill and the others' processes still start
    told = {name: (folder / f"{name}.ms").read_text().splitlines()[warm:] for name in DRIVERS}
    found = {"procs": args.procs, "turns": len(told["train"]), "steps_a_turn": SLICE}
    for column, what in enumerate(("wall ms/step", "processor ms/step")):
        turns = {name: [float(line.split()[column]) for line in told[name]] for name in DRIVERS}
        found |= {f"{name} {what}": statistics.median(values) for name, values in turns.items()}
        for name, other in (("spmd", "torchrun"), ("train", "torchrun"), ("train", "spmd")):
            ratios = [a / b for a, b in zip(turns[name], turns[other], strict=True)]
            found[f"{name} / {other}, {what}"] = median_with_interval(ratios)
        found[f"all {what}"] = turns
    return found


def median_with_interval(values):
    """Median and its 95 % interval by bootstrap."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(2000))
    return {"median": statistics.median(values), "low": medians[50], "high": medians[1949]}


def start(args, folder):
    """Command to first step, in turns."""
    found = {"torchrun": [], "train": []}
    for number in range(args.rounds):
        for name in found:
            ends = folder / f"{name}{number}"
            plan = {
                **common(args),
                "folder": str(folder),
                "steps": 1,
                "ends": str(ends),
                "driver": name,
            }
            began = time.time()
            finish(launch(plan), plan)
            left = time.time()
            first = float(ends.read_text().split()[1])
            found[name].append({"first_step_s": first - began, "whole_s": left - began})
    return {"procs": args.procs, **summary(found)}


def summary(found):
    return {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]} | {"all": rows}
        for name, rows in found.items()
    }


def recovery(args, folder):
    """Kill a worker well into training; how long until training is further on."""
    variants = {
        "torchrun": {"driver": "torchrun"},
        "train": {"driver": "train"},
        "train, no standby": {"driver": "train", "standby": False},
    }
    found = {name: [] for name in variants}
    for number in range(args.rounds):
        for name, variant in variants.items():
            here = folder / f"{name}{number}".replace(" ", "")
            here.mkdir()
            plan = {**common(args), "folder": str(here), "restarts": 3, "steps": 100_000, "every": 20}
            plan |= {"checkpoints": str(here / "ckpt"), "ends": str(here / "ends"), "pid": str(here / "pid")}
            plan |= {"pace": 0.05, **variant}
            process = launch(plan)
            ends = here / "ends"
            while not (ends.exists() and seconds_of(ends) > args.before):
                if process.poll() is not None:
                    finish(process, plan)
                time.sleep(0.1)
            killed = time.time()
            os.kill(int((here / "pid").read_text()), signal.SIGKILL)
            reached = max(int(line.split()[0]) for line in lines(ends))
            first = passed = None
            while passed is None:
                if time.time() > killed + GIVE_UP:  # torchrun's new workers may hang in gloo's handshake
                    first = first or killed + GIVE_UP
                    passed = killed + GIVE_UP
                    break
                if process.poll() is not None:
                    finish(process, plan)
                    raise RuntimeError(f"{name} ended after the kill")
                time.sleep(0.05)
                after = [line.split() for line in lines(ends)]
                again = [(int(s), float(t)) for s, t in after if float(t) > killed + 0.3]
                first = next((t for s, t in again), None)
                passed = next((t for s, t in again if s > reached), None)
            process.terminate()
            process.wait()
            found[name].append({"first_new_step_s": first - killed, "caught_up_s": passed - killed})
    return {"procs": args.procs, "killed_after_s": args.before, **summary(found)}


def lines(path):
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def seconds_of(ends):
    times = [float(line.split()[1]) for line in lines(ends)]
    return times[-1] - times[0] if times else 0.0


def faults(args, folder):
    """Random faults in a row against an undisturbed run."""
    generator = random.Random(args.seed)
    steps, every = 40 * args.count, 15
    chosen = sorted(generator.sample(range(10, steps - 5), args.count))
    kinds = [generator.choice(("kill", "raise", "hang", "damage")) for _ in chosen]
    planned = {(step, generator.randrange(2)): kind for step, kind in zip(chosen, kinds, strict=True)}
    losses, result = {}, None
    for name, plan_faults in (("undisturbed", {}), ("faults", planned)):
        marks, ckpt = folder / f"{name}.marks", folder / f"{name}.ckpt"
        marks.mkdir()
        plan = {**sizes("cpu"), "faults": plan_faults, "marks": str(marks), "checkpoints": str(ckpt)}
        run = Fleet.local(procs=2, device="cpu").train(
            functools.partial(Trainer, plan=plan),
            steps=steps,
            checkpoints=Checkpoints(ckpt, every=every),
            restart=Restart(max=args.count, stall_s=5),
        )
        seen = losses[name] = {}
        for record in run:
            seen[record.step] = [metrics["loss"] for metrics in record.per_rank]
        result = run.result
    equal = losses["undisturbed"] == losses["faults"]
    rows = [r._asdict() | {"planned": planned.get((r.failed_step, r.rank))} for r in result.restarts]
    return {
        "planned": args.count,
        "survived": len(result.restarts),
        "kinds": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "right_cause": sum(row["planned"] is not None for row in rows),
        "all_losses_equal": equal,
        "final_loss": [losses[name][steps - 1] for name in losses],
        "seconds": result.seconds,
        "recovery_s": statistics.median(row["seconds"] for row in rows),
        "checkpoints_passed_over": len(result.passed_over),
        "restarts": rows,
    }


def perceptron(kind, width, device):
    """A residual block's perceptron: `width` to `4 * width` and back, with its norm."""
    torch.manual_seed(0)
    if kind == "dense":
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    else:
        up = MonarchLinear(width, 4 * width, nblocks=8, layout="blocked")
        down = MonarchLinear(4 * width, width, nblocks=8, layout="blocked")
    return nn.Sequential(nn.RMSNorm(width), up, nn.GELU(), down).to(device)


def ways():
    """(name, kind of layers, place of activations between blocks) of every way to split."""
    return (
        ("dense, Megatron", "dense", "replicated"),
        ("Monarch, replicated", "monarch", "replicated"),
        ("Monarch, tokens", "monarch", "tokens"),
        ("Monarch, features", "monarch", "features"),
    )


def split(kind, place, width, mesh, device):
    model = perceptron(kind, width, device)
    if kind == "dense":
        return parallelize_module(model, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
    plan = {"1": MonarchParallel(input=place, output="features")}
    plan["3"] = MonarchParallel(input="features", output=place)
    if place != "replicated":
        plan["0"] = NormParallel(place)
    return parallelize(model, mesh, "tp", plan=plan)


def formula(kind, place, width, tokens, ranks, device):
    """Bytes that a rank sends for a forward and a backward pass, norms aside."""
    if kind == "dense":
        return 2 * int(2 * (ranks - 1) / ranks * tokens * width * 4)
    model = perceptron(kind, width, device)
    up, down = (model[i].shape for i in (1, 3))
    one = MonarchParallel(input=place, output="features").traffic(up, tokens, ranks, 4)
    two = MonarchParallel(input="features", output=place).traffic(down, tokens, ranks, 4)
    return sum(one) + sum(two)


def tp_rank(rank, ranks, folder, device, port, width, tokens, rounds):
    """One rank of the tensor-parallel measurement."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=ranks)
    mesh = init_device_mesh(device, (ranks,))
    models = {}
    for name, kind, place in ways():
        x = torch.randn(1, tokens, width, device=device)
        dim = {"replicated": None, "tokens": -2, "features": -1}[place]
        mine = x if dim is None else x.chunk(ranks, dim)[rank]
        models[name] = split(kind, place, width, mesh, device), mine.contiguous().requires_grad_()

    def step(name):
        model, x = models[name]
        model(x).sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()

    found = {name: {"ms": []} for name in models}
    for name in models:
        for _ in range(3):
            step(name)
        dist.barrier()
        time.sleep(0.3)  # so that what was sent is confirmed
        before = wire.sent()
        for _ in range(10):
            step(name)
        time.sleep(0.3)
        found[name]["sent"] = (wire.sent() - before) / 10
        dist.barrier()
    for _ in range(rounds):
        for name in models:
            dist.barrier()
            began = time.perf_counter()
            for _ in range(10):
                step(name)
            found[name]["ms"].append(1e2 * (time.perf_counter() - began))
    (Path(folder) / f"tp{ranks}-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def tp(args, folder):
    """Bytes and time of a perceptron split over ranks."""
    width, tokens = (4096, 8192) if args.device == "cuda" else (256, 512)
    found = {"width": width, "tokens": tokens, "itemsize": 4}
    for ranks in (args.procs,) if args.device == "cuda" else (2, 4, 8):
        port = 20_000 + os.getpid() % 20_000 + ranks
        torch.multiprocessing.spawn(
            tp_rank, (ranks, str(folder), args.device, port, width, tokens, args.rounds), nprocs=ranks
        )
        told = [json.loads((folder / f"tp{ranks}-{rank}.json").read_text()) for rank in range(ranks)]
        for name, kind, place in ways():
            sent = statistics.mean(one[name]["sent"] for one in told)
            expected = formula(kind, place, width, tokens, ranks, args.device)
            dense = formula("dense", "replicated", width, tokens, ranks, args.device)
            found[f"{ranks} ranks, {name}"] = {
                "formula_bytes": expected,
                "measured_bytes": None if args.device == "cuda" else sent,
                "of_megatron": expected / dense,
                "ms": statistics.median(told[0][name]["ms"]),
            }
    return found


def show(name, found):
    table = Table(title=name, show_header=False)
    for key, value in found.items():
        if key == "restarts" or key.startswith("all "):
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v:.5g}" for k, v in value.items() if isinstance(v, (int, float)))
        table.add_row(key, f"{value:.5g}" if isinstance(value, float) else str(value))
    Console(width=130).print(table)


def environment(device):
    versions = {name: importlib.metadata.version(name) for name in ("torch", "torchmonarch", "monarch-rocm")}
    there = platform.processor() or platform.machine()
    if device == "cuda":
        there = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "date": datetime.date.today().isoformat(),
        "device": there,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        **versions,
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {"steady": steady, "start": start, "recovery": recovery, "faults": faults, "tp": tp}
    parser.add_argument("parts", nargs="+", choices=[*parts])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--procs", type=int, default=2, help="steady, start, recovery, tp on GPUs: workers, a GPU each"
    )
    parser.add_argument(
        "--turns", type=int, default=22, help="steady: turns of each driver, the first 2 for warmth"
    )
    parser.add_argument("--rounds", type=int, default=5, help="start, recovery, tp")
    parser.add_argument(
        "--before", type=float, default=20.0, help="recovery: seconds of training before the kill"
    )
    parser.add_argument("--count", type=int, default=20, help="faults")
    parser.add_argument("--seed", type=int, default=0, help="faults")
    parser.add_argument("--out", type=Path, help="folder of results; a part replaces its older figures")
    args = parser.parse_args()
    if args.device == "cuda" and args.procs > torch.cuda.device_count():
        parser.error(f"--procs {args.procs}, but there are {torch.cuda.device_count()} GPUs")
    if args.device == "cuda" and "tp" in args.parts and args.procs < 2:
        parser.error("tp splits layers over 2 GPUs or more")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    for name in args.parts:
        folder = Path(tempfile.mkdtemp(prefix=f"single-controller-{name}-"))
        before = environment(args.device)
        found = parts[name](args, folder)
        shutil.rmtree(folder)
        show(name, found)
        if args.out is not None:
            path = args.out / f"single_controller_{args.device}.json"
            results = json.loads(path.read_text()) if path.exists() else {}
            key = f"{name}, killed after {args.before:g} s" if name == "recovery" else name
            results[key] = {"environment": before, **found}
            path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] in (["worker"], ["controller"]):
        {"worker": script, "controller": controller}[sys.argv[1]](json.loads(Path(sys.argv[2]).read_text()))
    else:
        main()
