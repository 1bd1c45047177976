"""What follows a run: a live table in a terminal, logs in files, TensorBoard."""

from __future__ import annotations

import csv
import json
import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from monarch_rocm.distributed.run import Record, Restarted, Sink


def sinks(
    log: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    tensorboard: str | os.PathLike[str] | None,
    dashboard: bool,
    ranks: int,
    steps: int,
) -> list[Sink]:
    """All that was asked for.

    Raises:
        ValueError: a log of another kind than ".csv" or ".jsonl".
        ImportError: TensorBoard where it is not installed.
    """
    logs = [log] if isinstance(log, (str, os.PathLike)) else list(log)
    found: list[Sink] = []
    for path in map(Path, logs):
        if path.suffix not in (".csv", ".jsonl"):
            raise ValueError(f"a log is '.csv' or '.jsonl', but {str(path)!r} was given")
    found += [CsvLog(p) if p.suffix == ".csv" else JsonLog(p) for p in map(Path, logs)]
    if tensorboard is not None:
        found.append(TensorBoard(tensorboard))
    if dashboard:
        console = Console()
        if console.is_terminal:
            found.append(Dashboard(console, ranks, steps))
    return found


class JsonLog:
    """A line of JSON for each record and each restart, appended."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1)

    def _write(self, kind: str, values: dict[str, Any]) -> None:
        self._file.write(json.dumps({"kind": kind, "time": time.time(), **values}, default=str) + "\n")

    def record(self, record: Record) -> None:
        """Write a step."""
        self._write("step", record._asdict())

    def restarted(self, restart: Restarted) -> None:
        """Write a restart."""
        self._write("restart", restart._asdict())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class CsvLog:
    """A row for each rank and step, appended; the columns are those of the first record, or of the file."""

    FIXED = ("time", "attempt", "step", "rank", "seconds")

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._columns: list[str] | None = None
        if path.exists() and path.stat().st_size:
            with path.open(newline="") as file:
                self._columns = next(csv.reader(file))
        self._file = path.open("a", newline="", buffering=1)
        self._writer = csv.writer(self._file)

    def record(self, record: Record) -> None:
        """Write a step."""
        if self._columns is None:
            self._columns = [*self.FIXED, *record.metrics]
            self._writer.writerow(self._columns)
        now = f"{time.time():.3f}"
        for rank, metrics in enumerate(record.per_rank):
            fixed = (now, record.attempt, record.step, rank, f"{record.seconds:.6f}")
            row = {**metrics, **dict(zip(self.FIXED, fixed, strict=True))}
            self._writer.writerow([row.get(column, "") for column in self._columns])

    def restarted(self, restart: Restarted) -> None:
        """Rows have the attempt's number."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Scalars of rank 0."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(os.fspath(folder))  # type: ignore[no-untyped-call]

    def record(self, record: Record) -> None:
        """Write a step."""
        for name, value in record.metrics.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, record.step)  # type: ignore[no-untyped-call]

    def restarted(self, restart: Restarted) -> None:
        """Write what happened, as a text."""
        step = restart.resumed_step or 0
        self._writer.add_text("restarts", restart.cause, step)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Close the files."""
        self._writer.close()  # type: ignore[no-untyped-call]


PACE_S = 5.0  # seconds over which the pace is taken: records come in batches


class Dashboard:
    """A live table: a row a rank, its step, metrics and speed, and the restarts below."""

    def __init__(self, console: Console, ranks: int, steps: int) -> None:
        self._ranks, self._steps = ranks, steps
        self._last: Record | None = None
        self._restarts: list[Restarted] = []
        self._arrived: deque[tuple[float, int]] = deque()  # (when, step), of the last seconds
        self._live = Live(console=console, get_renderable=self.table, refresh_per_second=4)
        self._live.start()

    def record(self, record: Record) -> None:
        """Show a step."""
        now = time.monotonic()
        if self._last is None or record.step != self._last.step + 1:
            self._arrived.clear()
        self._last = record
        self._arrived.append((now, record.step))
        while len(self._arrived) > 2 and now - self._arrived[0][0] > PACE_S:
            self._arrived.popleft()

    def pace(self) -> float | None:
        """Seconds a step, checkpoints and all; None before there is a second step."""
        if len(self._arrived) < 2:
            return None
        (began, first), (ended, last) = self._arrived[0], self._arrived[-1]
        return (ended - began) / (last - first)

    def restarted(self, restart: Restarted) -> None:
        """Show a restart."""
        self._restarts.append(restart)

    def close(self) -> None:
        """Leave the last table standing."""
        self._live.stop()

    def table(self) -> Table:
        """What is shown."""
        last, pace = self._last, self.pace()
        table = Table(title="starting" if last is None else f"step {last.step + 1} of {self._steps}")
        names = [] if last is None else [n for n, v in last.metrics.items() if isinstance(v, (int, float))]
        for column in ("rank", *names, "ms/step", *(["tokens/s"] if "tokens" in names else [])):
            table.add_column(column, justify="right")
        for rank, metrics in enumerate(last.per_rank if last else ()):
            cells = [f"{metrics.get(name, ''):.6g}" if name in metrics else "" for name in names]
            cells.append("" if pace is None else f"{1e3 * pace:.1f}")
            if "tokens" in names:
                tokens = metrics.get("tokens")
                cells.append(f"{tokens / pace:,.0f}" if tokens and pace else "")
            table.add_row(str(rank), *cells)
        if self._restarts:
            lines = [f"restart {i}: {r.cause} ({r.seconds:.1f} s)" for i, r in enumerate(self._restarts, 1)]
            table.caption = "\n".join(lines[-5:])
        return table
