"""What the fleet tests train: a small model that makes the faults it is told to, each once."""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from monarch_rocm import MonarchLinear
from monarch_rocm.distributed import parallelize


class Trainer:
    """Everything that must come back after a fault: moments, schedule, dropout, a position in data.

    Args:
        faults (dict): (step, rank) to "kill", "raise" or "hang".
        folder (Path): where the faults that have been are marked.
    """

    def __init__(self, rank, faults, folder, mode="ddp"):
        torch.manual_seed(0)
        up, down = (MonarchLinear(*sizes, nblocks=4) for sizes in ((16, 32), (32, 16)))
        model = nn.Sequential(up, nn.GELU(), nn.Dropout(0.1), down)
        self.model = parallelize(model, init_device_mesh("cpu", (dist.get_world_size(),)), mode)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, 0.7)
        self.rank, self.faults, self.folder, self.position = rank, faults, Path(folder), 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]

    def fault(self, step):
        kind = self.faults.get((step, self.rank))
        mark = self.folder / f"{step}-{self.rank}"
        if kind is None or mark.exists():
            return
        mark.touch()
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "hang":
            time.sleep(3600)
        raise ValueError("a bad batch")

    def train_step(self, step):
        self.fault(step)
        generator = torch.Generator().manual_seed(100 * self.position + self.rank)
        self.position += 1
        x = torch.randn(8, 16, generator=generator) + 0.1 * torch.randn(8, 16)
        loss = (self.model(x) - x.roll(1, -1)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return {"loss": loss.detach(), "tokens": 8}


class Plain:
    """The least that a trainer can be; its steps take some time."""

    def __init__(self, rank, seconds=0.02):
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.seconds = seconds

    def train_step(self, step):
        time.sleep(self.seconds)
        return {"pid": os.getpid()}
