"""Train a small language model of Monarch layers on several processes, under one program.

Characters of Python's own library are the text, so that nothing is downloaded. The loop runs in the
workers; what they tell comes back here, step by step. Kill one of them (`kill -9`, the ids are printed) and
watch the run go on from its last checkpoint, with the losses that it would have had.

    python examples/train_distributed.py                      # 2 processes on the CPU, or one a GPU
    python examples/train_distributed.py --procs 8 --mode fsdp

Needs torchmonarch: pip install "monarch-rocm[distributed]"
"""

import argparse
import functools
import inspect
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from monarch_rocm import MonarchLinear
from monarch_rocm.distributed import Checkpoints, Fleet, Restart, parallelize

CONTEXT, HEADS = 64, 4


class Block(nn.Module):
    """Attention and a perceptron."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = MonarchLinear(width, 3 * width, nblocks=4)
        self.out = MonarchLinear(width, width, nblocks=4)
        self.up = MonarchLinear(width, 4 * width, nblocks=4)
        self.down = MonarchLinear(4 * width, width, nblocks=4)

    def forward(self, x):
        batch, context, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, context, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, context, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Characters in, scores of the next one out."""

    def __init__(self, width, depth):
        super().__init__()
        self.characters, self.places = nn.Embedding(128, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128)

    def forward(self, tokens):
        x = self.characters(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def text():
    """The characters of some modules of the standard library."""
    modules = (argparse, functools, inspect, tempfile)
    source = "".join(Path(inspect.getsourcefile(module)).read_text() for module in modules)
    return torch.tensor([min(ord(character), 127) for character in source])


class Trainer:
    """What `fleet.train` asks for: a model, its optimizer, a step, and what to keep besides."""

    def __init__(self, rank, mode, width, depth, batch):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)  # one model on all ranks
        model = Model(width, depth).to(device)
        self.model = parallelize(model, init_device_mesh(device, (dist.get_world_size(),)), mode)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=20)
        self.text, self.batch, self.device = text(), batch, device
        seed = 0 if mode == "tp" else rank  # tensor-parallel ranks share a batch, others have their own
        self.generator = torch.Generator().manual_seed(seed)

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])

    def train_step(self, step):
        at = torch.randint(len(self.text) - CONTEXT, (self.batch, 1), generator=self.generator)
        rows = self.text[at + torch.arange(CONTEXT + 1)].to(self.device)
        logits = self.model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return {"loss": loss.detach(), "tokens": self.batch * CONTEXT, "pid": os.getpid()}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--procs", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--mode", choices=("ddp", "fsdp", "tp"), default="ddp")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--checkpoints", help="folder; default: a new one, removed at the end")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        build = functools.partial(
            Trainer, mode=args.mode, width=args.width, depth=args.depth, batch=args.batch
        )
        began = time.monotonic()
        run = Fleet.local(procs=args.procs).train(
            build,
            steps=args.steps,
            checkpoints=Checkpoints(args.checkpoints or folder, every=50),
            restart=Restart(max=3, stall_s=120),
            dashboard=True,
        )
        for record in run:
            if record.step % 25 == 0 or record.step == args.steps - 1:
                losses = [metrics["loss"] for metrics in record.per_rank]
                pids = ", ".join(str(metrics["pid"]) for metrics in record.per_rank)
                mean = sum(losses) / len(losses)
                print(
                    f"step {record.step:4d}  loss {mean:.3f}  {1e3 * record.seconds:.0f} ms  workers {pids}"
                )
        for restart in run.result.restarts:
            print(f"{restart.cause}; went on from step {restart.resumed_step} in {restart.seconds:.1f} s")
        print(f"{run.result.steps} steps on {run.result.ranks} workers in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
