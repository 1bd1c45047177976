"""The quantizer `monarch` of transformers, registered when this module is imported.

Only `integrations.transformers.register` imports it, since it needs transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from monarch_rocm.config import MonarchConfig
from monarch_rocm.convert import monarchize
from monarch_rocm.integrations.transformers import METHOD, remember
from monarch_rocm.structure import restructure


@register_quantization_config(METHOD)
class MonarchQuantizationConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """How a model is converted while it loads, or, read from a saved model, what it is made of.

    Args:
        format, layers: of a saved model, `monarch_rocm.structure`.
        modules_to_not_convert (sequence of str, optional): names, or parts of names, that stay dense.
        config: arguments of `MonarchConfig`.
    """

    def __init__(
        self,
        format: int | None = None,
        layers: dict[str, Any] | None = None,
        modules_to_not_convert: Sequence[str] | None = None,
        quant_method: str = METHOD,
        **config: Any,
    ) -> None:
        self.quant_method = METHOD
        self.format, self.layers = format, layers
        self.modules_to_not_convert = list(modules_to_not_convert or ())
        self.config = MonarchConfig(**config)

    def to_dict(self) -> dict[str, Any]:
        if self.layers is not None:
            return {"quant_method": METHOD, "format": self.format, "layers": self.layers}
        kept = {"modules_to_not_convert": self.modules_to_not_convert}
        return {"quant_method": METHOD, **self.config.to_dict(), **kept}


@register_quantizer(METHOD)
class MonarchQuantizer(HfQuantizer):  # type: ignore[misc]
    """Builds Monarch layers before the weights of a saved model are loaded, or projects dense ones after."""

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        found = self.quantization_config
        if self.pre_quantized:
            if found.layers is None:
                raise ValueError(
                    "the model's config says that it is a Monarch model, but not with what layers"
                )
            restructure(model, {"format": found.format, "layers": found.layers}, self._prefix(model))

    def _prefix(self, model: nn.Module) -> str:
        """What names start with, where a model was saved without its head and is loaded with one."""
        base = getattr(model, "base_model_prefix", "")
        name = next(iter(self.quantization_config.layers))
        here = dict(model.named_modules())
        return f"{base}." if name not in here and f"{base}.{name}" in here else ""

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if not self.pre_quantized:
            stays = self.quantization_config.modules_to_not_convert
            wanted = lambda module, name: not any(part in name for part in stays)  # noqa: E731
            model, _ = monarchize(model, self.quantization_config.config, wanted)
        remember(model)
        model.is_quantized = False  # factors are of the model's dtype: half(), float() and to() work
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True
