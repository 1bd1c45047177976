"""Dense for a part of the training, Monarch for the rest: conversions between steps, with optimizers.

Parameters must be whole: convert a model before it is sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monarch_rocm import tree
from monarch_rocm.config import MonarchConfig
from monarch_rocm.convert import FilterFn, monarchize
from monarch_rocm.linear import MonarchLinear
from monarch_rocm.optim import Muon, factor_rates
from monarch_rocm.projection import monarch_weight
from monarch_rocm.report import MonarchReport
from monarch_rocm.shape import MonarchShape

# What optimizers keep for each entry of a parameter: means of gradients, and of their squares.
MEANS, SQUARES = ("exp_avg", "momentum_buffer"), ("exp_avg_sq",)


def to_monarch(
    model: nn.Module,
    config: MonarchConfig | None = None,
    filter_fn: FilterFn | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    calibration: Iterable[Any] | None = None,
) -> tuple[nn.Module, MonarchReport]:
    """Between two steps of a training, go on with Monarch layers where dense ones were.

    The layers are replaced by `monarchize`. In the optimizer, each dense weight's place is taken by
    its two factors: their rates are the weight's, times `factor_rates`; every other option of the
    weight's group is kept. Running means of gradients become those that the factors would have had
    with the same gradients of the dense weight; means of squared gradients likewise, as if entries
    of a gradient were independent, but no less than the squares of the means, so that Adam's first
    steps are no larger than others; a count of steps goes on. Other state begins anew.

    A `torch.optim.lr_scheduler` knows the groups that were there when it was made: make a new one,
    for which the groups have their `initial_lr`.

    Args:
        model (nn.Module): changed in place.
        config, filter_fn, calibration: as in `monarchize`.
        optimizer (Optimizer, optional): changed in place. Default: there is none yet.

    Returns:
        (nn.Module, MonarchReport): as `monarchize`.

    Raises:
        TypeError, ValueError: as `monarchize`.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> model, report = to_monarch(model, MonarchConfig(nblocks=4), optimizer=optimizer)
        >>> [group["lr"] for group in optimizer.param_groups], len(optimizer.state[model[0].blkdiag1])
        ([0.001, 0.002], 3)
    """
    before = dict(model.named_modules(remove_duplicate=False))
    model, report = monarchize(model, config, filter_fn, calibration=calibration)
    if optimizer is None:
        return model, report
    weights: dict[Tensor, tuple[MonarchLinear, bool]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, MonarchLinear) and module is not before[name]:
            transposed = type(before[name]) is not nn.Linear  # Conv1D
            weights[before[name].weight] = module, transposed  # type: ignore[index]
    muon = isinstance(optimizer, Muon)
    _exchange(optimizer, {weight: _successors(*new, muon) for weight, new in weights.items()})
    return model, report


def to_dense(model: nn.Module, *, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
    """Between two steps of a training, go on with dense layers where Monarch ones were.

    Each layer becomes its `to_linear()`, with the same function. In the optimizer the dense weight
    takes the place of both factors, at the rate of the first without its multiple (`factor_rates`),
    and its state begins anew: gradients of factors do not say what those of the dense weight were.

    Args:
        model (nn.Module): changed in place.
        optimizer (Optimizer, optional): changed in place. Default: there is none yet.

    Returns:
        nn.Module: the model, the same object unless it is itself a Monarch layer.

    Raises:
        ValueError: a layer that still has a guide (`finish_guidance`).

    Example:
        >>> layer = MonarchLinear(64, 64, nblocks=4)
        >>> x = torch.randn(2, 64)
        >>> torch.allclose(to_dense(layer)(x), layer(x), atol=1e-5)
        True
    """
    if any(isinstance(module, SelfGuidedLinear) for module in model.modules()):
        raise ValueError("the model has guided layers: call finish_guidance before to_dense")
    made: dict[nn.Module, nn.Module] = {}
    successors: dict[Tensor, list[_Successor]] = {}
    for module in model.modules():
        if isinstance(module, MonarchLinear):
            linear = module.to_linear()
            linear.bias = module.bias  # type: ignore[assignment]
            made[module] = linear
            rate = 1 / factor_rates(module.shape, muon=isinstance(optimizer, Muon))[0]
            successors[module.blkdiag1] = [_Successor(linear.weight, rate)]
            successors[module.blkdiag2] = []
    if optimizer is not None:
        _exchange(optimizer, successors)
    return tree.replace(model, made)


class SelfGuidedLinear(nn.Module):
    """A Monarch layer that a dense guide with the same function at the start helps through training.

    `y = (1 - share) * layer(x) + share * guide(x)`. The share goes from 1 to 0 in the course of the
    training (`set_guidance`), so that the model trains like a dense one at first. At the start, outputs
    and the gradients of inputs are the layer's own, whatever the share.

    Args:
        layer (MonarchLinear): kept as it is; `finish_guidance` puts it back.

    Attributes:
        layer (MonarchLinear): as given.
        guide (Parameter): `(out_features, in_features)`, the layer's dense weight at the start.
        share (Tensor): of the guide, a buffer, 1 at first.

    Source: Wei et al., "Building on Efficient Foundations: Effectively Training LLMs with Structured
    Feedforward Layers", 2024. Theirs starts from a guide that is not quite the layer.

    Example:
        >>> layer = MonarchLinear(64, 64, nblocks=4)
        >>> x = torch.randn(2, 64)
        >>> torch.allclose(SelfGuidedLinear(layer)(x), layer(x), atol=1e-5)
        True
    """

    share: Tensor

    def __init__(self, layer: MonarchLinear) -> None:
        super().__init__()
        self.layer = layer
        self.guide = nn.Parameter(layer.weight.detach().clone(memory_format=torch.contiguous_format))
        self.register_buffer("share", torch.ones((), device=layer.blkdiag1.device))

    def forward(self, input: Tensor) -> Tensor:
        """`input (..., in_features)` to `(..., out_features)`."""
        monarch = self.layer(input)
        dense = F.linear(input, self.guide, self.layer.bias)
        return torch.lerp(monarch, dense, self.share.to(monarch.dtype))


def self_guide(model: nn.Module) -> nn.Module:
    """Put a `SelfGuidedLinear` around each Monarch layer, in place. Make the optimizer afterwards.

    Args:
        model (nn.Module): changed in place.

    Returns:
        nn.Module: the model, the same object unless it is itself a Monarch layer.

    Example:
        >>> model = self_guide(nn.Sequential(MonarchLinear(64, 64), nn.ReLU(), nn.Linear(64, 8)))
        >>> for step in range(100):
        ...     set_guidance(model, guidance(step, 50))
        >>> type(finish_guidance(model)[0]).__name__
        'MonarchLinear'
    """
    guided = {module.layer for module in model.modules() if isinstance(module, SelfGuidedLinear)}
    layers = [m for m in model.modules() if isinstance(m, MonarchLinear) and m not in guided]
    return tree.replace(model, {layer: SelfGuidedLinear(layer) for layer in layers})


def guidance(step: int, steps: int) -> float:
    """The guide's share at a step: from 1 at the first to 0 from `steps` on, along half a cosine.

    Example:
        >>> [round(guidance(step, 100), 2) for step in (0, 25, 50, 100, 150)]
        [1.0, 0.85, 0.5, 0.0, 0.0]
    """
    return 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / steps))


def set_guidance(model: nn.Module, share: float) -> None:
    """Set the guides' share in all `SelfGuidedLinear` of the model, without waiting for the device."""
    for module in model.modules():
        if isinstance(module, SelfGuidedLinear):
            module.share.fill_(share)


def finish_guidance(model: nn.Module, *, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
    """Put the Monarch layers back in place of `SelfGuidedLinear`; the guides go, from the optimizer too.

    Args:
        model (nn.Module): changed in place.
        optimizer (Optimizer, optional): changed in place.

    Returns:
        nn.Module: the model, the same object unless it is itself a guided layer.

    Raises:
        ValueError: a guide whose share is not 0 yet, without which the model would be another.
    """
    guided = [module for module in model.modules() if isinstance(module, SelfGuidedLinear)]
    for module in guided:
        if float(module.share):
            raise ValueError(
                f"the guides still have a share of {float(module.share):.3g}; bring it to 0 first "
                "(set_guidance), or the model changes"
            )
    if optimizer is not None:
        _exchange(optimizer, {module.guide: [] for module in guided})
    return tree.replace(model, {module: module.layer for module in guided})


class _Successor:
    """A parameter that takes another's place in an optimizer, and how state becomes its own."""

    def __init__(
        self, parameter: Tensor, rate: float, convert: Callable[[str, Tensor], Tensor] | None = None
    ) -> None:
        self.parameter, self.rate, self.convert = parameter, rate, convert


def _successors(layer: MonarchLinear, transposed: bool, muon: bool) -> list[_Successor]:
    rates = factor_rates(layer.shape, muon=muon)
    return [
        _Successor(factor, rate, _converter(layer, which, transposed))
        for which, (factor, rate) in enumerate(zip((layer.blkdiag1, layer.blkdiag2), rates, strict=True))
    ]


def _converter(layer: MonarchLinear, which: int, transposed: bool) -> Callable[[str, Tensor], Tensor]:
    def convert(name: str, dense: Tensor) -> Tensor:
        dense = dense.T if transposed else dense
        factors = [factor.detach() for factor in (layer.blkdiag1, layer.blkdiag2)]
        if name in SQUARES:
            factors[1 - which] = factors[1 - which].square()
        return _pull_back(dense, factors, which, layer.shape)

    return convert


def _pull_back(dense: Tensor, factors: list[Tensor], which: int, shape: MonarchShape) -> Tensor:
    """The gradient of a factor, from that of the dense weight."""
    with torch.enable_grad():
        factors = [factor.to(dense.dtype) for factor in factors]
        factors[which] = factors[which].clone().requires_grad_()
        weight = monarch_weight(*factors, layout=shape.layout)[: shape.out_features, : shape.in_features]
        return torch.autograd.grad(weight, factors[which], dense)[0]


def _exchange(optimizer: torch.optim.Optimizer, successors: dict[Tensor, list[_Successor]]) -> None:
    """Put other parameters in the place of an optimizer's, with their state."""
    for group in list(optimizer.param_groups):
        gone = [parameter for parameter in group["params"] if parameter in successors]
        added: dict[float, list[Tensor]] = {}
        for old in gone:
            state = optimizer.state.pop(old, {})
            for new in successors[old]:
                if new.parameter.requires_grad:
                    added.setdefault(new.rate, []).append(new.parameter)
                    if new.convert is not None:
                        _hand_over(optimizer, state, new)
        left = set(map(id, gone))
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in left]
        options = {key: value for key, value in group.items() if key != "params"}
        for rate, parameters in added.items():
            scaled: dict[str, Any] = {
                key: options[key] * rate for key in ("lr", "initial_lr") if key in options
            }
            optimizer.add_param_group({"params": parameters, **options, **scaled})
            if "initial_accumulator_value" in options:
                _begin_sums(optimizer, parameters, options["initial_accumulator_value"])
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


def _begin_sums(optimizer: torch.optim.Optimizer, parameters: list[Tensor], value: float) -> None:
    """What Adagrad makes once, when it is made: before torch 2.13 not for parameters that come later."""
    for parameter in parameters:
        if not optimizer.state[parameter]:
            optimizer.state[parameter] = {"step": torch.tensor(0.0), "sum": torch.full_like(parameter, value)}


def _hand_over(optimizer: torch.optim.Optimizer, state: dict[str, Any], new: _Successor) -> None:
    known = {}
    for name, value in state.items():
        if name in MEANS + SQUARES and isinstance(value, Tensor):
            known[name] = new.convert(name, value).to(value.dtype)  # type: ignore[misc]
        elif name == "step":
            known[name] = value.clone() if isinstance(value, Tensor) else value
        elif value is not None:
            return  # of a kind that is not known here: all of it begins anew
    if "exp_avg" in known and "exp_avg_sq" in known:
        # Entries of a gradient are not independent; a mean of squares is no less than the mean's square.
        known["exp_avg_sq"] = torch.maximum(known["exp_avg_sq"], known["exp_avg"].square())
    if known:
        optimizer.state[new.parameter] = known
