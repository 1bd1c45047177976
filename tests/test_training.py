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


def reach(lm, texts, linear, width, seed):
    """Validation loss after a short training, everything but the linear layers alike."""
    torch.manual_seed(seed)
    model = lm.GPT(width, 2, width // 2, CONTEXT, lm.linear_layers(linear, nblocks=4))
    optimizer = torch.optim.AdamW(param_groups(model, 4e-3, 0.1), betas=(0.9, 0.95))
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


@pytest.mark.slow
def test_monarch_is_between_dense_layers_of_its_width_and_of_its_size(lm, texts):
    """Trained alike, for a third of the parameters it loses less than a dense model that small does.

    Margins seen over seeds 0 to 2: dense is 0.050 to 0.078 below, the small dense one 0.025 to 0.089
    above (width 40 has 39 thousand parameters in its blocks, Monarch 37, dense 98).
    """
    dense, monarch, small = (
        reach(lm, texts, *which, seed=0) for which in (("dense", 64), ("monarch", 64), ("dense", 40))
    )
    assert dense < monarch - 0.025
    assert monarch < small - 0.012
