"""Which attention a model runs, and what takes its place where it cannot run."""

from __future__ import annotations

import logging

import pytest
import torch

from verl_like.errors import ConfigError
from workers.models import attention
from workers.models.attention import resolve_attention

CPU = torch.device("cpu")


def test_attention_falls_back_to_what_runs_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Old:
        _supports_sdpa = False

    attention._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert (
                resolve_attention(
                    "flash_attention_2",
                    CPU,
                    torch.float32,
                    type("New", (), {"_supports_sdpa": True}),
                )
                == "sdpa"
            )
    assert [r.message for r in caplog.records] == [
        "attention: sdpa in place of flash_attention_2: flash-attn runs on CUDA devices, not on "
        "cpu."
    ]
    assert resolve_attention("auto", CPU, torch.float32, Old) == "eager"
    with pytest.raises(ConfigError, match="Did you mean 'sdpa'"):
        resolve_attention("sdp", CPU, torch.float32, Old)
