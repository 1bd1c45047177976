"""Records of steps on their way to the controller, many in a message.

A message takes the loop that sends it about 0.15 ms, and more in the actor runtime's own threads and in the
controller, whatever it says.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

EVERY = 0.1  # seconds between messages; one that follows no other leaves at once

Told = tuple[int, dict[str, Any], float]  # step, metrics, seconds


class Outbox:
    """Sends records from a thread of its own, in order; the loop that puts them in waits for nothing.

    Args:
        send (callable): takes a list of (step, metrics, seconds).
    """

    def __init__(self, send: Callable[[list[Told]], None]) -> None:
        self._send = send
        self._waiting: deque[tuple[int, dict[str, Any], float, Any]] = deque()
        self._sending = threading.Lock()
        self._filled, self._closed = threading.Event(), threading.Event()
        self._error: Exception | None = None
        threading.Thread(target=self._run, daemon=True, name="monarch-rocm-outbox").start()

    def put(self, step: int, metrics: dict[str, Any], seconds: float) -> None:
        """Leave a record to be sent; numbers that a GPU still computes are waited for by the thread.

        Raises:
            TypeError: a tensor of more than one number.
            Exception: why an earlier record could not be sent.
        """
        if self._error is not None:
            raise self._error
        event = None
        if any(isinstance(v, torch.Tensor) and v.device.type == "cuda" for v in metrics.values()):
            event = torch.cuda.Event()
        values = {name: _number(name, value) for name, value in metrics.items()}
        if event is not None:
            event.record()
        self._waiting.append((step, values, seconds, event))
        self._filled.set()

    def flush(self, patience: float = float("inf")) -> None:
        """Send all that waits, at once; `patience` is the longest to wait for a GPU, in seconds.

        Raises:
            Exception: why a record could not be sent.
        """
        self._deliver(patience)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._filled.set()

    def _run(self) -> None:
        while self._filled.wait() and not self._closed.is_set():
            self._filled.clear()
            self._deliver(0.0)
            if self._waiting:
                self._filled.set()
            self._closed.wait(EVERY)

    def _deliver(self, patience: float) -> None:
        until = time.monotonic() + patience
        with self._sending:
            ready: list[Told] = []
            try:
                while self._waiting:
                    step, metrics, seconds, event = self._waiting[0]
                    if event is not None and not _over(event, until):
                        break
                    self._waiting.popleft()
                    numbers = {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in metrics.items()}
                    ready.append((step, numbers, seconds))
            except Exception as error:  # of a GPU, at the metrics of this step
                self._waiting.clear()
                self._error = error
            try:
                if ready:
                    self._send(ready)
            except Exception as error:  # what does not pickle
                self._error = self._error or error


def _over(event: Any, until: float) -> bool:
    """Whether a GPU has come to an event by then."""
    while not event.query():
        if time.monotonic() >= until:
            return False
        time.sleep(0.001)
    return True


def _number(name: str, value: Any) -> Any:
    """A value as it is now; of a tensor on a GPU a copy in pinned memory, which the GPU fills in time."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1:
        raise TypeError(f"metric {name!r} must be one number, but it is a tensor {tuple(value.shape)}")
    value = value.detach()
    if value.device.type == "cuda":
        return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
    return value.item()
