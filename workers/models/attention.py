"""Which attention implementation a model runs: flash-attn, sdpa or eager, decided in one place."""

from __future__ import annotations

import importlib.util
import logging
from functools import cache
from typing import Any

import torch

from verl_like.errors import ConfigError, nearest

logger = logging.getLogger(__name__)

ATTENTIONS = ("auto", "flash_attention_2", "sdpa", "eager")


def resolve_attention(wanted: str, device: torch.device, dtype: torch.dtype, model_cls: Any) -> str:
    """`wanted`, or the next of flash_attention_2, sdpa, eager that this device and model can run.

    auto takes the first that runs, and flash-attn is looked for on a CUDA device only.
    """
    if wanted not in ATTENTIONS:
        raise ConfigError(
            f"model.attn_implementation={wanted!r} is unknown; valid: {', '.join(ATTENTIONS)}."
            f"{nearest(wanted, ATTENTIONS)}"
        )

    chosen, reason = wanted, ""
    if chosen in ("auto", "flash_attention_2"):
        reason = _why_no_flash(device, dtype)
        chosen = "sdpa" if reason else "flash_attention_2"
    if chosen == "sdpa" and not getattr(model_cls, "_supports_sdpa", False):
        chosen, reason = "eager", f"{model_cls.__name__} has no sdpa attention"
    if chosen != wanted and (wanted != "auto" or device.type == "cuda"):
        _warn_once(f"attention: {chosen} in place of {wanted}: {reason}.")
    return chosen


def _why_no_flash(device: torch.device, dtype: torch.dtype) -> str:
    if device.type != "cuda":
        return f"flash-attn runs on CUDA devices, not on {device.type}"
    if dtype == torch.float32:
        return "flash-attn takes 16-bit types, the model's is float32 (model.dtype)"
    if importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed (pip install 'verl-like[flash-attn]')"
    return ""


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)
