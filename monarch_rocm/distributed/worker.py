"""The actors of a run: one worker in each process, and one supervisor that owns them. Needs torchmonarch."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch.actor import Actor, HostMesh, current_rank, current_size, endpoint

from monarch_rocm.distributed import loop
from monarch_rocm.distributed.mark import Mark


def whereabouts() -> tuple[str, str, str]:
    """Names of the machine and of the namespace that process ids of this process are from."""
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    return (
        socket.gethostname(),
        boot.read_text().strip() if boot.exists() else "",
        os.readlink(space) if space.exists() else "",
    )


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


LEASE_S = 60.0  # how long processes on other machines outlive a controller that was killed

# What a process of this machine runs first. The runtime ends its processes with the controller, but not those
# that were on their way when it was killed.
_BIRTH = """\
import os, runpy, threading, time
def watch():
    while os.getppid() == {parent}:
        time.sleep(0.5)
    os._exit(1)
threading.Thread(target=watch, daemon=True).start()
{first}
runpy.run_module("monarch._src.actor.bootstrap_main", run_name="__main__", alter_sys=True)
"""


def command_here() -> BootstrapCommand:
    """How processes are started on this machine: they import from where this program does.

    On ROCm they import torch first: its libraries must be there before torchmonarch looks for the system's.
    """
    code = _BIRTH.format(parent=os.getpid(), first="" if torch.version.hip is None else "import torch")
    paths = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    return BootstrapCommand(sys.executable, None, ["-c", code], paths)


class Lease(Actor):
    """Ends its process when the controller has been silent for some seconds.

    Processes on other machines do not end with the controller by themselves.
    """

    def __init__(self, seconds: float) -> None:
        self._heard, self._seconds = 0, seconds
        threading.Thread(target=self._watch, daemon=True, name="monarch-rocm-lease").start()

    @endpoint
    def renew(self) -> None:
        """Go on."""
        self._heard += 1

    def _watch(self) -> None:
        heard, waited = self._heard, 0.0
        while waited < self._seconds:
            time.sleep(1.0)
            # Counted and not read from a clock: while the interpreter is blocked, nobody can be heard.
            heard, waited = self._heard, 0.0 if self._heard != heard else waited + 1.0
        os._exit(1)


class Worker(Actor):
    """Does one job."""

    @endpoint
    def ready(self, attempt: int, port: Any, job: bytes) -> None:
        """Say where this process is, and import what the job needs."""
        rank = current_rank().rank
        self._mark = Mark()
        port.send(("hello", attempt, rank, os.getpid(), whereabouts(), _free_port(), self._mark.file))
        try:
            if attempt:  # so that a standby need not import at a restart what optimizers and DDP use
                import torch._dynamo  # noqa: F401

            self._job = pickle.loads(job)
        except Exception as error:
            port.send(("failed", attempt, rank, loop.failure(rank, "build", None, error)))
        else:
            port.send(("ready", attempt, rank))

    @endpoint
    def work(self, attempt: int, port: Any, address: str, number: int) -> None:
        """Do the job; rank 0 answers at `address` and port `number`."""
        point, sizes = current_rank(), current_size()
        local = sizes["procs"]
        ranks = 1
        for size in sizes.values():
            ranks *= size
        seat = loop.Seat(point.rank, ranks, point.rank % local, local, address, number)
        loop.work(self._job, seat, attempt, port.send, self._mark)


class Supervisor(Actor):
    """Owns the processes of one attempt, so that their end is told and does not end the controller."""

    def __init__(self, attempt: int, port: Any) -> None:
        self._attempt, self._port = attempt, port

    @endpoint
    def start(self, hosts: HostMesh, procs: int, job: bytes, local: bool) -> None:
        """Start the processes, which tell when they are ready."""
        command = command_here() if local else None
        self._procs = hosts.spawn_procs(
            per_host={"procs": procs}, name=f"attempt{self._attempt}", bootstrap_command=command
        )
        self._lease = None if local else self._procs.spawn("lease", Lease, LEASE_S)
        self._workers = self._procs.spawn("worker", Worker)
        self._workers.ready.broadcast(self._attempt, self._port, job)

    @endpoint
    def go(self, address: str, number: int) -> None:
        """Let them work."""
        self._workers.work.broadcast(self._attempt, self._port, address, number)

    @endpoint
    def renew(self) -> None:
        """Tell processes on other machines that the controller is there."""
        if self._lease is not None:
            self._lease.renew.broadcast()

    @endpoint
    def halt(self) -> None:
        """End the processes."""
        self._procs.stop().get()

    def __supervise__(self, failure: Any) -> bool:
        """Pass a fault on."""
        self._port.send(("fault", self._attempt, None, str(failure)))
        return True
