"""`parallelize`: one call that spreads a model over the ranks of a mesh, in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from monarch_rocm.distributed.replicated import replicate_rest
from monarch_rocm.distributed.tensor_parallel import MonarchParallel, NormParallel
from monarch_rocm.linear import MonarchLinear

MODES = ("ddp", "fsdp", "tp", "fsdp+tp")
Style = MonarchParallel | NormParallel


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    mode: str,
    *,
    plan: Mapping[str, Style] | None = None,
    mixed_precision: torch.dtype | MixedPrecisionPolicy | None = None,
    cpu_offload: bool = False,
    activation_checkpointing: bool = False,
    compile: bool = False,
) -> nn.Module:
    """Spread a model over the ranks of a mesh.

    Works in any process group, under `torchrun` as in a `Fleet`, and needs no torchmonarch. Make the
    optimizer afterwards. Outputs and gradients equal those of one process within float error, gradients
    averaged over data-parallel ranks.

    Args:
        model (nn.Module): changed in place. Ranks take rank 0's parameters, but for "fsdp", where each
            keeps its shard of its own: start those from one seed or a checkpoint.
        mesh (DeviceMesh): one dimension; for "fsdp+tp" two, data parallel first, tensor parallel second.
        mode (str): "ddp", `DistributedDataParallel`; "fsdp", FSDP2, a unit for each child of an
            `nn.ModuleList` or `nn.Sequential` and one for the rest; "tp", tensor-parallel Monarch layers,
            everything else the same on all ranks, which must be fed the same batch; "fsdp+tp", both.
        plan (dict, optional): for the "tp" modes, patterns of module names (`fnmatch`) to
            `MonarchParallel` or `NormParallel`. The first that fits a module counts, and what none fits is
            held by all ranks. Default: every Monarch layer, replicated input and output.
        mixed_precision (torch.dtype or MixedPrecisionPolicy, optional): for the "fsdp" modes; a dtype is
            that of parameters in products, gradients being reduced in float32.
        cpu_offload (bool): for the "fsdp" modes, keep parameters and optimizer states in host memory.
        activation_checkpointing (bool): recompute the units in the backward pass.
        compile (bool): `torch.compile` each unit.

    Returns:
        nn.Module: the same object; for "ddp" its `DistributedDataParallel`. Names in checkpoints
        (`Checkpoints`, or `torch.distributed.checkpoint.state_dict`) do not depend on the mode.

    Raises:
        TypeError: a mesh that is no `DeviceMesh`; a style for a module that it does not take.
        ValueError: an unknown mode; a mesh of the wrong number of dimensions; an option of another mode;
            a pattern that fits nothing; layers that the ranks cannot split, all named. The model is then
            as it was.

    Source: Zhao et al., "PyTorch FSDP", 2023; the split of factors is this library's own.

    Example:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> def build(rank):  # under torchrun, or in a Fleet
        ...     model = nn.Sequential(MonarchLinear(64, 256), nn.GELU(), MonarchLinear(256, 64))
        ...     return parallelize(model, init_device_mesh("cpu", (2,)), "tp")
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {MODES}, but mode={mode!r} was given")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch DeviceMesh (init_device_mesh), not a {type(mesh).__name__}")
    wanted = 2 if mode == "fsdp+tp" else 1
    if mesh.ndim != wanted:
        raise ValueError(
            f"mode={mode!r} takes a mesh of {wanted} dimension{'s' * (wanted > 1)}, but it has {mesh.ndim}; "
            + ("mesh['name'] is one of them" if wanted == 1 else "the first is for data, the second for TP")
        )
    for name, given in (("mixed_precision", mixed_precision is not None), ("cpu_offload", cpu_offload)):
        if given and "fsdp" not in mode:
            raise ValueError(
                f"{name} is for the FSDP modes, but mode={mode!r} was given"
                + ("; torch.autocast serves the others" if name == "mixed_precision" else "")
            )
    if plan is not None and "tp" not in mode:
        raise ValueError(f"a plan is for the TP modes, but mode={mode!r} was given")
    if "tp" in mode:
        tensor = mesh if mesh.ndim == 1 else mesh[_names(mesh)[1]]
        styles = _styles(model, plan, tensor.size())
        parallelize_module(model, tensor, dict(styles))
        replicate_rest(model, tensor)
    for unit in _units(model):
        if activation_checkpointing:
            _recompute(unit, compile)
        elif compile:
            unit.compile()
    if "fsdp" in mode:
        data = mesh if mesh.ndim == 1 else mesh[_names(mesh)[0]]
        _shard(model, data, mixed_precision, cpu_offload)
    if mode == "ddp":
        kind = mesh.device_type
        index = None if kind == "cpu" else [torch.get_device_module(kind).current_device()]
        return nn.parallel.DistributedDataParallel(
            model, device_ids=index, process_group=mesh.get_group(), gradient_as_bucket_view=True
        )
    return model


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    if mesh.mesh_dim_names is None:
        raise ValueError(
            "mode='fsdp+tp' takes a mesh with names, init_device_mesh(..., mesh_dim_names=(...))"
        )
    return mesh.mesh_dim_names


def _styles(model: nn.Module, plan: Mapping[str, Style] | None, ranks: int) -> dict[str, Style]:
    """The style of each module that has one, checked."""
    if plan is None:
        layers = [name for name, m in model.named_modules() if isinstance(m, MonarchLinear)]
        if not layers:
            raise ValueError(
                "the model has no MonarchLinear, so that tensor parallelism has nothing to split"
            )
        styles: dict[str, Style] = {name: MonarchParallel() for name in layers}
    else:
        styles, fitted = {}, set()
        for name, _ in model.named_modules():
            pattern = next((p for p in plan if fnmatchcase(name, p)), None)
            if pattern is not None:
                styles[name] = plan[pattern]
                fitted.add(pattern)
        unused = [pattern for pattern in plan if pattern not in fitted]
        if unused:
            raise ValueError(
                f"no module fits {unused}; the modules are {[n for n, _ in model.named_modules()]}"
            )
    problems = []
    for name, style in styles.items():
        try:
            style.check(model.get_submodule(name), ranks)
        except (TypeError, ValueError) as error:
            problems.append((name or "the model", error))
    if problems:
        listed = "\n".join(f"  {name}: {error}" for name, error in problems)
        raise type(problems[0][1])(f"some modules cannot be split over {ranks} ranks:\n{listed}")
    return styles


def _units(model: nn.Module) -> list[nn.Module]:
    """Children of lists and sequences that hold parameters and lie in no other unit."""
    units: list[nn.Module] = []
    for module in model.modules():  # outer ones first
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            units += [child for child in module if not isinstance(child, nn.ModuleList)]
    inner = {id(m) for unit in units for m in unit.modules() if m is not unit}
    return [u for u in units if id(u) not in inner and next(u.parameters(), None) is not None]


class _Checkpointed:
    """Mixed into a module's class: its forward keeps its inputs alone and runs again in the backward pass."""

    _compiled: Callable[..., Any] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        once = self._compiled or super().forward  # type: ignore[misc]
        return checkpoint(once, *args, use_reentrant=False, **kwargs)


def _recompute(module: nn.Module, compile: bool) -> None:
    cls = type(module)
    if compile:
        # What runs again, and not the running again: there the compiler would refuse replicated parameters
        # that are plain while a forward runs (`replicated`), and leave all uncompiled without a word.
        module._compiled = torch.compile(module.forward)  # type: ignore[assignment]
    module.__class__ = type(cls.__name__, (_Checkpointed, cls), {"__module__": cls.__module__})


def shard_dim(shape: torch.Size, ranks: int) -> int:
    """The dimension along which FSDP shards a parameter of that shape over so many ranks.

    Blocks where the ranks divide them, else a dimension of the blocks that they do divide, so that
    no rank is left with nothing; else the first, unevenly.

    Example:
        >>> shard_dim(torch.Size((8, 32, 32)), 4), shard_dim(torch.Size((2, 32, 32)), 4)
        (0, 1)
    """
    if len(shape) != 3:
        return 0
    return next((dim for dim, size in enumerate(shape) if size % ranks == 0), 0)


def _shard(
    model: nn.Module, mesh: DeviceMesh, precision: torch.dtype | MixedPrecisionPolicy | None, offload: bool
) -> None:
    def place(parameter: nn.Parameter) -> Shard:
        if isinstance(parameter, DTensor) and parameter.ndim == 3:
            # Split over K or L by TP already: another dimension keeps shards plain, if one divides.
            sizes = parameter.to_local().shape
            return Shard(next((dim for dim in (1, 2) if sizes[dim] % mesh.size() == 0), 0))
        return Shard(shard_dim(parameter.shape, mesh.size()))

    if precision is None:
        precision = MixedPrecisionPolicy()
    elif isinstance(precision, torch.dtype):
        precision = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    options: dict[str, Any] = {
        "mesh": mesh,
        "shard_placement_fn": place,
        "mp_policy": precision,
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
        if offload
        else OffloadPolicy(),
    }
    for unit in _units(model):
        fully_shard(unit, **options)
    fully_shard(model, **options)
