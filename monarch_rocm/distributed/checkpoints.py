"""Checkpoints that are whole or do not count, on `torch.distributed.checkpoint`."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import sys
import warnings
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

MANIFEST = "manifest.json"


class Checkpoints:
    """A folder of checkpoints, in which a run finds where to go on.

    A checkpoint holds model, optimizer, the state of every random generator, and what else a rank gives
    it. Names and values do not depend on how the model is spread, so that one saved under "ddp", "fsdp",
    "tp" or "fsdp+tp", on any number of ranks, loads under any other. It is written beside its final name
    and renamed when all ranks have written, and it counts only if every file has the size and checksum
    that its manifest names: half a checkpoint, or a damaged one, is passed over for the one before.

    Args:
        path (str or Path): the folder, made where missing; all hosts must see the same one.
        every (int): steps from one to the next. A run also saves its last step.
        keep (int): how many to keep, the newest ones. Default: 3.

    Raises:
        ValueError: `every` or `keep` below 1.

    Example:
        >>> import tempfile
        >>> model = MonarchLinear(8, 8, nblocks=2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> checkpoints = Checkpoints(tempfile.mkdtemp(), every=100)
        >>> checkpoints.save(100, model, optimizer, extra={"position": 6400})
        >>> checkpoints.load(model, optimizer)
        (100, {'position': 6400})
    """

    def __init__(self, path: str | os.PathLike[str], every: int, keep: int = 3) -> None:
        for name, value in (("every", every), ("keep", keep)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, but {name}={value!r} was given")
        self.path, self.every, self.keep = Path(path).absolute(), every, keep

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.path)!r}, every={self.every}, keep={self.keep})"

    def due(self, done: int, steps: int) -> bool:
        """Whether to save when `done` of `steps` steps are done."""
        return done % self.every == 0 or done == steps

    def folder(self, step: int) -> Path:
        """Where the checkpoint of so many steps is."""
        return self.path / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """The checkpoints there, whole or not, by steps done, oldest first."""
        names = (p.name.removeprefix("step-") for p in self.path.glob("step-*"))
        return sorted(int(name) for name in names if name.isdigit())

    def save(
        self, step: int, model: nn.Module, optimizer: Optimizer | Iterable[Optimizer], extra: Any = None
    ) -> None:
        """Save; every rank calls it.

        Args:
            step (int): steps done, the first to do after a resume.
            model (nn.Module): spread by `parallelize` or not.
            optimizer (Optimizer or iterable of them): of its parameters.
            extra (optional): this rank's own, anything that pickles: data position, scheduler.
        """
        rank, ranks = _rank(), _ranks()
        final, draft = self.folder(step), self.path / f".draft-{step:08d}"
        if rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        _barrier()
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, f"rank{rank}": _pack((extra, _generators()))}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            warnings.filterwarnings("ignore", category=FutureWarning)
            save(state, checkpoint_id=draft)
        names = sorted(path.name for path in draft.iterdir())
        mine = [(name, *_sum(draft / name)) for name in names[rank::ranks]]
        files = {name: [size, crc] for part in _all(mine) for name, size, crc in part}
        if rank == 0:
            _write(draft / MANIFEST, json.dumps({"step": step, "ranks": ranks, "files": files}))
            shutil.rmtree(final, ignore_errors=True)
            os.replace(draft, final)
            for old in self.steps()[: -self.keep]:
                shutil.rmtree(self.folder(old), ignore_errors=True)
        _barrier()

    def load(
        self,
        model: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer],
        passed_over: list[str] | None = None,
    ) -> tuple[int, Any] | None:
        """Load the newest whole checkpoint; every rank calls it.

        Args:
            model, optimizer: as for `save`, spread in any way; changed in place, as are the random
                generators.
            passed_over (list, optional): gets a line for each newer checkpoint that was not whole.

        Returns:
            (int, Any) or None: steps done and this rank's extra, that of rank `r % n` where n ranks saved;
            None where there is no whole checkpoint.
        """
        rank, ranks = _rank(), _ranks()
        for step in reversed(_first(self.steps())):
            folder = self.folder(step)
            problems = [p for part in _all(_problems(folder, rank, ranks)) for p in part]
            if problems:
                line = f"{folder.name} is not whole: {problems[0]}"
                if rank == 0:
                    warnings.warn(line, stacklevel=2)
                if passed_over is not None:
                    passed_over.append(line)
                continue
            key = f"rank{rank % json.loads((folder / MANIFEST).read_text())['ranks']}"
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, key: b""}
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                warnings.filterwarnings("ignore", category=FutureWarning)
                load(state, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
            extra, generators = _unpack(state[key])
            _restore(generators)
            return step, extra
        return None


def _problems(folder: Path, rank: int, ranks: int) -> list[str]:
    """What is wrong with this rank's share of the files."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        return [f"no manifest ({type(error).__name__})"]
    problems = []
    for name, (size, crc) in sorted(files.items())[rank::ranks]:
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != size:
            problems.append(f"{name} has {path.stat().st_size} bytes of {size}")
        elif _sum(path)[1] != crc:
            problems.append(f"{name} is damaged, its checksum is wrong")
    return problems


def _sum(path: Path) -> tuple[int, int]:
    """(bytes, CRC-32) of a file."""
    crc = size = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    return size, crc


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _pack(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(packed: Any) -> Any:
    return torch.load(io.BytesIO(packed), weights_only=False)


def _generators() -> dict[str, Any]:
    """The states of this process's random generators."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return states


def _restore(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _all(value: Any) -> list[Any]:
    """The values of all ranks."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * _ranks()
    dist.all_gather_object(values, value)
    return values


def _first(value: Any) -> Any:
    """Rank 0's value."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]
