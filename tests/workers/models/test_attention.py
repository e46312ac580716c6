"""The attention of each model, and its replacement where it cannot run."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from verl_like.errors import ConfigError
from workers.models import attention
from workers.models.attention import resolve_attention

CPU = torch.device("cpu")


class WithSdpa:
    _supports_sdpa = True


def test_attention_falls_back_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class WithoutSdpa:
        _supports_sdpa = False

    attention.warn_once.cache_clear()
    arguments = "flash_attention_2", CPU, torch.float32, WithSdpa
    with caplog.at_level(logging.WARNING):
        assert [resolve_attention(*arguments) for _ in range(2)] == ["sdpa"] * 2
    assert caplog.messages == [
        "attention: using sdpa instead of flash_attention_2: flash-attn runs on CUDA devices, "
        "not on cpu."
    ]
    assert resolve_attention("auto", CPU, torch.float32, WithoutSdpa) == "eager"


def capped_config(cap: float | None) -> Any:
    from transformers import Gemma2Config

    return Gemma2Config(attn_logit_softcapping=cap)


def test_soft_capping_uses_eager_attention_and_rejects_sdpa() -> None:
    arguments = CPU, torch.float32, WithSdpa
    assert resolve_attention("auto", *arguments, capped_config(50.0)) == "eager"
    assert resolve_attention("eager", *arguments, capped_config(50.0)) == "eager"
    assert resolve_attention("auto", *arguments, capped_config(None)) == "sdpa"
    assert resolve_attention("sdpa", *arguments, capped_config(None)) == "sdpa"
    with pytest.raises(
        ConfigError, match=r"attn_logit_softcapping=50 .*Set attn_implementation=auto"
    ):
        resolve_attention("sdpa", *arguments, capped_config(50.0))


def test_old_gpus_and_float32_have_no_flash_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    assert "not a Tesla T4" in attention.kernel_blocker(cuda, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert attention.kernel_blocker(cuda, torch.bfloat16) == ""
    assert "compute in float32" in attention.kernel_blocker(cuda, torch.float32)


def test_a_kernel_is_tried_at_the_head_size_of_the_model() -> None:
    from transformers import DeepseekV3Config, Gemma2Config, LlamaConfig, MambaConfig

    assert attention.head_size(LlamaConfig(hidden_size=4096, num_attention_heads=32)) == 128
    assert attention.head_size(Gemma2Config(head_dim=256)) == 256
    assert attention.head_size(DeepseekV3Config()) == 192
    assert attention.head_size(MambaConfig()) == 64
