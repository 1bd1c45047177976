"""Small models trained on real text, dense and Monarch: the order of what they reach."""

import importlib.util
import sysconfig
from pathlib import Path

import pytest
import torch
from torch import nn

from monarch_rocm.optim import param_groups

ROOT = Path(__file__).parent.parent
CONTEXT, BATCH, STEPS = 64, 16, 300


def load_example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def lm():
    return load_example("train_lm")


@pytest.fixture(scope="module")
def texts(lm):
    parts = lm.read_text([sysconfig.get_path("stdlib")], limit=6_000_000)
    return [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts]


def reach(lm, texts, linear, width, seed, groups=param_groups):
    """Validation loss after a short training, everything but the linear layers alike."""
    torch.manual_seed(seed)
    model = lm.GPT(width, 2, width // 2, CONTEXT, lm.linear_layers(linear, nblocks=4))
    optimizer = torch.optim.AdamW(groups(model, 4e-3, 0.1), betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(seed)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * lm.rate(step, STEPS, 30)
        starts = torch.randint(len(texts[0]) - CONTEXT - 1, (BATCH,), generator=generator)
        model(*lm.windows(texts[0], starts, CONTEXT)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    starts = torch.arange(512) * ((len(texts[1]) - CONTEXT - 1) // 512)
    with torch.no_grad():
        return float(model(*lm.windows(texts[1], starts, CONTEXT)))


def equal_rates(model, lr, weight_decay):
    """`param_groups` without the rates of factors."""
    groups = param_groups(model, lr, weight_decay)
    return [group | {"lr": lr, "initial_lr": lr} for group in groups]


if __name__ == "__main__":
    import sys

    lm_ = load_example("train_lm")
    parts = lm_.read_text([sysconfig.get_path("stdlib")], limit=6_000_000)
    texts_ = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts]
    for seed in map(int, sys.argv[1:]):
        print(
            seed,
            "dense64",
            reach(lm_, texts_, "dense", 64, seed),
            "m64",
            reach(lm_, texts_, "monarch", 64, seed),
            "m64 equal",
            reach(lm_, texts_, "monarch", 64, seed, equal_rates),
            "dense36",
            reach(lm_, texts_, "dense", 36, seed),
            "m112",
            reach(lm_, texts_, "monarch", 112, seed),
            flush=True,
        )
