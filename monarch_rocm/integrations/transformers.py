"""Hugging Face transformers: its `Conv1D`, and saving and loading of converted models.

`monarchize` notes in a transformers model's config what it did, so that `save_pretrained` writes a folder
that `from_pretrained` reads once `register()` was called: safetensors and a config, no remote code.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

METHOD = "monarch"


def is_conv1d(module: nn.Module) -> bool:
    """Whether `module` is transformers' `Conv1D`, a linear layer with its weight transposed.

    A module can be one only where transformers has been imported, so this imports nothing.
    """
    library = sys.modules.get("transformers.pytorch_utils")
    return library is not None and type(module) is library.Conv1D


def remember(model: nn.Module) -> None:
    """Write into a transformers model's config where its Monarch layers are; others are left alone.

    `monarchize` does so itself for the model that it is given. It is for models of which only a part was
    given to `monarchize`.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=48, num_hidden_layers=1, intermediate_size=64))
        >>> _ = monarchize(model.encoder, MonarchConfig(nblocks=2))
        >>> remember(model)
        >>> model.config.quantization_config["quant_method"], len(model.config.quantization_config["layers"])
        ('monarch', 6)
    """
    from monarch_rocm.structure import structure

    library = sys.modules.get("transformers.modeling_utils")
    if library is not None and isinstance(model, library.PreTrainedModel):
        model.config.quantization_config = {"quant_method": METHOD, **structure(model)}


def register() -> Any:
    """Teach transformers to load converted models, and to convert while it loads. May be called again.

    Returns:
        type: `MonarchQuantizationConfig`, for `from_pretrained(..., quantization_config=)`: it takes the
        arguments of `MonarchConfig` and `modules_to_not_convert`, and projects the weights of a dense
        checkpoint.

    Raises:
        ImportError: transformers is not installed (extra `hf`).

    Example:
        >>> import monarch_rocm.integrations.transformers
        >>> config = monarch_rocm.integrations.transformers.register()
        >>> config(nblocks=8).to_dict()["nblocks"]
        8
    """
    from monarch_rocm.integrations import quantizer

    return quantizer.MonarchQuantizationConfig
