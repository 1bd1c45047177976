"""The LoRA layer that `integrations.peft.enable` registers; imported only by it, since it needs PEFT."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners import lora
from peft.tuners.tuners_utils import check_adapters_to_merge

from monarch_rocm.adapters import low_rank_blocks, restore, widen


class MonarchLora(lora.Linear):  # type: ignore[misc]
    """LoRA around a MonarchLinear. Only merging differs from LoRA around `nn.Linear`."""

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        for name in check_adapters_to_merge(self, adapter_names):
            if name not in self.lora_A:
                continue
            base = self.get_base_layer()
            up, down = self.lora_B[name], self.lora_A[name]
            if not all(p.isfinite().all() for p in (*up.parameters(), *down.parameters())):
                raise ValueError(f"adapter {name!r} has values that are not finite")
            scaled = up.weight.detach() * self.scaling[name]
            left, right = low_rank_blocks(scaled, down.weight.detach(), base.shape)
            bias = None if base.bias is None else base.bias.data
            if self.lora_bias[name]:
                if bias is None:
                    raise ValueError("lora_bias=True cannot be merged: the layer has no bias")
                base.bias.data = bias + up.bias.detach().to(bias) * self.scaling[name]
            kept = getattr(self, "_kept", [])
            self._kept = [*kept, (widen(base, left, right), bias)]
            self.merged_adapters.append(name)

    @torch.no_grad()
    def unmerge(self) -> None:
        base: Any = self.get_base_layer()
        while self.merged_adapters:
            self.merged_adapters.pop()
            factors, bias = self._kept.pop()
            restore(base, factors)
            if bias is not None:
                base.bias.data = bias
