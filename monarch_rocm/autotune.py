"""MONARCH_ROCM_AUTOTUNE=1: tune a launch before it first runs, where the user's table has no row of
just its shape.

The variable is read when the package is imported, so that without it a call pays nothing.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from monarch_rocm import dispatch, launches
from monarch_rocm.launches import Operation
from monarch_rocm.shape import MonarchShape

ROUNDS = 10
_seen: set[tuple[Any, ...]] = set()


def enabled() -> bool:
    """Whether the environment asks for it."""
    return os.environ.get("MONARCH_ROCM_AUTOTUNE", "0").lower() in ("1", "true", "on", "yes", "y")


def launchers() -> Any:
    """Whose `linear`, `stage`, `stage_wgrad` and `interleave` the ops call: `dispatch`'s as they are,
    or where the environment asks for it, the same behind `tuned`.
    """
    if not enabled():
        return dispatch
    return SimpleNamespace(
        linear=tuned(dispatch.linear, _linear),
        stage=tuned(dispatch.stage, _stage),
        stage_wgrad=tuned(dispatch.stage_wgrad, _stage_wgrad),
        interleave=tuned(dispatch.interleave, _interleave),
    )


def _linear(
    x: Tensor, w1: Tensor, w2: Tensor, bias: Tensor | None, out_features: int, interleaved: bool, keep: bool
) -> tuple[Operation, ...]:
    layout = "interleaved" if interleaved else "blocked"
    shape = MonarchShape.from_factors(w1.shape, w2.shape, x.shape[1], out_features, layout)
    return launches.forward(shape, _bucket(x), keep)


def _stage(
    x: Tensor, w: Tensor, out_features: int, group_in: int, group_out: int, hidden: bool
) -> tuple[Operation, ...]:
    blocks, n_out, n_in = w.shape
    sizes = (_bucket(x), blocks, n_out, n_in, x.shape[1], out_features)
    return (launches.Stage(*sizes, group_in, group_out, hidden, not w.is_contiguous()),)


def _stage_wgrad(
    g: Tensor, a: Tensor, blocks: int, n_out: int, n_in: int, group_out: int, group_in: int
) -> tuple[Operation, ...]:
    sizes = (_bucket(g), blocks, n_out, n_in, g.shape[1], a.shape[1])
    return (launches.Wgrad(*sizes, group_out, group_in, g.stride(0) == 1),)


def _interleave(
    x: Tensor, rows: int, columns: int, out_features: int, bias: Tensor | None
) -> tuple[Operation, ...]:
    return (launches.Interleave(_bucket(x), rows, columns, x.shape[1], out_features),)


def _bucket(x: Tensor) -> int:
    return dispatch.kernels().tuning.bucket_of(x.shape[0])  # type: ignore[no-any-return]


def tuned(run: Callable[..., Any], describe: Callable[..., tuple[Operation, ...]]) -> Callable[..., Any]:
    """`run`, a function of `dispatch` whose last argument is the path, that first tunes what it may
    launch: `describe` says what that is from the other arguments.
    """

    def tune_and_run(*args: Any) -> Any:
        *operands, path = args
        x = operands[0]
        if path != "torch" and _can_measure(x):
            prepare(describe(*operands), x.dtype, x.device)
        return run(*args)

    return tune_and_run


def prepare(operations: tuple[Operation, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Tune the rows that operations look up and the user's table lacks, once a process and shape.

    Processes take turns under a lock; who waited reads what the others wrote. Where measuring or
    writing fails, a warning says so and the shipped configs stay.
    """
    from monarch_rocm import tune
    from monarch_rocm.kernels import store, tuning

    key = (operations, dtype, device)
    if key in _seen:
        return
    arch = tuning.architecture(device)

    def has_row(task: launches.Task) -> bool:
        sizes = (task.n_out, task.n_in, task.tokens)
        return tuning.exact(task.kernel, arch, dtype.itemsize, *sizes) is not None

    try:
        for task in launches.tasks(operations):
            if has_row(task):
                continue
            with store.measuring(arch):
                tuning.refresh()
                if not has_row(task):
                    with _apart(device):
                        found = tune.search(task, dtype, device, ROUNDS)
                    tune.keep(found, dtype, arch)
    except (OSError, torch.OutOfMemoryError) as error:
        warnings.warn(f"MONARCH_ROCM_AUTOTUNE: the shipped configs stay, since {error}", stacklevel=2)
    _seen.add(key)


def _can_measure(x: Tensor) -> bool:
    """Whether the call is a real one on which a search may be spent: no tracer, no fake tensor, no graph
    being captured, and some tokens.
    """
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and x.shape[0] > 0
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not (x.device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    )


@contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """On a stream of its own: the caller's may be waiting for another process, which waits for us."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield
