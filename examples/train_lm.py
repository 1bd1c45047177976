"""Train a byte-level GPT, with dense linear layers or with Monarch ones, on real text.

The text is the Python standard library's own source, or what --data names: nothing is downloaded.
The default size trains on a CPU in two minutes:

    python examples/train_lm.py                     # Monarch, 4 blocks
    python examples/train_lm.py --linear dense

A real size, on a GPU:

    python examples/train_lm.py --nblocks 8 --width 1024 --layers 8 --head-size 64 --context 1024 \
        --batch 32 --steps 1500 --warmup 100 --compile

Writes the log (CSV), a plot of the loss and a checkpoint into --out; --resume goes on from there.
"""

import argparse
import csv
import sysconfig
import time
import zlib
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from monarch_rocm import MonarchLinear
from monarch_rocm.optim import param_groups

console = Console()


def rotation(context, size):
    """Cosines and sines `(context, size / 2)` by which places turn queries and keys."""
    angles = torch.arange(context)[:, None] * 10_000.0 ** (-torch.arange(0, size, 2) / size)
    return angles.cos(), angles.sin()


def turn(x, cos, sin):
    """Heads `(..., context, size)` turned by their places, so that products see distances alone."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).type_as(x)


class Block(nn.Module):
    """Attention and a perceptron, each on normalised input, each added to it."""

    def __init__(self, width, head_size, linear, writers):
        super().__init__()
        self.head_size = head_size
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        # Apart, not as one layer of 3 * width outputs: their first factors would be one.
        self.query, self.key, self.value = (linear(width, width) for _ in range(3))
        self.project, self.up, self.down = (
            linear(*sizes) for sizes in ((width, width), (width, 4 * width), (4 * width, width))
        )
        for layer in (self.project, self.down):  # of all that write into x, as in GPT-2
            last = layer.blkdiag2 if isinstance(layer, MonarchLinear) else layer.weight
            with torch.no_grad():
                last.mul_(writers**-0.5)

    def forward(self, x, cos, sin):
        batch, context, width = x.shape
        h = self.norm1(x)
        q, k, v = (
            layer(h).view(batch, context, -1, self.head_size).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        q, k = (turn(F.rms_norm(part, (self.head_size,)), cos, sin) for part in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(batch, context, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Predicts each byte of `(batch, context)` from those before it; returns the loss in nats."""

    def __init__(self, width, layers, head_size, context, linear):
        super().__init__()
        if width % head_size:
            raise ValueError(f"width {width} is no multiple of the head size {head_size}")
        self.bytes = nn.Embedding(256, width)
        nn.init.normal_(self.bytes.weight, std=0.02)
        for name, part in zip(("cos", "sin"), rotation(context, head_size), strict=True):
            self.register_buffer(name, part, persistent=False)
        self.blocks = nn.ModuleList([Block(width, head_size, linear, 2 * layers) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, 256, bias=False)

    def forward(self, inputs, targets):
        x, context = self.bytes(inputs), inputs.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:context], self.sin[:context])
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def linear_layers(kind, nblocks=4, rank=None, layout="interleaved"):
    """What makes the model's linear layers: `linear(in_features, out_features)`."""
    if kind == "dense":
        return lambda n_in, n_out: nn.Linear(n_in, n_out, bias=False)
    options = {"nblocks": nblocks, "rank": rank, "layout": layout}
    return lambda n_in, n_out: MonarchLinear(n_in, n_out, bias=False, **options)


def read_text(roots, pattern="*.py", limit=None):
    """(train, validation) bytes of the files under `roots`, each content once, in a fixed order.

    A twentieth of the files is for validation, chosen by a checksum of their contents. Packages that
    are installed inside of a root (`site-packages`) are left out.
    """
    seen, size, parts = set(), 0, ([], [])
    for root in map(Path, roots):
        files = [root] if root.is_file() else sorted(root.rglob(pattern))
        for file in files:
            inside = file.relative_to(root).parts
            if not file.is_file() or {"site-packages", "dist-packages"} & set(inside):
                continue
            content = file.read_bytes()[: None if limit is None else limit - size]
            checksum = zlib.crc32(content)
            if content and checksum not in seen:
                seen.add(checksum)
                size += len(content)
                parts[checksum % 20 == 0].append(content)
    if len(seen) == 1:  # a single file of the user's own
        content = (parts[0] or parts[1])[0]
        return content[: len(content) * 19 // 20], content[len(content) * 19 // 20 :]
    return tuple(b"".join(part) for part in parts)


def windows(text, starts, context):
    """Inputs and targets `(batch, context)` that begin at `starts` in `text`, a tensor of bytes."""
    places = starts[:, None] + torch.arange(context + 1, device=text.device)
    batch = text[places].long()
    return batch[:, :-1], batch[:, 1:]


def rate(step, steps, warmup):
    """Share of the full learning rate: a linear warm-up, then linearly to zero."""
    return min(1.0, (step + 1) / warmup) * (1 - step / steps)


def main():
    arguments = parse()
    torch.manual_seed(arguments.seed)
    device = torch.device(arguments.device)
    context, batch = arguments.context, arguments.batch
    roots = [arguments.data] if arguments.data else [sysconfig.get_path("stdlib")]
    pattern = "*" if arguments.data else "*.py"
    train, valid = (
        torch.frombuffer(bytearray(part), dtype=torch.uint8).to(device) for part in read_text(roots, pattern)
    )
    if min(len(train), len(valid)) <= context + 1:
        raise SystemExit(f"{len(train) + len(valid):,} bytes of text are too few for a context of {context}")

    linear = linear_layers(arguments.linear, arguments.nblocks, arguments.rank, arguments.layout)
    model = GPT(arguments.width, arguments.layers, arguments.head_size, context, linear).to(device)
    optimizer = torch.optim.AdamW(
        param_groups(model, arguments.lr, arguments.weight_decay, base_width=512),
        betas=(0.9, 0.95),
        fused=True,
    )
    numbers = sum(parameter.numel() for parameter in model.blocks.parameters())
    console.print(f"{arguments.linear}, {numbers:,} parameters in the blocks, {len(train):,} bytes of text")
    if arguments.compile:
        for block in model.blocks:
            block.compile()  # they share one graph, so that one is compiled

    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    start, log = 0, []
    if arguments.resume:
        saved = torch.load(out / "checkpoint.pt", map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start, log = saved["step"], saved["log"]

    def autocast():
        if arguments.dtype == "float32":
            return nullcontext()
        return torch.autocast(device.type, getattr(torch, arguments.dtype))

    def draw(text, seed):
        # A generator for each step: a run that was resumed sees what it would have seen.
        starts = torch.randint(
            len(text) - context - 1, (batch,), generator=torch.Generator().manual_seed(seed)
        )
        return windows(text, starts.to(device), context)

    @torch.no_grad()
    def evaluate():
        losses = []
        for i in range(arguments.eval_batches):
            with autocast():
                losses.append(model(*draw(valid, i)))
        return float(torch.stack(losses).mean())

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    began = time.perf_counter()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("training", total=arguments.steps, completed=start)
        for step in range(start, arguments.steps):
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * rate(step, arguments.steps, arguments.warmup)
            total = torch.zeros((), device=device)
            for part in range(arguments.accumulate):
                inputs, targets = draw(train, step * arguments.accumulate + part + arguments.seed * 10**9)
                with autocast():
                    loss = model(inputs, targets) / arguments.accumulate
                loss.backward()
                total += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            done = step + 1
            if done % arguments.eval_every == 0 or done == arguments.steps:
                tokens = done * arguments.accumulate * batch * context
                seconds = time.perf_counter() - began + (log[-1]["seconds"] if start and log else 0)
                row = {"step": done, "tokens": tokens, "seconds": round(seconds, 1)}
                row |= {"train_loss": round(float(total), 4), "validation_loss": round(evaluate(), 4)}
                log.append(row)
                progress.update(bar, description=f"loss {row['validation_loss']:.3f}")
                save(out, model, optimizer, done, log)
            progress.update(bar, completed=done)
    console.print(f"validation loss {log[-1]['validation_loss']:.4f} nats a byte; see {out}")


def save(out, model, optimizer, step, log, over="tokens"):
    """The checkpoint, the log and the plot; a run that is interrupted leaves whole files."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "log": log}
    torch.save(state, out / "checkpoint.tmp")
    (out / "checkpoint.tmp").replace(out / "checkpoint.pt")
    with (out / "log.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, log[0])
        writer.writeheader()
        writer.writerows(log)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return  # the plot is extra: pip install "monarch-rocm[bench]"
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name in ("train_loss", "validation_loss"):
        axes.plot([row[over] for row in log], [row[name] for row in log], label=name.replace("_", " "))
    axes.set(xlabel=over, ylabel="loss, nats")
    axes.legend()
    figure.savefig(out / "loss.png", dpi=110)


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    gpu = torch.cuda.is_available()
    add("--linear", choices=("monarch", "dense"), default="monarch")
    add("--nblocks", type=int, default=4)
    add("--rank", type=int, help="of each sub-block; default: fly's sizes")
    add("--layout", choices=("interleaved", "blocked"), default="interleaved")
    add("--width", type=int, default=128)
    add("--layers", type=int, default=4)
    add("--head-size", type=int, default=32)
    add("--context", type=int, default=128)
    add("--batch", type=int, default=16, help="windows a forward pass")
    add("--accumulate", type=int, default=1, help="forward passes a step")
    add("--steps", type=int, default=500)
    add("--warmup", type=int, default=50, help="steps")
    add("--lr", type=float, default=1.5e-3, help="of the dense model of width 512; others get theirs from it")
    add("--weight-decay", type=float, default=0.1)
    add("--data", help="a file or a folder of text; default: the standard library's source")
    add("--out", default="train_lm", help="folder for log, plot and checkpoint")
    add("--resume", action="store_true", help="go on from the checkpoint in --out")
    add("--eval-every", type=int, default=100)
    add("--eval-batches", type=int, default=20)
    add("--compile", action="store_true")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16" if gpu else "float32")
    add("--device", default="cuda" if gpu else "cpu")
    add("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
