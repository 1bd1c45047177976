"""`heal`: train a compressed model to answer as the dense one does (distillation)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor, nn

from monarch_rocm import calibration, files
from monarch_rocm.calibration import Readout
from monarch_rocm.linear import MonarchLinear

WARMUP = 0.03  # of all steps
FLOOR = 0.02  # of the learning rate, at the end
FORMAT = 1  # of a checkpoint


@dataclass
class Healing:
    """What `heal` did.

    Attributes:
        losses (list of float): the loss of every step, those before a resumption too.
        resumed_at (int): the step that this call began at, 0 where there was nothing to resume.
        seconds (float): how long this call trained.
    """

    losses: list[float] = field(default_factory=list)
    resumed_at: int = 0
    seconds: float = 0.0


def heal(
    student: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Any],
    *,
    steps: int | None = None,
    lr: float = 1e-3,
    readout: Readout | None = None,
    layerwise: float = 1.0,
    checkpoint: str | Path | None = None,
    every: int = 100,
    progress: bool = True,
) -> Healing:
    """Train `student`, a compressed copy of `teacher`, to give what `teacher` gives on batches of inputs.

    No labels are needed. Every step adds two losses: of the models' outputs (end to end), and, with the
    weight `layerwise`, of the outputs of every Monarch layer against those of the teacher's module of the
    same name. What has `requires_grad` is trained, by AdamW without weight decay, with a short warm-up
    and a cosine to nearly nothing. Dropout is off: the student has to follow the teacher, not to
    generalise from few labels. Under `torch.autocast`, both models run in its dtype; parameters should
    be float32, since small steps are lost in half precisions.

    Args:
        student (nn.Module): trained in place; its training mode is kept.
        teacher (nn.Module): left as it is; on the student's device.
        batches (iterable): as for `calibration.moments`. Begun anew when it ends and steps remain. To
            resume, it must give the same batches in the same order: a list, or an object whose
            `__iter__` shuffles with a fixed seed.
        steps (int, optional): optimizer steps, a batch each. Default: one pass, where `batches` has a
            length.
        lr (float): learning rate at its highest.
        readout (callable, optional): `readout(output, batch)` gives what of a model's output matters, a
            tensor such as a pooled embedding, as for `monarchize`. Default: logits, compared by their
            Kullback-Leibler divergence; else the last hidden state, else what the model returns.
        layerwise (float): weight of the layers' loss; 0 leaves it out.
        checkpoint (path, optional): file for all that is needed to go on, written every `every` steps
            and at the end, atomically. Where it exists already, training goes on from there; a finished
            one is only loaded.
        every (int): steps between checkpoints.
        progress (bool): show a progress bar.

    Returns:
        Healing: the losses, and the step that this call began at.

    Raises:
        ValueError: `steps` left out for batches without a length; no batches; nothing to train; no
            Monarch layers to compare; a checkpoint of another run.
        FloatingPointError: a loss that is not finite, with its step. The checkpoint before it stays.

    Example:
        >>> import copy
        >>> teacher = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        >>> student, _ = monarchize(copy.deepcopy(teacher), MonarchConfig(nblocks=4))
        >>> data = [torch.randn(16, 32) for _ in range(50)]
        >>> losses = heal(student, teacher, data, progress=False).losses
        >>> losses[-1] < losses[0]
        True
    """
    if steps is None:
        if not isinstance(batches, Sized):
            raise ValueError("steps must be given: these batches have no length")
        steps = len(batches)
    if steps < 1:
        raise ValueError(f"steps must be at least 1, but steps={steps} was given")
    trained = {name: p for name, p in student.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError("the student has nothing to train: no parameter has requires_grad")
    pairs = _pairs(student, teacher) if layerwise else []
    optimizer = torch.optim.AdamW(trained.values(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    plan = {"format": FORMAT, "steps": steps, "lr": lr, "layerwise": layerwise}
    path = None if checkpoint is None else Path(checkpoint)
    healing = Healing()
    if path is not None and path.exists():
        healing.losses = _resume(path, plan, trained, optimizer)
        healing.resumed_at = len(healing.losses)
    device = next(iter(trained.values())).device
    began = time.perf_counter()
    with (
        Progress(disable=not progress) as bar,
        _Outputs(pairs) as outputs,
        calibration.evaluating(student, teacher),
    ):
        optimizer.zero_grad(set_to_none=True)
        task = bar.add_task("healing", total=steps, completed=healing.resumed_at)
        for step, batch in enumerate(_cycle(batches, steps)):
            if step < healing.resumed_at:
                continue
            batch = calibration.moved(batch, device)
            for group in optimizer.param_groups:
                group["lr"] = lr * _schedule(step, steps)
            with torch.no_grad():
                wanted = calibration.call(teacher, batch)
            value = distance(calibration.call(student, batch), wanted, batch, readout)
            if pairs:
                value = value + layerwise * outputs.distance(calibration.mask_of(batch))
            number = float(value.detach())
            if not math.isfinite(number):
                raise FloatingPointError(f"the loss of step {step} is {number}; try a lower lr than {lr}")
            value.backward()
            nn.utils.clip_grad_norm_(trained.values(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            healing.losses.append(number)
            bar.update(task, advance=1, description=f"healing, loss {number:.4f}")
            if path is not None and ((step + 1) % every == 0 or step + 1 == steps):
                _save(path, plan, healing.losses, trained, optimizer)
    healing.seconds = time.perf_counter() - began
    return healing


def distance(student: Any, teacher: Any, batch: Any, readout: Readout | None = None) -> Tensor:
    """How far one model's output is from the other's, on the positions that the batch's mask keeps.

    For outputs with `logits`, the Kullback-Leibler divergence of the predicted distributions, in nats a
    position; for others, or what `readout` makes of them, the squared change over the squared output.
    """
    mask = calibration.mask_of(batch)
    if readout is not None:
        return _relative(readout(student, batch), readout(teacher, batch), None)
    if hasattr(student, "logits"):
        one, two = student.logits.float().log_softmax(-1), teacher.logits.float().log_softmax(-1)
        values = F.kl_div(one, two, reduction="none", log_target=True).sum(-1)
        if mask is not None and mask.shape == values.shape:
            return (values * mask).sum() / mask.sum()
        return values.mean()
    one, two = (getattr(output, "last_hidden_state", output) for output in (student, teacher))
    if not isinstance(one, Tensor):
        raise TypeError(f"the models return {type(one).__name__}: say what matters of it by a readout")
    return _relative(one, two, mask)


def _relative(one: Tensor, two: Tensor, mask: Tensor | None) -> Tensor:
    one, two = one.float(), two.float()
    if mask is not None and mask.shape == one.shape[:-1]:
        one, two = one * mask[..., None], two * mask[..., None]
    return (one - two).square().sum() / two.square().sum().clamp_min(1e-12)


def _pairs(student: nn.Module, teacher: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Monarch layers and the teacher's modules of the same names."""
    there = dict(teacher.named_modules())
    mine = {name: module for name, module in student.named_modules() if isinstance(module, MonarchLinear)}
    if not mine:
        raise ValueError("the student has no Monarch layers to compare; pass layerwise=0 or convert it")
    missing = [name for name in mine if name not in there]
    if missing:
        raise ValueError(f"the teacher has no module {missing[0]!r} to compare with; pass layerwise=0")
    return [(module, there[name]) for name, module in mine.items()]


class _Outputs:
    """Keeps what pairs of modules return in a pass, while it is entered."""

    def __init__(self, pairs: list[tuple[nn.Module, nn.Module]]) -> None:
        self.pairs = pairs
        self.kept: dict[nn.Module, Tensor] = {}

    def __enter__(self) -> _Outputs:
        modules = [module for pair in self.pairs for module in pair]
        self.handles = [module.register_forward_hook(self._keep) for module in modules]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept[module] = output

    def distance(self, mask: Tensor | None) -> Tensor:
        """Mean over the pairs that were called; forgets what was kept."""
        kept, self.kept = self.kept, {}
        values = [_relative(kept[a], kept[b], mask) for a, b in self.pairs if a in kept and b in kept]
        return torch.stack(values).mean()


def _schedule(step: int, steps: int) -> float:
    warm = max(1, round(WARMUP * steps))
    if step < warm:
        return (step + 1) / warm
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def _cycle(batches: Iterable[Any], steps: int) -> Iterable[Any]:
    done = 0
    while done < steps:
        before = done
        for batch in batches:
            yield batch
            done += 1
            if done == steps:
                return
        if done == before:
            raise ValueError("no batches" if done == 0 else "the batches cannot be iterated again")


def _save(
    path: Path, plan: dict[str, Any], losses: list[float], trained: dict[str, Any], optimizer: Any
) -> None:
    parameters = {name: parameter.detach() for name, parameter in trained.items()}
    state = {"plan": plan, "losses": losses, "parameters": parameters, "optimizer": optimizer.state_dict()}
    with files.written(path) as draft:
        torch.save(state, draft)


@torch.no_grad()
def _resume(path: Path, plan: dict[str, Any], trained: dict[str, Any], optimizer: Any) -> list[float]:
    """The losses so far. The student is changed only by a file that fits it and the optimizer whole."""
    try:
        state = files.loaded(path)
        saved, parameters = state["plan"], dict(state["parameters"])
        losses = [float(loss) for loss in state["losses"]]
        shapes = {name: tuple(value.shape) for name, value in parameters.items()}
    except Exception as error:
        raise ValueError(f"{path} is no checkpoint of heal: {error}") from error
    if saved != plan:
        raise ValueError(f"{path} is of another run: it has {saved}, this one {plan}")
    if shapes != {name: tuple(parameter.shape) for name, parameter in trained.items()}:
        raise ValueError(f"{path} is of another student: its parameters have other names or shapes")
    try:
        optimizer.load_state_dict(state["optimizer"])
        kept = all(
            value.shape in ((), parameter.shape)
            for parameter, moments in optimizer.state.items()
            for value in moments.values()
        )
    except Exception as error:
        raise ValueError(f"{path} has no state of the optimizer: {error}") from error
    if not kept:
        raise ValueError(f"{path} has a state of another optimizer, of other shapes")
    for name, value in parameters.items():
        trained[name].copy_(value)
    return losses
