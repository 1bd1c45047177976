"""LoRA of Hugging Face PEFT on Monarch layers."""

from __future__ import annotations

from typing import Any


def enable(config: Any) -> Any:
    """Let a LoRA config of PEFT adapt Monarch layers too; returns it.

    Merging adds LoRA's rank to that of each sub-block, so that nothing is lost; unmerging gives the
    factors back bit for bit. PEFT does not save what is said here: say it again to load,
    `PeftModel.from_pretrained(model, folder, config=enable(PeftConfig.from_pretrained(folder)))`. After
    `merge_and_unload`, a transformers model needs `integrations.transformers.remember(model)` before it
    is saved, since its layers have grown.

    Args:
        config (peft.LoraConfig): changed in place.

    Raises:
        ImportError: PEFT is not installed.
        TypeError: another kind of config.
        ValueError: DoRA, which needs a dense weight.

    Example:
        >>> from peft import LoraConfig, get_peft_model
        >>> from monarch_rocm.integrations.peft import enable
        >>> model, _ = monarchize(nn.Sequential(nn.Linear(16, 32)), MonarchConfig(nblocks=2))
        >>> adapted = get_peft_model(model, enable(LoraConfig(r=2, target_modules=["0"])))
        >>> adapted.get_nb_trainable_parameters()
        (96, 512)
    """
    from peft import LoraConfig

    from monarch_rocm.integrations import lora
    from monarch_rocm.linear import MonarchLinear

    if not isinstance(config, LoraConfig):
        raise TypeError(f"config must be a LoraConfig, but it is a {type(config).__name__}")
    if config.use_dora:
        raise ValueError("DoRA needs a dense weight to merge into; use_dora=True does not fit Monarch layers")
    config._register_custom_module({MonarchLinear: lora.MonarchLora})
    return config
