"""Model surgery: `monarchize` puts Monarch layers where a model had dense ones."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from monarch_rocm import fitting, init, projection, tree
from monarch_rocm.allocation import Budget, Choice, allocate, choices
from monarch_rocm.calibration import Moments, Readout, costs, moments, sensitivities
from monarch_rocm.config import MonarchConfig
from monarch_rocm.integrations.transformers import is_conv1d, remember
from monarch_rocm.linear import MonarchLinear
from monarch_rocm.report import MonarchReport, Row, Skipped
from monarch_rocm.shape import MonarchShape

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
FilterFn = Callable[[nn.Module, str], bool]


def monarchize(
    model: nn.Module,
    config: MonarchConfig | None = None,
    filter_fn: FilterFn | None = None,
    *,
    calibration: Iterable[Any] | None = None,
    budget: float | Budget | None = None,
    readout: Readout | None = None,
) -> tuple[nn.Module, MonarchReport]:
    """Replace the linear layers of a model by Monarch layers, in place.

    `nn.Linear` and transformers' `Conv1D` are replaced. A layer that is used in several places
    stays one layer, reported under its first name; two layers that share a weight share their
    factors; a layer whose weight belongs to something else too, as a head tied to an embedding
    does, is left alone. Bias, hooks, dtype, device, training mode and `requires_grad` are kept.

    Left alone as well are subclasses of `nn.Linear`, layers whose weight is computed by a
    parametrisation or a hook, and, without a `filter_fn`, the two layers of
    `nn.TransformerEncoderLayer` whose weights its fused path reads. The report names each with its
    reason.

    Args:
        model (nn.Module): changed in place. A model on the meta device stays there.
        config (MonarchConfig, optional): Default: `MonarchConfig()`.
        filter_fn (callable, optional): `filter_fn(module, name)` is asked for each layer that could
            be replaced; true means replace. Default: all of them.
        calibration (iterable, optional): batches of inputs such as the model will see, for a forward
            pass each (`calibration.moments` says of what form). Factors are then the nearest in the
            layers' outputs on these, not in their weights, and a layer's own bias takes up the change
            of its mean output. Default: nearest in the weights.
        budget (float or Budget, optional): the fraction of the model's parameters (or FLOPs, see
            `Budget`) that may be left, never exceeded. nblocks and rank are then chosen layer by layer,
            in place of the config's, for the least error in all, and layers that are better left dense
            stay so. With calibration, errors are weighed by how much the model's output depends on
            them, for which gradients flow through it and batches are kept in memory.
        readout (callable, optional): `readout(output, batch)` gives what of the model's output matters,
            a tensor with a row a sequence, such as a pooled embedding. Errors are weighed as with a
            budget. Default, with a budget: logits, else the last hidden state, else all that the model
            returns.

    Returns:
        (nn.Module, MonarchReport): the model, the same object unless it is itself a linear layer,
        and what was done. An optimizer made before holds the old parameters: make it afterwards.

    Raises:
        TypeError: a `model` that is no module, a `config` that is no `MonarchConfig`.
        ValueError: a weight that is not finite; calibration with init "random", without batches, on
            the meta device or for complex weights; a budget that cannot be reached, or together with a
            rank, init "random", the meta device or complex weights; a readout without calibration.
            Nothing has been replaced then.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> model, report = monarchize(model, MonarchConfig(nblocks=4))
        >>> report.params_before, report.params_after
        (33088, 10560)
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> model, report = monarchize(model, calibration=[torch.randn(100, 64)], budget=0.5)
        >>> 0.45 < report.params_after / report.params_before <= 0.5
        True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, but it is a {type(model).__name__}")
    config = MonarchConfig() if config is None else config
    if not isinstance(config, MonarchConfig):
        raise TypeError(f"config must be a MonarchConfig, but it is a {type(config).__name__}")
    budget = Budget(budget) if isinstance(budget, (int, float)) else budget
    report = MonarchReport(params_before=_count(model.parameters()))
    chosen, report.skipped = _choose(model, filter_fn)
    if budget is not None:
        _check_budget(budget, config, calibration)
        if not chosen:
            raise ValueError("a budget is out of reach: the model has no linear layers that can be replaced")
    if readout is not None and calibration is None:
        raise ValueError("a readout is of outputs on calibration batches, but none were given")
    if budget is not None or calibration is not None:
        _check_fitting(chosen, config, "a budget" if calibration is None else "calibration")
    shapes = {}
    for linear, name in chosen.items():
        weight = _dense_weight(linear)
        out_features, in_features = weight.shape
        if budget is None:
            shapes[linear] = MonarchShape(
                in_features, out_features, config.nblocks, config.rank, config.layout
            )
        if config.init == "project" and not weight.is_meta:
            try:
                projection.check_weight(weight)
            except (TypeError, ValueError) as error:
                raise type(error)(f"layer {name!r}: {error}") from None

    seen: dict[int, _Seen] = {}
    rows: dict[nn.Module, int] = {}
    if calibration is not None:
        weighs = budget is not None or readout is not None
        batches = iter(list(calibration) if weighs else calibration)
        first = next(batches, None)
        if first is None:
            raise ValueError("calibration has no batches")
        report.flops_before, rows = costs(model, chosen, first)
        if weighs:
            batches = [first, *batches]  # type: ignore[assignment]
            seen = _calibrate(model, chosen, batches, sensitivities(model, chosen, batches, readout))
        else:
            seen = _calibrate(model, chosen, chain([first], batches), {})
    if budget is not None:
        shapes = _spend(chosen, config, budget, seen, rows, report)
        for linear in [linear for linear in chosen if linear not in shapes]:
            idle = calibration is not None and not _matters(seen.get(id(linear.weight)))
            reason = "the output does not depend on it" if idle else "the budget is well spent on it"
            report.skipped.append(Skipped(chosen.pop(linear), reason))
    replaced: dict[nn.Module, MonarchLinear] = {}
    factors: dict[int, _Factors] = {}
    for linear in chosen:
        parameter = linear.weight
        if id(parameter) not in factors:
            factors[id(parameter)] = _make_factors(linear, shapes[linear], config, seen.get(id(parameter)))
    for linear, name in chosen.items():  # only now, when nothing can fail, is anything touched
        made = factors[id(linear.weight)]
        replaced[linear] = _make_layer(linear, shapes[linear], made, config)
        before, after = _count(linear.parameters()), _count(replaced[linear].parameters())
        kind = type(linear).__name__
        errors = (made.error, made.output_error)
        report.rows.append(Row(name, kind, shapes[linear], before, after, *errors))
    root = tree.replace(model, replaced)
    report.params_after = _count(root.parameters())
    if report.flops_before is not None:
        pairs = zip(chosen, report, strict=True)
        saved = sum(rows[linear] * (row.flops_before - row.flops_after) for linear, row in pairs)
        report.flops_after = report.flops_before - saved
    if report.rows:
        remember(root)
    return root, report


@dataclass(frozen=True)
class _Factors:
    blkdiag1: nn.Parameter
    blkdiag2: nn.Parameter
    error: float
    output_error: float = math.nan
    shift: Tensor | None = None  # of the mean output, for the bias


@dataclass(frozen=True)
class _Seen:
    """Inputs of the layers that share a weight, how much their outputs matter, and whether the one that has
    it has a bias of its own.
    """

    moments: Moments
    outputs: Tensor | None
    shifts: bool


def _check_budget(budget: object, config: MonarchConfig, calibration: object) -> None:
    if not isinstance(budget, Budget):
        raise TypeError(f"budget must be a number or a Budget, but it is a {type(budget).__name__}")
    if config.rank is not None:
        raise ValueError(f"a budget chooses ranks, but rank={config.rank} was given too")
    if budget.of == "flops" and calibration is None:
        raise ValueError("a budget of FLOPs needs calibration batches, on which they are counted")


def _check_fitting(chosen: dict[nn.Module, str], config: MonarchConfig, what: str) -> None:
    """Raise where there are no weights to fit."""
    if config.init != "project":
        raise ValueError(f"{what} is for init='project', but init={config.init!r} was given")
    for linear, name in chosen.items():
        weight = _dense_weight(linear)
        if weight.is_meta or weight.is_complex():
            kind = "is on the meta device" if weight.is_meta else f"has a weight of {weight.dtype}"
            raise ValueError(f"{what} cannot be used: layer {name!r} {kind}")


def _spend(
    chosen: dict[nn.Module, str],
    config: MonarchConfig,
    budget: Budget,
    seen: dict[int, _Seen],
    rows: dict[nn.Module, int],
    report: MonarchReport,
) -> dict[nn.Module, MonarchShape]:
    """The geometry of each layer that is to be replaced, within the budget."""
    layers = defaultdict(list)
    for linear in chosen:
        layers[id(linear.weight)].append(linear)
    weighed = any(_matters(each) for each in seen.values())
    options: dict[int, list[Choice]] = {}
    for key, group in layers.items():
        weight = _dense_weight(group[0])
        second = _second(weight, seen.get(key))
        unit = 1 if budget.of == "parameters" else 2 * sum(rows[linear] for linear in group)
        outputs = seen[key].outputs if key in seen else None
        if weighed and outputs is None:
            continue  # what the output does not depend on is not touched
        # Predictions, for which single precision is enough; the factors are fitted in double.
        outputs = None if outputs is None else outputs.float()
        options[key] = choices(weight, second.float(), outputs, budget.nblocks, config.layout, unit)
    dense = sum(each[0].cost for each in options.values())
    total = report.params_before if budget.of == "parameters" else report.flops_before
    assert total is not None
    limit = math.floor(budget.fraction * total)
    picked = allocate(options, limit - (total - dense))
    if picked is None:
        least = total - dense + sum(min(choice.cost for choice in each) for each in options.values())
        raise ValueError(
            f"a budget of {budget.fraction:g} is {limit:,} of the model's {total:,} {budget.of}, out of "
            f"reach: {total - dense:,} are outside of layers that can be replaced; with these smallest, "
            f"{least:,} ({least / total:.0%}) are left"
        )
    found = {}
    for key, choice in picked.items():
        if choice.shape is not None:
            found.update(dict.fromkeys(layers[key], choice.shape))
    return {linear: found[linear] for linear in chosen if linear in found}


def _matters(seen: _Seen | None) -> bool:
    return seen is not None and seen.outputs is not None


def _second(weight: Tensor, seen: _Seen | None) -> Tensor:
    """Second moment of what a weight is fed; that of white noise where nothing was seen."""
    if seen is not None and seen.moments.weight:
        return seen.moments.about(seen.moments.mean if seen.shifts else None)
    dtype = torch.float32 if weight.device.type == "mps" else torch.float64
    return torch.eye(weight.shape[1], dtype=dtype, device=weight.device)


def _calibrate(
    model: nn.Module,
    chosen: dict[nn.Module, str],
    batches: Iterable[Any],
    matters: dict[nn.Module, Tensor],
) -> dict[int, _Seen]:
    """What is fed to each weight, by the weight's id; without those that no batch came to."""
    owners = _owners(model)
    seen: dict[int, _Seen] = {}
    for linear, found in moments(model, chosen, batches).items():
        key, bias = id(linear.weight), linear._parameters["bias"]
        shifts = bias is not None and len(owners[key]) == len(owners[id(bias)]) == 1
        outputs = matters.get(linear)
        if key in seen:
            found = seen[key].moments + found
            others = [each for each in (outputs, seen[key].outputs) if each is not None]
            outputs = torch.stack(others).sum(0) if others else None
        seen[key] = _Seen(found, outputs, shifts)
    return seen


def _owners(model: nn.Module) -> dict[int, set[nn.Module]]:
    """The modules that hold each parameter, by its id."""
    owners = defaultdict(set)
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)].add(module)
    return owners


def _choose(model: nn.Module, filter_fn: FilterFn | None) -> tuple[dict[nn.Module, str], list[Skipped]]:
    """The layers to replace with their names, and the linear ones that are left alone."""
    owners = _owners(model)
    fused: set[nn.Module] = set()
    compiled: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            fused.update(filter(None, (getattr(module, name, None) for name in ("linear1", "linear2"))))
        if type(module).__name__ == "OptimizedModule":  # torch.compile's, which calls what it was given
            compiled.add(module._orig_mod)  # type: ignore[arg-type]

    chosen, skipped = {}, []
    for name, module in model.named_modules():
        if not (isinstance(module, nn.Linear) or is_conv1d(module)):
            continue
        reason = _obstacle(module)
        if reason is None and module in compiled:
            reason = "it was compiled on its own"
        if reason is None and filter_fn is None and module in fused:
            reason = "nn.TransformerEncoderLayer's fused path reads its weight"
        if reason is None and filter_fn is not None and not filter_fn(module, name):
            reason = "filter_fn"
        if reason is None:
            chosen[module] = name
        else:
            skipped.append(Skipped(name, reason))

    # A tied weight can only follow where all its owners do, and hold it the same way round.
    refused = True
    while refused:
        refused = False
        for module, name in list(chosen.items()):
            others = owners[id(module.weight)] - {module}
            if any(o not in chosen or type(o) is not type(module) for o in others):
                del chosen[module]
                skipped.append(Skipped(name, "its weight is tied to a module that stays dense"))
                refused = True
    return chosen, skipped


def _obstacle(linear: nn.Module) -> str | None:
    """Why a linear layer cannot be replaced at all, None where it can."""
    if type(linear) is not nn.Linear and not is_conv1d(linear):
        return f"{type(linear).__name__} is a subclass of nn.Linear"
    extra = [name for name in linear._parameters if name not in ("weight", "bias")]
    extra += [*linear._buffers, *linear._modules]
    weight = linear._parameters.get("weight")
    if extra or weight is None:
        return f"it holds more than a weight and a bias: {', '.join(extra) or 'a computed weight'}"
    if type(weight.data) is not Tensor:
        return f"its weight is a {type(weight.data).__name__}"
    if weight.dtype not in DTYPES:
        return f"its weight is {weight.dtype}"
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return "its weight has gradient hooks, which know the dense shape"
    if "forward" in vars(linear) or linear._compiled_call_impl is not None:
        return "its forward was replaced or compiled on its own"
    if 0 in weight.shape:
        return "its weight is empty"
    return None


def _dense_weight(linear: nn.Module) -> Tensor:
    """The weight as `(out_features, in_features)`, without a graph."""
    weight: Tensor = linear.weight.detach()  # type: ignore[union-attr,operator]
    return weight.T if is_conv1d(linear) else weight


@torch.no_grad()
def _make_factors(
    linear: nn.Module, shape: MonarchShape, config: MonarchConfig, seen: _Seen | None
) -> _Factors:
    dense = _dense_weight(linear)
    parameter: nn.Parameter = linear.weight  # type: ignore[assignment]
    error, output_error, shift = math.nan, math.nan, None
    if seen is not None and seen.moments.weight:
        second = _second(dense, seen)
        factors = fitting.fit_to(dense, second, shape, seen.outputs)
        error = _relative_error(dense, factors, shape)
        change = projection.change(dense, factors, shape).to(second.dtype)
        power = fitting.power(dense, second)
        output_error = math.sqrt(max(0.0, fitting.power(change, second)) / power) if power > 0 else 0.0
        if seen.shifts:
            shift = -change @ seen.moments.mean
    elif config.init == "project" and not dense.is_meta:
        factors = projection.project_to(dense, shape)
        error = _relative_error(dense, factors, shape)
    else:
        factors = dense.new_empty(shape.factor1), dense.new_empty(shape.factor2)
        init.uniform_(*factors, None, shape)
    one, two = (nn.Parameter(factor, parameter.requires_grad) for factor in factors)
    for factor in (one, two):  # marks such as "no weight decay"
        vars(factor).update(vars(parameter))
    return _Factors(one, two, error, output_error, shift)


def _relative_error(dense: Tensor, factors: tuple[Tensor, Tensor], shape: MonarchShape) -> float:
    norm = float(torch.linalg.vector_norm(projection.check_weight(dense)))
    return float(torch.linalg.vector_norm(projection.change(dense, factors, shape))) / norm if norm else 0.0


def _make_layer(
    linear: nn.Module, shape: MonarchShape, factors: _Factors, config: MonarchConfig
) -> MonarchLinear:
    bias = linear._parameters["bias"]
    if bias is not None and factors.shift is not None:
        # Into new memory: a state dict that was taken before keeps what it had.
        bias.data = (bias.data.to(factors.shift.dtype) + factors.shift).to(bias.dtype)
    parameters = factors.blkdiag1, factors.blkdiag2, bias
    layer = MonarchLinear._assemble(shape, *parameters, config.backend, config.recompute)
    # Hooks live in dicts that their handles know, so the dicts move over as they are. What users
    # or libraries hung on the layer moves with them.
    stays = {"_parameters", "_buffers", "_modules", "in_features", "out_features", "nf", "nx"}
    for key, value in vars(linear).items():
        if key not in stays and key not in ("shape", "backend", "recompute"):
            vars(layer)[key] = value
    for hook in layer._load_state_dict_pre_hooks.values():
        if getattr(hook, "with_module", False):
            hook.module = weakref.ref(layer)  # type: ignore[attr-defined]
    return layer


def _count(parameters: Iterator[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters if not is_lazy(parameter))
