"""Turn the rows of benchmarks/train_study.py into the tables of docs/training.md and a plot.

python benchmarks/train_report.py benchmarks/results/train_h200.csv benchmarks/results/train_cpu.csv
"""

import argparse
import csv
import math
import statistics
from collections import defaultdict
from pathlib import Path

from report import insert

ROOT = Path(__file__).parent.parent
SIZE = "context", "tokens", "steps", "layers"
MODEL = "linear", "nblocks", "rank", "width", "optimizer", "options"


class Entry:
    """Rows that differ in nothing but the seed."""

    def __init__(self, rows):
        row = rows[0]
        self.size = tuple(int(row[name]) for name in SIZE)
        self.model = tuple(row[name] for name in MODEL)
        self.linear, self.optimizer, self.options = row["linear"], row["optimizer"], row["options"]
        self.width, self.lr, self.times = int(row["width"]), float(row["lr"]), float(row["times"])
        self.nblocks, self.rank = int(row["nblocks"]), int(row["rank"])
        self.parameters, self.flops = int(row["block_parameters"]), float(row["training_flops"])
        self.losses = [float(r["validation_loss"]) for r in rows]
        self.loss = statistics.fmean(self.losses)

    @property
    def name(self):
        kind = "dense" if self.linear == "dense" else f"Monarch, {self.nblocks} blocks"
        kind += f" of rank {self.rank}" if self.rank else ""
        return f"{kind}, {self.options}" if self.options else kind

    @property
    def rate(self):
        """The `lr` that gives matrices these rates by `param_groups(..., base_width=512)`.

        The study's own unit is `lr * times * sqrt(512 / n)` for a matrix whose outputs read n inputs.
        """
        rate = self.lr * self.times
        if self.optimizer == "muon":
            return rate
        rate *= math.sqrt(self.width / 512)
        return rate if self.linear == "dense" else rate * 2 / math.sqrt(self.nblocks)

    @property
    def reached(self):
        if not math.isfinite(self.loss):
            return "diverged"
        spread = f" ± {statistics.stdev(self.losses):.4f}" if len(self.losses) > 1 else ""
        return f"{self.loss:.4f}{spread}"


TIMED = 100  # steps of the runs that are there for their time


def read(path):
    """Entries of a CSV, without the short runs for timing, and all rows."""
    groups = defaultdict(list)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in (row for row in rows if int(row["steps"]) > TIMED):
        groups[tuple(row[name] for name in (*SIZE, *MODEL, "lr", "times"))].append(row)
    return [Entry(some) for some in groups.values()], rows


def best(entries):
    """The best learning rate of each model."""
    found = {}
    for entry in entries:
        if math.isfinite(entry.loss):
            other = found.get(entry.model)
            found[entry.model] = entry if other is None or entry.loss < other.loss else other
    return list(found.values())


def table(entries):
    """The best of each model, against the dense model of the same optimizer that costs most."""
    lines = [
        "| layers | width | optimizer | lr | parameters | training PFLOP | loss | over dense | runs |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    chosen = sorted(best(entries), key=lambda e: (e.optimizer, -e.parameters))
    for entry in chosen:
        dense = [e for e in chosen if e.linear == "dense" and e.optimizer == entry.optimizer]
        reference = max(dense, key=lambda e: e.flops, default=None)
        over = "" if reference in (None, entry) else f"{entry.loss - reference.loss:+.4f}"
        cells = [entry.name, entry.width, entry.optimizer, f"{entry.rate:.2g}"]
        cells += [f"{entry.parameters / 1e6:.2f} M", f"{entry.flops / 1e15:.3g}", entry.reached, over]
        lines.append("| " + " | ".join(map(str, [*cells, len(entry.losses)])) + " |")
    return "\n".join(lines)


def by_model(entries):
    """Entries of each model that was trained at several rates, in the order of these."""
    models = defaultdict(list)
    for entry in entries:
        models[entry.size, entry.model].append(entry)
    return [sorted(found, key=lambda e: e.rate) for found in models.values() if len(found) > 1]


def lowest_loss(entries):
    """Of those that did not diverge."""
    return min((entry.loss for entry in entries if math.isfinite(entry.loss)), default=math.nan)


def rates(entries):
    """Loss at each rate, a row a model."""
    lines = ["| layers | width | optimizer | lr: loss |", "|---|---|---|---|"]
    for found in by_model(entries):
        lowest = lowest_loss(found)
        cells = [f"{e.rate:.2g}: {f'**{e.reached}**' if e.loss == lowest else e.reached}" for e in found]
        lines.append(f"| {found[0].name} | {found[0].width} | {found[0].optimizer} | {', '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def times(rows):
    """Milliseconds of a step, for runs that had the GPU to themselves."""
    timed = [row for row in rows if int(row["steps"]) == TIMED and row["workers"] == "1"]
    dense = {row["optimizer"]: float(row["seconds"]) for row in timed if row["linear"] == "dense"}
    lines = ["| layers | width | optimizer | ms a step | of dense |", "|---|---|---|---|---|"]
    for row in timed:
        seconds = float(row["seconds"])
        share = f"{seconds / dense[row['optimizer']]:.2f}" if row["optimizer"] in dense else ""
        cells = [Entry([row]).name, row["width"], row["optimizer"], f"{1000 * seconds / TIMED:.2f}", share]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) if timed else ""


def markdown(path):
    entries, rows = read(path)
    row = rows[-1]
    dates = sorted({row["date"] for row in rows})
    parts = [
        f"Measured on {row['device']} ({' to '.join(dict.fromkeys((dates[0], dates[-1])))}, torch "
        f"{row['torch']}) by `benchmarks/train_study.py`; {len(rows)} runs in "
        f"`{path.resolve().relative_to(ROOT)}`. Losses are of validation, in nats a byte, a mean ± the "
        "standard deviation where there are several seeds; `lr` is what gives the blocks' matrices their "
        "rates by `param_groups(..., base_width=512)`; parameters are those of the blocks."
    ]
    sizes = sorted({entry.size for entry in entries}, key=lambda size: -size[1])
    for size in sizes:
        some = [entry for entry in entries if entry.size == size]
        context, tokens, steps, layers = size
        parts.append(f"### {layers} layers, context {context}, {steps} steps of {tokens:,} tokens")
        parts.append("Each model at the best of the rates that were tried for it:")
        parts.append(table(some))
        if by_rate := rates(some):
            parts += ["By rate:", by_rate]
    if by_time := times(rows):
        parts += ["### Time", "Alone on the GPU, a whole step as one CUDA graph:", by_time]
    return "\n\n".join(parts), entries


def plot(entries, path):
    """Loss over FLOPs and over parameters, the best of each model of the largest size, and over rates."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter, StrMethodFormatter

    plain = [entry for entry in entries if not entry.options]
    size = max((entry.size for entry in entries), key=lambda size: size[1])
    figure = Figure(figsize=(9, 10), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.1))
    both, third = above.subplots(1, 2, sharey=True), below.subplots()
    above.suptitle(f"the best of each model, {size[2]:,} steps of {size[1]:,} tokens", fontsize="medium")
    for axes, attribute, unit, label in zip(
        both,
        ("flops", "parameters"),
        (1e15, 1e6),
        ("training PFLOP", "million parameters in blocks"),
        strict=True,
    ):
        kinds = defaultdict(list)
        for entry in best([entry for entry in plain if entry.size == size and not entry.rank]):
            kinds[entry.linear, entry.nblocks, entry.optimizer].append(entry)
        for (linear, nblocks, optimizer), found in sorted(kinds.items()):
            found.sort(key=lambda e: getattr(e, attribute))
            name = "dense" if linear == "dense" else f"Monarch {nblocks}"
            xs, ys = [getattr(e, attribute) / unit for e in found], [e.loss for e in found]
            style = "o--" if linear == "dense" else "s-"
            axes.plot(xs, ys, style, label=f"{name}, {optimizer}")
        axes.set(xlabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(5))
    both[0].set_ylabel("validation loss, nats a byte")
    both[1].legend()
    for found in by_model([entry for entry in plain if entry.optimizer == "adamw"]):
        if len(found) > 2:
            lowest = lowest_loss(found)
            name = f"{found[0].name}, width {found[0].width}, {found[0].size[1]:,} tokens"
            style = "o--" if found[0].linear == "dense" else "s-"
            third.plot([1e3 * e.rate for e in found], [e.loss - lowest for e in found], style, label=name)
    third.set(xscale="log", xlabel="lr of AdamW for param_groups(base_width=512), thousandths")
    third.set_title("what another rate costs each model", fontsize="medium")
    third.set(ylabel="loss above the model's best", ylim=(-0.002, 0.09))
    third.xaxis.set_minor_formatter(NullFormatter())
    third.xaxis.set_major_locator(FixedLocator([0.25, 0.5, 1, 2, 4]))
    third.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    if third.lines:
        third.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    arguments = parser.parse_args()
    texts = []
    for path in arguments.results:
        text, entries = markdown(path)
        plot(entries, path.with_suffix(".png"))
        title = "Loss over FLOPs, over parameters and over rates"
        texts.append(f"{text}\n\n![{title}](../benchmarks/results/{path.stem}.png)")
    page = ROOT / "docs" / "training.md"
    page.write_text(insert(page.read_text(), "\n\n".join(texts)))


if __name__ == "__main__":
    main()
