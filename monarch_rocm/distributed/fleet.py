"""`Fleet`: processes on this machine or on many, and what runs on them."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from monarch_rocm.distributed import run as runs
from monarch_rocm.distributed.attempt import Attempt
from monarch_rocm.distributed.checkpoints import Checkpoints
from monarch_rocm.distributed.follow import sinks
from monarch_rocm.distributed.loop import Script, Training
from monarch_rocm.distributed.run import Restart, Result, Run

if TYPE_CHECKING:
    from monarch.actor import HostMesh, ProcMesh


def engine() -> Any:
    """The actors of torchmonarch, imported after torch, as ROCm needs it."""
    try:
        import monarch.actor
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "monarch"
        version = ".".join(map(str, sys.version_info[:2]))
        what = "which is not installed" if missing else f"which fails to import: {error}"
        raise ImportError(
            f"a Fleet needs torchmonarch, {what}. pip install 'torchmonarch>=0.7,<0.9' (the extra "
            "'distributed') has wheels for Linux on x86-64 with CPython 3.10 to 3.13, and this is "
            f"{version} on {sys.platform}. Without it, monarch_rocm.distributed.parallelize and Checkpoints "
            "work under torchrun",
            name=getattr(error, "name", None),
        ) from error
    atexit.register(runs.close_all)  # runs before the actors' own
    return monarch.actor


class Fleet:
    """Processes that train under this one program; made by `local`, `from_job` or `attach`.

    Nothing runs before `train` or `spmd`, and each of these starts its own processes.

    Attributes:
        hosts (HostMesh): the machines, torchmonarch's own object.
        mesh (ProcMesh): processes for actors of your own, started at first use.
        procs (int): processes on each host.

    Example:
        >>> fleet = Fleet.local(procs=8)                                           # doctest: +SKIP
        >>> run = fleet.train(build, steps=10_000,                                 # doctest: +SKIP
        ...     checkpoints=Checkpoints("ckpt", every=500), restart=Restart(max=3, stall_s=120))
        >>> for record in run: print(record.step, record.metrics)                  # doctest: +SKIP
    """

    def __init__(self, hosts: HostMesh, procs: int, count: int, device: str | None, local: bool) -> None:
        self.hosts, self.procs, self._count, self._local = hosts, procs, count, local
        self._device = device
        self._mesh: ProcMesh | None = None

    def __repr__(self) -> str:
        return f"Fleet(hosts={self._count}, procs={self.procs})"

    @classmethod
    def local(cls, procs: int | None = None, *, device: str | None = None) -> Fleet:
        """Processes on this machine.

        Args:
            procs (int, optional): how many. Default: one for each GPU; one where there is none.
            device (str, optional): "cuda" (ROCm's name too) or "cpu". Default: "cuda" where there is one.

        Raises:
            ImportError: no torchmonarch, with what to install.
            ValueError: `procs` below 1, more than there are GPUs, an unknown device.
        """
        actor = engine()
        _check_device(device)
        gpus = 0 if device == "cpu" else torch.cuda.device_count()
        if procs is None:
            procs = max(1, gpus)
        _check_procs(procs)
        if gpus and procs > gpus:
            raise ValueError(f"procs={procs}, but there are {gpus} GPUs; device='cpu' uses none")
        return cls(actor.this_host(), procs, 1, device, True)

    @classmethod
    def from_job(cls, job: Any, name: str, procs: int, *, device: str | None = None) -> Fleet:
        """Processes on the hosts of a torchmonarch job, which is started where it is not running.

        Args:
            job (JobTrait): SlurmJob, KubernetesJob, ProcessJob. Ending it is up to you (`job.kill()`).
            name (str): which of its meshes of hosts.
            procs (int): processes on each host.
            device (str, optional): as in `local`.
        """
        engine()
        _check_device(device)
        _check_procs(procs)
        hosts = getattr(job.state(cached_path=None), name)
        return cls(hosts, procs, hosts.extent.nelements, device, False)

    @classmethod
    def attach(cls, addresses: Sequence[str], procs: int, *, device: str | None = None) -> Fleet:
        """Processes on machines that each run `python -m monarch_rocm.distributed ADDRESS`.

        Connections are neither encrypted nor authenticated: for a network of your own.

        Args:
            addresses (sequence of str): theirs, "tcp://host:port".
            procs (int): processes on each.
            device (str, optional): as in `local`.
        """
        _check_device(device)
        _check_procs(procs)
        if isinstance(addresses, str) or not addresses:
            raise ValueError(f"addresses must be a sequence of 'tcp://host:port', not {addresses!r}")
        hosts = engine().attach_to_workers(ca="trust_all_connections", workers=list(addresses))
        return cls(hosts, procs, len(addresses), device, False)

    @property
    def mesh(self) -> ProcMesh:
        """Processes of your own, `mesh.spawn(name, ActorClass)`; they end with the program."""
        if self._mesh is None:
            from monarch_rocm.distributed.worker import command_here

            command = command_here() if self._local else None
            self._mesh = self.hosts.spawn_procs(per_host={"procs": self.procs}, bootstrap_command=command)
        return self._mesh

    def train(
        self,
        build: Callable[[int], Any],
        *,
        steps: int,
        checkpoints: Checkpoints | None = None,
        restart: Restart | None = None,
        log: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
        tensorboard: str | os.PathLike[str] | None = None,
        dashboard: bool = False,
    ) -> Run:
        """Train; the loop runs in the workers, and records come back.

        Args:
            build (callable): `build(rank)` runs in each worker, in its process group, and returns an object
                with `model`, `optimizer` and `train_step(step) -> dict` of numbers or one-number tensors.
                A `scheduler`, and `state_dict()` with `load_state_dict()` (data position, say), are
                kept in checkpoints with the rest; random generators are anyway. Functions and classes of
                the main script travel whole, others must be importable in the workers.
            steps (int): how many in all, from 0.
            checkpoints (Checkpoints, optional): where to save. A run goes on from the newest whole one
                that it finds there, of an earlier program too. Default: none, a restart begins anew.
            restart (Restart, optional): what to do about faults. Default: give up, saying the cause.
            log (path or paths): files to write records to, by their suffix: ".csv" or ".jsonl".
            tensorboard (path, optional): folder for TensorBoard, which must be installed.
            dashboard (bool): show a live table, where standard output is a terminal.

        Returns:
            Run: under way already.

        Raises:
            TypeError, ValueError: what cannot be, before a process is started.
        """
        if not callable(build):
            raise TypeError(f"build must be a function of a rank, not a {type(build).__name__}")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps must be an int of at least 1, but steps={steps!r} was given")
        restart = restart or Restart()
        job = Training(build, steps, checkpoints, restart.stall_s, self._device)
        followers = sinks(log, tensorboard, dashboard, self._count * self.procs, steps)
        return self._run(job, restart, followers)

    def spmd(self, script: str | os.PathLike[str], *argv: str, restart: Restart | None = None) -> Result:
        """Run an unmodified torchrun script on all processes, to its end.

        Args:
            script (str or Path): its file, or "-m" with the module as the first of `argv`.
            *argv (str): its arguments.
            restart (Restart, optional): start it anew after faults, as `torchrun --max-restarts`. Hangs are
                not seen, since a script tells nothing.

        Raises:
            FileNotFoundError: no such script here.
            TrainingError: a process that failed, the cause first.
        """
        if self._local and str(script) != "-m" and not Path(script).is_file():
            raise FileNotFoundError(f"there is no script {os.fspath(script)!r}")
        restart = restart or Restart()
        return self._run(Script((str(script), *map(str, argv))), restart, []).wait()

    def _run(self, job: Training | Script, restart: Restart, followers: Sequence[runs.Sink]) -> Run:
        from monarch_rocm.distributed.worker import Supervisor, whereabouts

        actor, here = engine(), whereabouts()
        port, receiver = actor.Channel.open()
        packed = _pack(job)

        def start(number: int, procs: int, hosts: Sequence[int]) -> Attempt:
            mesh = self.hosts
            if len(hosts) < self._count:
                (name,) = mesh.extent.labels
                mesh = mesh.slice(**{name: slice(hosts[0], hosts[-1] + 1)})
            supervisor = actor.this_proc().spawn(f"supervisor{number}", Supervisor, number, port)
            supervisor.start.call_one(mesh, procs, packed, self._local).get(timeout=60)
            return Attempt(number, supervisor, procs * len(hosts), here)

        return Run(start, receiver, (self._count, self.procs), restart, followers)


def _pack(job: Training | Script) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps(job)
    except Exception as error:
        raise TypeError(f"build must pickle, to travel to the workers: {error}") from error


def _check_device(device: str | None) -> None:
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda' (for ROCm too), but device={device!r} was given")


def _check_procs(procs: int) -> None:
    if isinstance(procs, bool) or not isinstance(procs, int) or procs < 1:
        raise ValueError(f"procs must be an int of at least 1, but procs={procs!r} was given")
