"""`monarch-rocm plan`: what a layer would cost for several numbers of blocks, beside the dense layer.

Times are of a model: a launch takes the larger of its bytes over the device's copy rate and its FLOPs
over the device's rate of dense products. The rates are those of `rates.json`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich import box
from rich.table import Table

from monarch_rocm.planning import plan
from monarch_rocm.shape import MonarchShape

DTYPE = torch.bfloat16  # which the rates of products are of


@dataclass(frozen=True)
class Rates:
    """What a device does in a second, in bfloat16.

    Attributes:
        name (str): of the device.
        copy (float): bytes a second of a large copy, reads and writes counted.
        product (float): FLOPs a second of a large dense product.
        measured (bool): by `monarch-rocm bench`; otherwise the rates are those of a data sheet.
        source (str): where they come from.
    """

    name: str
    copy: float
    product: float
    measured: bool
    source: str


DEVICES = {
    key: Rates(**values)
    for key, values in json.loads(Path(__file__).with_name("rates.json").read_text()).items()
}


@dataclass(frozen=True)
class Estimate:
    """The cost of a forward pass of one layer.

    Attributes:
        shape (MonarchShape or None): None for the dense layer.
        parameters (int): of the weight, without the bias.
        flops (int): of the pass.
        bytes (int): that the launches read and write at least.
        seconds (float): as the model has it, without what a launch takes by itself.
        notes (tuple of str): what `MonarchShape` warns of.
    """

    shape: MonarchShape | None
    parameters: int
    flops: int
    bytes: int
    seconds: float
    notes: tuple[str, ...] = ()


def dense(in_features: int, out_features: int, tokens: int, rates: Rates) -> Estimate:
    """The cost of `nn.Linear`: one product, each operand read once and the result written once.

    Example:
        >>> from monarch_rocm.estimate import DEVICES, dense
        >>> f"{dense(4096, 4096, 8192, DEVICES['h200']).seconds * 1e6:.0f} us"
        '353 us'
    """
    parameters = in_features * out_features
    moved = (tokens * (in_features + out_features) + parameters) * DTYPE.itemsize
    flops = 2 * tokens * parameters
    return Estimate(None, parameters, flops, moved, max(moved / rates.copy, flops / rates.product))


def monarch(
    in_features: int,
    out_features: int,
    nblocks: int | Sequence[int],
    rank: int | None,
    layout: str,
    tokens: int,
    rates: Rates,
) -> Estimate:
    """The cost of a Monarch layer run as batched products, and a pass after them if it is interleaved.

    Args:
        in_features, out_features, nblocks, rank, layout: as `MonarchShape` takes them.
        tokens (int): rows of the input.
        rates (Rates): of the device.

    Raises:
        TypeError, ValueError: as `MonarchShape`.

    Example:
        >>> from monarch_rocm.estimate import DEVICES, monarch
        >>> layer = monarch(4096, 4096, 4, None, "blocked", 8192, DEVICES["h200"])
        >>> layer.parameters, f"{layer.seconds * 1e6:.0f} us"
        (8388608, '177 us')
    """
    with warnings.catch_warnings(record=True):  # its warnings become notes
        shape = MonarchShape(in_features, out_features, nblocks, rank, layout)
    planned = plan(shape, tokens, DTYPE, "cpu", backend="torch")
    products = [2 * tokens * n * k * m for n, k, m in (shape.factor1, shape.factor2)]
    flops = products + [0] * (len(planned.kernels) - 2)
    seconds = sum(
        max(launch["bytes"] / rates.copy, work / rates.product)
        for launch, work in zip(planned.kernels, flops, strict=True)
    )
    notes = []
    if shape.Q < shape.L:
        notes.append(f"{1 - shape.Q / shape.L:.0%} of the dense weight is always zero")
    if shape.num_parameters > in_features * out_features:
        notes.append("more parameters than dense")
    return Estimate(shape, shape.num_parameters, planned.flops, planned.bytes, seconds, tuple(notes))


def table(estimates: Sequence[Estimate], tokens: int, rates: Rates) -> Table:
    """The dense layer's row, which comes first, and one of each Monarch layer."""
    dense = estimates[0]
    shown = Table(
        title=f"Predicted: {tokens:,} tokens forward in bfloat16, {rates.name}",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption_justify="left",
    )
    caption = [f"{_blocks(each)} blocks: {note}." for each in estimates for note in each.notes]
    caption += [
        "Time is that of a model: a launch takes the larger of its bytes over "
        f"{rates.copy / 1e12:.2f} TB/s and its FLOPs over {rates.product / 1e12:,.0f} TFLOP/s. "
        f"These rates were {rates.source}.",
        "What a launch takes by itself is left out; below 1,000 tokens or so it is most of the time. "
        "'monarch-rocm bench' measures your GPU.",
    ]
    shown.caption = "\n".join(caption)
    for name in ("blocks", "rank", "parameters", "of dense", "GFLOP", "MB", "us", "speed-up"):
        shown.add_column(name, justify="right", no_wrap=True)
    for each in estimates:
        shown.add_row(
            _blocks(each),
            "" if each.shape is None else f"{each.shape.rank:.4g}",
            f"{each.parameters:,}",
            f"{each.parameters / dense.parameters:.1%}",
            *map(_short, (each.flops / 1e9, each.bytes / 1e6, each.seconds * 1e6)),
            f"{dense.seconds / each.seconds:.2f}",
        )
    return shown


def _blocks(each: Estimate) -> str:
    shape = each.shape
    if shape is None:
        return "dense"
    return f"{shape.K}" if shape.K == shape.L else f"{shape.K},{shape.L}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
