"""What a model feeds its linear layers, and how much their outputs matter to its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

Readout = Callable[[Any, Any], Tensor]


class Moments:
    """Weighted mean and second moment of a layer's inputs, summed up batch by batch.

    Attributes:
        weight (float): how much was seen; 0 where nothing was.
        first (Tensor): `(in_features,)`, weighted sum of the inputs, in float64.
        second (Tensor): `(in_features, in_features)`, weighted sum of their outer products.
    """

    def __init__(self, features: int, device: torch.device) -> None:
        dtype = self.dtype(device)
        self.weight = 0.0
        self.first = torch.zeros(features, dtype=dtype, device=device)
        self.second = torch.zeros(features, features, dtype=dtype, device=device)

    @staticmethod
    def dtype(device: torch.device) -> torch.dtype:
        """What moments are summed in."""
        return torch.float32 if device.type == "mps" else torch.float64

    def add(self, x: Tensor, weight: Tensor) -> None:
        """Count rows `x (rows, features)`, each as often as `weight (rows,)` says."""
        kept = weight > 0  # padding may hold anything
        x, weight = x[kept], weight[kept]
        if not x.isfinite().all():
            raise ValueError(f"a layer of {x.shape[-1]} inputs was fed values that are not finite")
        x, weight = x.to(self.first.dtype), weight.to(self.first.dtype)
        self.weight += float(weight.sum())
        self.first += weight @ x
        self.second += (x * weight[:, None]).T @ x

    def __add__(self, other: Moments) -> Moments:
        both = Moments(len(self.first), self.first.device)
        both.weight = self.weight + other.weight
        both.first, both.second = self.first + other.first, self.second + other.second
        return both

    @property
    def mean(self) -> Tensor:
        """`(in_features,)`."""
        return self.first / self.weight

    def about(self, origin: Tensor | None) -> Tensor:
        """Second moment `(in_features, in_features)` about a point, about zero for None."""
        second = self.second / self.weight
        if origin is None:
            return second
        cross = torch.outer(self.mean, origin)
        about = second - cross - cross.T + torch.outer(origin, origin)
        # What cancels leaves rounding, of either sign, which must not be taken for inputs that vary.
        rounding = 1e-10 * second.diagonal().mean()
        return about + rounding * torch.eye(len(about), dtype=about.dtype, device=about.device)


@torch.no_grad()
def moments(
    model: nn.Module, layers: Collection[nn.Module], batches: Iterable[Any]
) -> dict[nn.Module, Moments]:
    """Run `batches` through the model, in evaluation mode and without gradients, and watch its layers.

    Each sequence counts the same, however long it is: a position weighs one over the sequence's
    length, and padding, where a batch has an `attention_mask` of `(batch, positions)`, nothing. So
    single words among documents are not lost. Layers whose inputs have another form than that mask
    count each row alike, padding too. Every layer's moments are held in float64 at once, 8 bytes
    times the square of its width.

    Args:
        model (nn.Module): left as it is.
        layers (collection of nn.Module): modules of it whose only input is `(..., in_features)`.
        batches (iterable): each a mapping, called as `model(**batch)`, a tuple or list,
            `model(*batch)`, or a tensor, `model(batch)`. Tensors are moved to the model's device.

    Returns:
        dict of nn.Module to Moments: of the layers that were called.

    Raises:
        ValueError: no batches, or an input with values that are not finite.
    """
    found: dict[nn.Module, Moments] = {}
    mask: Tensor | None = None

    def watch(layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        (x,) = (*args, *named.values())
        if layer not in found:
            found[layer] = Moments(x.shape[-1], x.device)
        found[layer].add(x.reshape(-1, x.shape[-1]), _weights(x, mask))

    empty = True
    with watching(layers, watch), evaluating(model):
        for batch in batches:
            empty = False
            batch = moved(batch, device_of(model))
            mask = mask_of(batch)
            call(model, batch)
    if empty:
        raise ValueError("calibration has no batches")
    return found


def sensitivities(
    model: nn.Module,
    layers: Collection[nn.Module],
    batches: Iterable[Any],
    readout: Readout | None = None,
) -> dict[nn.Module, Tensor]:
    """How much the model's output changes for small changes of its layers' outputs.

    For each layer the mean over sequences of `J^T J`, summed over positions, with J the derivative of
    the model's output by the layer's at one position. So a small error e of the layer's output adds
    about `e^T G e` to the squared error of the model's, or to twice its Kullback-Leibler divergence,
    where the output has logits. One random projection of the output is drawn a batch.

    Args:
        model, layers, batches: as for `moments`.
        readout (callable, optional): `readout(output, batch)`, a tensor with a row a sequence, in place of
            the whole output.

    Returns:
        dict of nn.Module to Tensor: `(out_features, out_features)`, in float64, of the layers that the
        output depends on.

    Raises:
        TypeError: a model whose output has no floating tensors.

    Source: Hutchinson 1989 for the projections; the Fisher matrix where there are logits, and one block
    a layer of its output side as in K-FAC (Martens & Grosse 2015).
    """
    found: dict[nn.Module, Tensor] = {}
    outputs: list[tuple[nn.Module, Tensor]] = []

    def keep(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
        # Without a graph yet, where all before it is frozen, the graph begins here.
        output = output if output.requires_grad else output.detach().requires_grad_()
        outputs.append((layer, output))
        return output

    handles = [layer.register_forward_hook(keep) for layer in layers]
    generator = torch.Generator().manual_seed(0)
    sequences = 0
    try:
        with torch.enable_grad(), torch.compiler.set_stance("force_eager"), evaluating(model):
            for batch in batches:
                batch = moved(batch, device_of(model))
                outputs.clear()
                output = call(model, batch)
                if readout is not None:
                    output = readout(output, batch)
                projected, count = _projected(output, mask_of(batch), generator)
                sequences += count
                kept = [output for _, output in outputs]
                if not kept or not projected.requires_grad:
                    continue
                gradients = torch.autograd.grad(projected, kept, allow_unused=True)
                for (layer, _), gradient in zip(outputs, gradients, strict=True):
                    if gradient is not None:
                        rows = gradient.reshape(-1, gradient.shape[-1])
                        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
                        square = (rows.T @ rows).to(Moments.dtype(rows.device))
                        found[layer] = found.get(layer, 0) + square
    finally:
        outputs.clear()
        for handle in handles:
            handle.remove()
    return {layer: total / sequences for layer, total in found.items()}


def _projected(output: Any, mask: Tensor | None, generator: torch.Generator) -> tuple[Tensor, int]:
    """A scalar whose gradient's outer product is, on average, what `sensitivities` sums, and the number of
    sequences. Positions weigh as in `moments`.
    """
    logits = getattr(output, "logits", None)
    wanted = logits if logits is not None else getattr(output, "last_hidden_state", output)
    leaves = [leaf for leaf in tree_leaves(wanted) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not leaves:
        raise TypeError(f"the model returns {type(output).__name__}, with no floating tensor in it")
    total = leaves[0].new_zeros((), dtype=torch.float32)
    for leaf in leaves:
        leaf = leaf.float()
        if logits is not None:
            flat = leaf.log_softmax(-1).reshape(-1, leaf.shape[-1])
            drawn = torch.multinomial(flat.detach().exp().cpu(), 1, generator=generator).to(leaf.device)
            leaf = flat.gather(1, drawn).reshape(*leaf.shape[:-1], 1)
            noise = leaf.new_ones(leaf.shape)
        else:
            noise = torch.randn(leaf.shape, generator=generator).to(leaf.device)
        weight = _weights(leaf, mask).reshape(*leaf.shape[:-1], 1).sqrt()
        total = total + (leaf * weight * noise).sum()
    return total, len(leaves[0])


@torch.no_grad()
def costs(model: nn.Module, layers: Collection[nn.Module], batch: Any) -> tuple[int, dict[nn.Module, int]]:
    """FLOPs of a forward pass of one batch, and the rows that each of `layers` is fed in it."""
    rows = dict.fromkeys(layers, 0)

    def watch(layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        (x,) = (*args, *named.values())
        rows[layer] += x.shape[:-1].numel()

    with watching(layers, watch), evaluating(model), FlopCounterMode(display=False) as flops:
        call(model, moved(batch, device_of(model)))
    return flops.get_total_flops(), rows


@contextmanager
def watching(layers: Iterable[nn.Module], watch: Callable[..., None]) -> Iterator[None]:
    """Call `watch(layer, args, kwargs)` whenever one of the layers is called."""
    handles = [layer.register_forward_pre_hook(watch, with_kwargs=True) for layer in layers]
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled code would not call the hooks
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Put models into evaluation mode, and all their modules back into their own."""
    training = {module: module.training for model in models for module in model.modules()}
    try:
        for module in training:
            module.training = False  # not eval(), which some adapters take as a call to merge
        yield
    finally:
        for module, mode in training.items():
            module.training = mode


def mask_of(batch: Any) -> Tensor | None:
    """A batch's `attention_mask`, where it has one."""
    return batch.get("attention_mask") if isinstance(batch, Mapping) else None


def device_of(model: nn.Module) -> torch.device:
    """Where a model's inputs belong: the device of its first parameter."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _weights(x: Tensor, mask: Tensor | None) -> Tensor:
    """How much each row of `x (..., features)` counts, `(rows,)`.

    Positions of a sequence share one: those that the mask keeps, where it has a place for each row,
    as `(batch, positions)` or flattened; else those of `x (batch, positions, features)`. Rows of any
    other form count one each.
    """
    rows = x.shape[:-1]
    if mask is not None and mask.ndim == 2 and (rows == mask.shape or rows == (mask.numel(),)):
        kept = mask.to(x.device, torch.float32)
    elif len(rows) == 2:
        kept = torch.ones(rows, device=x.device)
    else:
        return torch.ones(rows.numel(), device=x.device)
    return (kept / kept.sum(1, keepdim=True).clamp_min(1)).reshape(-1)


def call(model: Callable[..., Any], batch: Any) -> Any:
    """The model's output for a batch of any of the forms that `moments` takes."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        try:
            return model(*batch)
        except TypeError as error:
            raise TypeError(
                f"{error} (a batch that is a {type(batch).__name__} is passed as model(*batch): leave out "
                "what the model does not take, such as labels)"
            ) from error
    return model(batch)


def moved(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on a device."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: moved(value, device) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(moved(value, device) for value in batch)
    return batch
