"""Groups of real processes on gloo, and what the tests compare."""

import multiprocessing as mp
import traceback

import pytest
import torch
import torch.distributed as dist
from torch import nn

from monarch_rocm import MonarchLinear

FSDP_ON_CPUS = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 of PyTorch 2.6 fails on CPUs"
)

# Children of a server that has imported everything: a fork each, with none of pytest's threads.
_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["torch._dynamo", "monarch_rocm.distributed", "distributed.support"])


def _child(function, rank, ranks, folder, args, results):
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
        results.put((rank, None, function(rank, *args)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, traceback.format_exc(), None))


def spawn(function, ranks, folder, *args):
    """`function(rank, *args)` in a process group; returns what the ranks return, or raises as one did."""
    folder.mkdir(parents=True, exist_ok=True)
    results = _context.Queue()
    children = [
        _context.Process(target=_child, args=(function, rank, ranks, folder, args, results), daemon=True)
        for rank in range(ranks)
    ]
    for child in children:
        child.start()
    try:
        found = {}
        for _ in children:
            rank, error, value = results.get(timeout=120)
            assert error is None, f"rank {rank}:\n{error}"
            found[rank] = value
        for child in children:
            child.join(20)
        return [found[rank] for rank in range(ranks)]
    finally:
        for child in children:
            child.kill()


class Block(nn.Module):
    """What parallel modes must cope with: norms, attention that reads its child's weights, dense layers."""

    def __init__(self, width, layout):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.up = MonarchLinear(width, 2 * width, nblocks=4, layout=layout)
        self.down = MonarchLinear(2 * width, width, nblocks=4, layout=layout)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    """A small language model with a head tied to the embedding."""

    def __init__(self, width=32, words=24, layout="blocked"):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, layout) for _ in range(2))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(rank, step):
    """Tokens and targets that a rank is fed in a step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    tokens = torch.randint(24, (4, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model, rank, step):
    tokens, targets = batch(rank, step)
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
