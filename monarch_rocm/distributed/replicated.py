"""Modules beside split layers: parameters that are DTensors, all of them on every rank.

With every parameter of a model a DTensor of one mesh, optimizers with fused or foreach steps,
`clip_grad_norm_`, FSDP2 and checkpoints take it as one. Forward functions still see plain tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor


class _Plain:
    """Mixed into a module's class: replicated parameters are plain tensors while its forward runs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        held = list(_replicated(self))  # type: ignore[arg-type]
        for module, name, parameter in held:
            module._parameters[name] = parameter.to_local()  # type: ignore[assignment]
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            for module, name, parameter in held:
                module._parameters[name] = parameter  # type: ignore[assignment]


def _replicated(root: nn.Module) -> Iterator[tuple[nn.Module, str, DTensor]]:
    # Those of children too: nn.MultiheadAttention, for one, reads its child's parameters.
    for module in root.modules():
        if getattr(module, "_replicated", False):
            for name, parameter in module._parameters.items():
                if isinstance(parameter, DTensor) and tuple(parameter.placements) == (Replicate(),):
                    yield module, name, parameter


def replicate_rest(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make every parameter that is none yet a DTensor that all ranks hold, of rank 0's values."""
    made: dict[Tensor, nn.Parameter] = {}  # so that what is tied stays tied
    for module in list(model.modules()):
        own = [(k, p) for k, p in module._parameters.items() if p is not None and not isinstance(p, DTensor)]
        if not own:
            continue
        for name, old in own:
            if old not in made:
                value = distribute_tensor(old.detach(), mesh, [Replicate()])
                made[old] = nn.Parameter(value, old.requires_grad)
            module.register_parameter(name, made[old])
        cls = type(module)
        module.__class__ = type(cls.__name__, (_Plain, cls), {"__module__": cls.__module__})
        module._replicated = True  # type: ignore[assignment]
