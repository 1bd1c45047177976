"""Learning rates for the factors of Monarch layers, and what keeps training with them stable."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from monarch_rocm import init
from monarch_rocm.linear import MonarchLinear
from monarch_rocm.shape import MonarchShape, check_size


def factor_rates(shape: MonarchShape, *, muon: bool = False) -> tuple[float, float]:
    """Learning rates of the two factors, as multiples of the rate of a dense layer of the same size.

    An output of a dense layer reads `in_features` inputs, one of the first factor `P`, one of the second
    `R`. With Adam the changes of the entries of a row add up, and `in_features / P / 2` and
    `in_features / R / 2` would let outputs change as much as a dense layer's, half by either factor. The
    first factor gets that, the second the geometric mean of both, which is the same in square and widening
    layers of the default rank. Changes by Muon are orthogonal: each factor gets the root, so that a
    block's change is as large as the dense weight's by its largest singular value. `docs/training.md`
    has the derivation and what was measured.

    Args:
        shape (MonarchShape): the geometry, `layer.shape`.
        muon (bool): for `Muon`. Default: for Adam and its kin.

    Source: Yang and Hu, "Feature Learning in Infinite-Width Neural Networks", 2021, and Qiu et al.,
    "Compute Better Spent: Replacing Dense Layers with Structured Matrices", 2024 (changes of outputs);
    Liu et al., "Muon is Scalable for LLM Training", 2025 (size of Muon's updates).

    Example:
        >>> factor_rates(MonarchShape(1024, 1024, nblocks=8))
        (4.0, 4.0)
        >>> factor_rates(MonarchShape(4096, 1024, nblocks=4))
        (2.0, 4.0)
        >>> factor_rates(MonarchShape(1024, 1024, nblocks=16), muon=True)
        (4.0, 4.0)
    """
    # P counts padding, in_features does not: a block reads in_features / K features on average.
    first, second = shape.K, shape.in_features / shape.R
    if muon:
        return math.sqrt(first), math.sqrt(second)
    return first / 2, math.sqrt(first * second) / 2


def param_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float = 0.0,
    *,
    base_width: int | None = None,
    matrices: bool = False,
    without: Iterable[dict[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Parameter groups for any optimizer, with a learning rate for each factor from its shape.

    Factors of `MonarchLinear` get `lr` times their `factor_rates`; every other parameter gets `lr`.
    So a rate that suits a dense model suits the model with Monarch layers in place of its dense ones.

    Rates come from the modules' shapes and from nothing stored on parameters: they hold after
    `copy.deepcopy`, and for sharded parameters of FSDP2.

    Args:
        model (nn.Module): its parameters that require a gradient are taken, each once.
        lr (float): the rate of a dense layer.
        weight_decay (float): of factors and of everything else with two or more dimensions; vectors
            (biases, norms) get none. Default: 0.
        base_width (int, optional): `lr` was found for a dense model of that width. The width of
            `model` is the median of the `in_features` of its `nn.Linear` and Monarch layers; each of
            them gets `lr * base_width / sqrt(width * in_features)`, with `matrices`
            `lr * sqrt(base_width / in_features)`. Everything else keeps `lr`. Default: `lr` whatever
            the width.
        matrices (bool): only factors and weights of `nn.Linear`, at `Muon`'s rates; the output layer of a
            language model is better left to Adam (`without`). Default: everything, at Adam's.
        without (list of dict): leave out the parameters of these groups, of another optimizer.

    Returns:
        list of dict: groups with `params`, `lr`, `initial_lr` (for schedules) and `weight_decay`.

    Raises:
        TypeError: a `base_width` that is no int.
        ValueError: no parameter left that requires a gradient; a `base_width` below 1.

    Example:
        >>> model = nn.Sequential(MonarchLinear(64, 256, nblocks=4), nn.GELU(), nn.Linear(256, 64))
        >>> groups = param_groups(model, lr=1e-3, weight_decay=0.1)
        >>> [(group["lr"], group["weight_decay"], len(group["params"])) for group in groups]
        [(0.002, 0.1, 2), (0.001, 0.0, 2), (0.001, 0.1, 1)]
        >>> optimizer = torch.optim.AdamW(groups)
    """
    if base_width is not None:
        base_width = check_size("base_width", base_width)
    layers = [module for module in model.modules() if isinstance(module, (MonarchLinear, nn.Linear))]
    width = base_width or 1
    if layers and not matrices:
        width = statistics.median_low(layer.in_features for layer in layers)
    rates: dict[int, float] = {}
    for layer in layers:
        scale = 1.0 if base_width is None else base_width / math.sqrt(width * layer.in_features)
        if isinstance(layer, MonarchLinear):
            one, two = factor_rates(layer.shape, muon=matrices)
            rates[id(layer.blkdiag1)], rates[id(layer.blkdiag2)] = one * scale, two * scale
        else:
            rates[id(layer.weight)] = scale
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    for weight in embeddings:  # a head that is tied to one is one
        rates[id(weight)] = 1.0
    left_out = {id(weight) for weight in embeddings} if matrices else set()
    left_out |= {id(parameter) for group in without for parameter in group["params"]}
    groups = defaultdict(list)
    for parameter in model.parameters():
        chosen = not matrices or id(parameter) in rates
        if parameter.requires_grad and chosen and id(parameter) not in left_out:
            decay = weight_decay if parameter.ndim > 1 else 0.0
            groups[rates.get(id(parameter), 1.0) * lr, decay].append(parameter)
    if not groups:
        raise ValueError("no parameter that requires a gradient is left for these groups")
    return [
        {"params": params, "lr": rate, "initial_lr": rate, "weight_decay": decay}
        for (rate, decay), params in groups.items()
    ]


class StepCaps:
    """Let no step of an optimizer change a factor by more than a share of the size of new factors.

    A rate that is too high makes a Monarch layer diverge sooner than a dense one, since its output is a
    product of two factors that both change. Here each factor's change in a step is clipped, as a whole,
    to a root mean square of `ratio` times that of a new factor's entries; where a schedule lowers a
    group's `lr` below its `initial_lr`, the cap falls with it. So rates above the one that reaches the
    cap do the same as that one.

    Args:
        model (nn.Module): whose `MonarchLinear` layers are capped. Deep copies need caps of their own.
        ratio (float): of the largest change to new factors, by their root mean squares. Default: 0.01.

    Raises:
        ValueError: a model without Monarch layers; a `ratio` that is not positive.

    Source: the clipping of updates is that of Shazeer and Stern, "Adafactor", 2018, per factor.

    Example:
        >>> layer = MonarchLinear(64, 64)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=1e6)
        >>> StepCaps(layer, ratio=0.01).attach(optimizer)
        >>> before = layer.blkdiag1.detach().clone()
        >>> layer(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> change = layer.blkdiag1.detach() - before
        >>> bool(change.std() < 0.011 * before.std())
        True
    """

    def __init__(self, model: nn.Module, ratio: float = 0.01) -> None:
        if not ratio > 0:
            raise ValueError(f"ratio must be positive, but ratio={ratio!r} was given")
        self._layers = [module for module in model.modules() if isinstance(module, MonarchLinear)]
        if not self._layers:
            raise ValueError("the model has no Monarch layers, whose factors could be capped")
        # Of a uniform draw within a bound, over sqrt(3).
        self._limits = [ratio * b / 3**0.5 for layer in self._layers for b in init.bounds(layer.shape)]
        self._before: list[Tensor] = []
        self._largest: dict[tuple[int, ...], Tensor] = {}

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Cap every step of the optimizer from now on; factors that it does not have are left alone."""
        optimizer.register_step_pre_hook(self._remember)
        optimizer.register_step_post_hook(self._cap)

    def _factors(self) -> list[Tensor]:
        # Asked for at each step: FSDP2 replaces a module's parameters.
        factors: list[Tensor] = []
        for layer in self._layers:
            factors += layer.blkdiag1, layer.blkdiag2
        return factors

    @torch.no_grad()
    def _remember(self, *_: Any) -> None:
        factors = [_local(factor) for factor in self._factors()]
        if not self._before:
            self._before = [torch.empty_like(factor) for factor in factors]
        torch._foreach_copy_(self._before, factors)

    @torch.no_grad()
    def _cap(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        factors = self._factors()
        index = {id(factor): i for i, factor in enumerate(factors)}
        for group in optimizer.param_groups:
            members = tuple(index[id(p)] for p in group["params"] if id(p) in index)
            if not members:
                continue
            parts, before = [_local(factors[i]) for i in members], [self._before[i] for i in members]
            norms = torch._foreach_norm(torch._foreach_sub(parts, before))
            norm = torch.stack([_norm_of_all(n, factors[i]) for n, i in zip(norms, members, strict=True)])
            if members not in self._largest:  # at the first step: later ones may be captured in a graph
                largest = [self._limits[i] * factors[i].numel() ** 0.5 for i in members]
                self._largest[members] = norm.new_tensor(largest)
            share = group["lr"] / group["initial_lr"] if group.get("initial_lr") else 1.0
            kept = (share * self._largest[members] / norm.clamp(min=1e-30)).clamp(max=1.0)
            for part, old, back in zip(parts, before, (1 - kept).unbind(), strict=True):
                part.lerp_(old, back)


class Muon(torch.optim.Optimizer):
    """Momentum whose update of each matrix is made orthogonal, for dense weights and for 3-D factors.

    The last two dimensions of a parameter are a matrix; those before them count matrices, so that a
    factor `(K, Q, P)` is K of them. Every block is orthogonalised on its own, all blocks of equal size
    in one batch: for a square layer with K = L that is `2 / K**2` of the FLOPs that a dense weight takes.
    An update's entries have a root mean square of about `0.2 * lr`, as with AdamW.

    `torch.optim.Muon` refuses 3-D parameters. Vectors, embeddings and the output layer belong to another
    optimizer: `param_groups` makes groups for both.

    Args:
        params: parameters or groups, all with two or more dimensions. Sharded ones (DTensor) may be
            split over blocks, which needs no communication, or inside of them, which gathers them.
        lr (float or Tensor): the learning rate.
        weight_decay (float): decoupled, as in AdamW. Default: 0.
        momentum (float): of the mean of gradients, which is then used as Nesterov does. Default: 0.95.

    Raises:
        ValueError: a vector or a scalar among the parameters.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024 (update and
    coefficients); Liu et al., "Muon is Scalable for LLM Training", 2025 (scale of updates).

    Example:
        >>> model = nn.Sequential(MonarchLinear(64, 256, nblocks=4), nn.GELU(), MonarchLinear(256, 64))
        >>> muon = Muon(param_groups(model, lr=1e-3, weight_decay=0.1, matrices=True))
        >>> adamw = torch.optim.AdamW(param_groups(model, lr=1e-3, without=muon.param_groups))
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> muon.step(), adamw.step()
        (None, None)
    """

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, weight_decay: float = 0.0, momentum: float = 0.95
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.ndim < 2:
                self.param_groups.pop()
                raise ValueError(
                    f"Muon takes matrices and batches of them, not a parameter of shape "
                    f"{tuple(parameter.shape)}: give it to another optimizer"
                )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """One step; returns what `closure` returns, which is called with gradients on."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not params:
                continue
            for parameter in params:
                if not self.state[parameter]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            means = [_local(self.state[parameter]["momentum_buffer"]) for parameter in params]
            grads = [_local(parameter.grad) for parameter in params]
            torch._foreach_lerp_(means, grads, 1 - group["momentum"])
            ahead = torch._foreach_mul(grads, 1 - group["momentum"])
            torch._foreach_add_(ahead, means, alpha=group["momentum"])
            updates = _orthogonal_all(list(ahead), params)
            torch._foreach_mul_(updates, group["lr"])
            weights = [_local(parameter) for parameter in params]
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_sub_(weights, updates)
        return loss


def _orthogonal_all(gradients: list[Tensor], params: list[Tensor]) -> list[Tensor]:
    """Scaled orthogonal updates, in a batch for each size of matrix; local parts of sharded ones."""
    whole = [_whole_matrices(gradient, like) for gradient, like in zip(gradients, params, strict=True)]
    batches = defaultdict(list)
    for i, matrices in enumerate(whole):
        batches[matrices.shape].append(i)
    updates = list(whole)
    for shape, members in batches.items():
        batch = orthogonal(torch.cat([whole[i] for i in members])) * (0.2 * max(shape[1:]) ** 0.5)
        for i, part in zip(members, batch.split(shape[0]), strict=True):
            updates[i] = _own_part(part, params[i])
    return updates


def _local(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that this process holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _norm_of_all(norm: Tensor, parameter: Tensor) -> Tensor:
    """The norm of a tensor that is sharded like a parameter, from that of the local part."""
    places = getattr(parameter, "placements", ())
    if not any(place.is_shard() for place in places):
        return norm
    from torch.distributed.tensor import DTensor, Partial, Replicate

    sums = [Partial() if place.is_shard() else Replicate() for place in places]
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(norm.square(), mesh, sums, run_check=False).full_tensor().sqrt()


def _cut(parameter: Tensor) -> bool:
    """Whether shards of a parameter (a DTensor) cut through its matrices, and not between them."""
    places = getattr(parameter, "placements", ())
    return any(place.is_shard() and place.dim >= parameter.ndim - 2 for place in places)


def _whole_matrices(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Whole matrices `(count, rows, columns)` from the local part of a gradient."""
    if _cut(parameter):
        from torch.distributed.tensor import DTensor

        mesh, places = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        gradient = DTensor.from_local(
            gradient, mesh, places, run_check=False, shape=parameter.shape, stride=parameter.stride()
        ).full_tensor()
    return gradient.reshape(math.prod(gradient.shape[:-2]), *gradient.shape[-2:])


def _own_part(update: Tensor, parameter: Tensor) -> Tensor:
    """The local part of an update of whole matrices."""
    if _cut(parameter):
        from torch.distributed.tensor import DTensor, Replicate

        mesh, places = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        whole = [Replicate()] * mesh.ndim
        full = DTensor.from_local(update.view(parameter.shape), mesh, whole, run_check=False)
        return full.redistribute(placements=places).to_local()
    return update.view(_local(parameter).shape)


# Of an odd polynomial that takes singular values to about 1, fast where they are small.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """The nearest matrices with equal singular values, about 1 (0.7 to 1.2), by Newton and Schulz.

    Args:
        matrices (Tensor): `(batch, rows, columns)`. Products are done in bfloat16 on a GPU.
        steps (int): of the iteration. Default: 5.

    Source: Jordan et al., "Muon", 2024.

    Example:
        >>> x = orthogonal(torch.randn(3, 8, 16))
        >>> values = torch.linalg.svdvals(x)
        >>> bool((values > 0.5).all() and (values < 1.5).all())
        True
    """
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + torch.baddbmm(gram, gram, gram, beta=b, alpha=c) @ x
    return (x.mT if tall else x).to(matrices.dtype)
