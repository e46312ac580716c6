"""The KV cache's size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.workers.models.architectures import build_tiny, tiny_model_config
from tests.workers.samples import started, tiny_config
from verl_like.errors import RolloutError
from workers.roles.rollout import RolloutWorker
from workers.rollout.native.direct_forward import MIN_ROWS_OF_MKL
from workers.rollout.native.kv_cache import (
    CacheMemory,
    SlotCache,
    Slots,
    min_window,
    slot_width,
    slots_that_fit,
)
from workers.rollout.native.module_forward import ModuleForward, grouped_decoding


def test_a_cache_that_is_too_small_raises_with_the_needed_size(tiny_dir: Path) -> None:
    config = tiny_config(tiny_dir)
    config.actor_rollout_ref.rollout.kv_cache_gib = 1e-6
    with pytest.raises(
        RolloutError,
        match=r"kv_cache_gib=1e-06 is too small.*needs .* GiB.*kv_cache_gib to .* or more",
    ):
        started(RolloutWorker, config)
    config.actor_rollout_ref.rollout.kv_cache_gib = 1e-3
    assert MIN_ROWS_OF_MKL <= started(RolloutWorker, config).engine.max_active < 64


@pytest.mark.parametrize(
    "case", ["llama", "falcon", "gpt_bigcode", "bloom", "deepseek_v3", "minicpm3", "longcat_flash"]
)
def test_slots_use_the_memory_that_is_counted(case: str) -> None:
    """Measured after a generation whose slots grew, and were copied."""
    model = build_tiny(tiny_model_config(case))
    config, prompt_width, steps = model.config.get_text_config(), 16, 64
    width, memory = slot_width(config, prompt_width, steps), CacheMemory()
    slots = Slots(4, width, min_window(config), torch.device("cpu"), memory)
    cache = SlotCache(config.num_hidden_layers, slots)
    prompts = [[7] * 16] * 4
    with torch.no_grad(), grouped_decoding(model):
        forward = ModuleForward(model, cache)
        cache.fit(1 + prompt_width, 0)
        forward.prefill(prompts, prompt_width, torch.arange(4), 0)
        cache.fit(width, 4)
    cache.release()
    held_gib = sum(whole.nbytes for whole in memory._free) / 2**30
    assert slots_that_fit(config, width, torch.float32, held_gib * 1.001, 1) == 4
    assert slots_that_fit(config, width, torch.float32, held_gib * 0.999, 1) == 3
