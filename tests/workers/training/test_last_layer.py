"""The last layer at the tokens that are read: the same scores and gradients, with less computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.workers.gradients import FAMILIES, assert_equal_gradients, gradients
from tests.workers.training.test_pairs import HigherWorker, pairs, worker_of
from workers.models.causal_lm import to_training
from workers.models.stand_in import stand_in
from workers.training.last_layer import only_reads_needed
from workers.training.packing import read

LIKE_LLAMA = ("LlamaConfig", "Qwen2Config")
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
OTHERS = {
    "Qwen3Config": {"num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 8},
    "Gemma2Config": {"num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 8},
}


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_layers_built_as_llamas_are_known(family: str) -> None:
    config = getattr(transformers, family)(**SIZES, **FAMILIES.get(family, OTHERS.get(family)))
    module = stand_in(config, "eager" if family == "BloomConfig" else "sdpa")
    assert only_reads_needed(module) == (family in (*LIKE_LLAMA, "Qwen3Config"))


@pytest.mark.parametrize("max_tokens", [16384, 40])
def test_gradients_are_those_of_the_whole_layer(max_tokens: int, tiny_dir: Path) -> None:
    batch = pairs()
    role = worker_of(HigherWorker, tiny_dir, max_token_len_per_gpu=max_tokens)
    nn.init.normal_(role.engine.module.score.weight, generator=torch.Generator().manual_seed(1))
    computed = tokens_of_last_mlp(role)
    found = gradients(role, batch, (), role.budget)
    assert sum(computed) == 2 * len(batch)

    role.engine.read = read
    assert_equal_gradients(found, gradients(role, batch, (), role.budget))
    assert sum(computed) == 2 * len(batch) + int(batch.batch["attention_mask"].sum())


def test_recomputed_layers_leave_out_the_same(tiny_dir: Path) -> None:
    role = worker_of(HigherWorker, tiny_dir)
    nn.init.normal_(role.engine.module.score.weight, generator=torch.Generator().manual_seed(1))
    expected = gradients(role, pairs(), (), role.budget)

    role.engine.module.body.gradient_checkpointing_enable({"use_reentrant": False})
    to_training(role.engine.module)
    computed = tokens_of_last_mlp(role)
    assert_equal_gradients(gradients(role, pairs(), (), role.budget), expected)
    assert computed == [2 * len(pairs())] * 2


def tokens_of_last_mlp(role: Any) -> list[int]:
    """Filled in passes to come: over how many tokens each ran the last layer's MLP."""
    computed: list[int] = []
    mlp = role.engine.module.body.layers[-1].mlp
    mlp.register_forward_pre_hook(lambda _, inputs: computed.append(inputs[0].shape[1]))
    return computed
