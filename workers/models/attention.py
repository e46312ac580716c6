"""Choose the attention implementation that a model is built with: sdpa or eager.

FlashAttention is not an implementation here but a kernel for packed rows in training, which models
use where it is available (`passes/varlen.py`). Passes over padded rows, and a rollout that
decodes with the same module, use the implementation that is chosen here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from verl_like.errors import ConfigError

logger = logging.getLogger(__name__)

INSTALL_FLASH = 'pip install torch, then pip install -e ".[flash-attn]" --no-build-isolation'
"""Command to run in a checkout. It builds flash-attn against the installed torch."""


def resolve_attention(
    setting: str,
    device: torch.device,
    dtype: torch.dtype,
    model_cls: Any,
    hf_config: Any = None,
    key: str = "attn_implementation",
) -> str:
    """Return sdpa, or eager if that is the setting, or if sdpa is missing or wrong for the model.

    `dtype` is the compute dtype of the passes; `key` is the config key of `setting`, for messages.
    """
    if setting == "eager":
        return setting

    cap = soft_cap(hf_config)
    if cap is not None and setting == "sdpa":
        raise ConfigError(
            f"{key}=sdpa omits the soft-capping of {model_cls.__name__} "
            f"(attn_logit_softcapping={cap:g} in its config.json), so every number would be "
            f"wrong. Set {key}=auto, which uses eager, or flash_attention_2, which has it on CUDA."
        )
    chosen, reason = "sdpa", ""
    if not getattr(model_cls, "_supports_sdpa", False):
        chosen, reason = "eager", f"{model_cls.__name__} has no sdpa attention"
    elif cap is not None:
        chosen, reason = "eager", f"sdpa has no soft-capping, which {model_cls.__name__} needs"

    if setting.startswith("flash_attention"):
        unusable = kernel_blocker(device, dtype)
        reason = unusable and (reason or unusable)
    if reason and setting != "auto":
        warn_once(f"attention: using {chosen} instead of {setting}: {reason}.")
    elif reason:
        log_once(f"attention: {chosen}: {reason}.")
    return chosen


def soft_cap(hf_config: Any) -> float | None:
    """Return the tanh bound of a model's attention scores, as in Gemma-2, or None."""
    if hf_config is None:
        return None
    cap: float | None = getattr(hf_config.get_text_config(), "attn_logit_softcapping", None)
    return cap


def layer_configs(hf_config: Any) -> list[Any]:
    """Return the config of every layer; the layers of Gemma 4 have unlike heads."""
    text = hf_config.get_text_config()
    if getattr(text, "is_heterogeneous", False):
        return [*text.per_layer_config]
    return [text] * text.num_hidden_layers


def head_size(hf_config: Any) -> int:
    """Return the larger of a head's query and value sizes; 64 if the config has no heads."""
    text = hf_config.get_text_config()
    parts = (getattr(text, f"qk_{part}_head_dim", None) or 0 for part in ("nope", "rope"))
    latent = sum(parts)
    if latent:
        return max(latent, getattr(text, "v_head_dim", None) or 0)
    heads = getattr(text, "num_attention_heads", None)
    return max(heads_of(layer)[2] for layer in layer_configs(text)) if heads else 64


def heads_of(config: Any) -> tuple[int, int, int]:
    """Return (query heads, key-value heads, head size) of a layer (`layer_configs`).

    Without attention, there are 0 heads.
    """
    heads: int = getattr(config, "num_attention_heads", None) or 0
    size: int = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    return heads, getattr(config, "num_key_value_heads", None) or heads, size


def has_sinks(module: Any) -> bool:
    """True if heads have a sink, which takes part in every softmax, as in gpt-oss.

    False for a model that also selects tokens by an index (`index_topk`, hy_v4): it needs a mask.
    """
    if hasattr(module.config.get_text_config(), "index_topk"):
        return False
    return any(name.endswith(".sinks") for name, _ in module.named_parameters())


def kernel_blocker(device: torch.device, dtype: torch.dtype) -> str:
    """Return why no FlashAttention kernel can run in this dtype on this device; "" if one may."""
    if device.type != "cuda":
        return f"flash-attn runs on CUDA devices, not on {device.type}"
    if dtype == torch.float32:
        return (
            "FlashAttention needs 16-bit dtypes, but passes compute in float32 "
            "(model.compute_dtype)"
        )
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        name = torch.cuda.get_device_name(device)
        return f"FlashAttention needs an Ampere GPU or a newer one, not a {name}"
    return ""


@contextmanager
def override_attention(module: Any, name: str, attention: Any, mask: Any) -> Iterator[None]:
    """Context in which the module attends by these functions, registered with transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    config = module.config.get_text_config()
    before, config._attn_implementation = config._attn_implementation, name
    try:
        yield
    finally:
        config._attn_implementation = before


@cache
def warn_once(message: str) -> None:
    """Log a warning once per process."""
    logger.warning(message)


@cache
def log_once(message: str) -> None:
    """Log an info line once per process."""
    logger.info(message)
