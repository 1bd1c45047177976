"""What `monarchize` did to a model, row by row."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from monarch_rocm.shape import MonarchShape

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Row:
    """One layer that was replaced.

    Attributes:
        name (str): where the layer is in the model, "" for the root.
        kind (str): class of the layer that was replaced.
        shape (MonarchShape): geometry of the new layer.
        params_before, params_after (int): numbers in the layer, bias included.
        weight_error (float): Frobenius norm of the change of the dense weight over that of the
            weight, nan where there was nothing to compare (init "random", meta device).
        output_error (float): with calibration, root mean squared change of the layer's outputs over
            the root mean square of the outputs, both about their mean where the layer has a bias of
            its own; else nan.
        flops_before, flops_after (int): of one token through the layer, the bias aside.
    """

    name: str
    kind: str
    shape: MonarchShape
    params_before: int
    params_after: int
    weight_error: float
    output_error: float = math.nan

    @property
    def flops_before(self) -> int:
        return 2 * self.shape.in_features * self.shape.out_features

    @property
    def flops_after(self) -> int:
        return 2 * self.shape.num_parameters


@dataclass(frozen=True)
class Skipped:
    """One linear layer that was left alone, and why."""

    name: str
    reason: str


@dataclass(repr=False)
class MonarchReport:
    """The outcome of `monarchize`; iterates over its rows and prints as a table.

    Attributes:
        rows (list of Row): the layers that were replaced.
        skipped (list of Skipped): the linear layers that were left alone.
        params_before, params_after (int): numbers in the whole model, shared ones counted once.
        flops_before, flops_after (int or None): of a pass of the whole model over the first calibration
            batch; None without calibration.
    """

    rows: list[Row] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    params_before: int = 0
    params_after: int = 0
    flops_before: int | None = None
    flops_after: int | None = None

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __rich__(self) -> Table:
        table = Table(title=f"{len(self.rows)} layers replaced, {len(self.skipped)} left alone")
        table.add_column("layer", overflow="fold")
        table.add_column("kind", overflow="fold")
        numbers = ("in", "out", "blocks", "rank", "params before", "after", "FLOPs", "weight error")
        for name in numbers:
            table.add_column(name, justify="right")
        calibrated = any(not math.isnan(row.output_error) for row in self.rows)
        if calibrated:
            table.add_column("output error", justify="right")
        for row in self.rows:
            shape = row.shape
            table.add_row(
                row.name or "(root)",
                row.kind,
                str(shape.in_features),
                str(shape.out_features),
                f"{shape.K}" if shape.K == shape.L else f"{shape.K}x{shape.L}",
                f"{shape.rank:.4g}",
                f"{row.params_before:,}",
                f"{row.params_after:,}",
                f"{row.flops_after / row.flops_before:.0%}",
                f"{row.weight_error:.4f}",
                *([f"{row.output_error:.4f}"] if calibrated else []),
            )
        table.add_section()
        share = ""
        if self.flops_before and self.flops_after is not None:
            share = f"{self.flops_after / self.flops_before:.0%}"
        table.add_row("model", *[""] * 5, f"{self.params_before:,}", f"{self.params_after:,}", share)
        if self.skipped:
            table.caption = "left alone: " + "; ".join(
                f"{s.name or '(root)'} ({s.reason})" for s in self.skipped
            )
            table.caption_justify = "left"
        return table

    def __repr__(self) -> str:
        return (
            f"<MonarchReport: {len(self.rows)} layers replaced, {len(self.skipped)} left alone, "
            f"{self.params_before:,} parameters before and {self.params_after:,} after>"
        )

    def _repr_html_(self) -> str:
        """What notebooks show: the table, as wide as it needs to be."""
        console = Console(width=140, record=True, file=io.StringIO())
        console.print(self)
        frame = '<pre style="white-space: pre; overflow-x: auto; line-height: normal">{code}</pre>'
        return console.export_html(inline_styles=True, code_format=frame)

    def plot(self) -> Figure:
        """Parameters and errors of every replaced layer, as a matplotlib figure.

        Raises:
            ImportError: matplotlib is not installed (extra `bench`).
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("a report plots with matplotlib: pip install matplotlib") from error
        names = [row.name or "(root)" for row in self.rows]
        figure = Figure(figsize=(12, max(3.0, 0.22 * len(names))), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        left.barh(names, [row.params_before for row in self.rows], color="lightgrey", label="dense")
        left.barh(names, [row.params_after for row in self.rows], height=0.5, label="Monarch")
        left.set(xlabel="parameters", title=f"{self.params_before:,} to {self.params_after:,} in all")
        right.barh(names, [row.weight_error for row in self.rows], color="lightgrey", label="of the weight")
        right.barh(names, [row.output_error for row in self.rows], height=0.5, label="of the output")
        right.set(xlabel="relative error", title="Errors")
        for axes in (left, right):
            axes.legend()
            axes.tick_params(axis="y", labelsize=6)
        left.invert_yaxis()
        return figure

    def __str__(self) -> str:
        console = Console(width=140, no_color=True)
        with console.capture() as capture:
            console.print(self)
        return capture.get()
