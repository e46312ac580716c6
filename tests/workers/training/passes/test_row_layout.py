"""Rows that can share a pass, and models whose rows cannot; `test_walk.py` compares results."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tensordict import TensorDict

from tests.workers.samples import make_batch, started, tiny_config
from tests.workers.training.rank_layouts import SIZES
from trainer.tools.small_models import shrunk
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError
from workers.models import support
from workers.models.folder import factor_border
from workers.models.support import Support
from workers.roles.actor import ActorWorker
from workers.training.engine import INPUTS
from workers.training.microbatch import MicroBatchBudget, Rows
from workers.training.passes import lm_head, packing
from workers.training.passes.row_layout import row_kind

VOCAB, PROMPT, RESPONSE = 64, 24, 40
LENGTHS = ((24, 40), (20, 38), (24, 12), (10, 10), (8, 9), (6, 7), (9, 1))
"""Tokens of prompt and response of each row; the first four are more than there are positions."""
FOUR_ROWS = MicroBatchBudget(rows=4)

SMALL = {**SIZES, "vocab_size": VOCAB, "max_position_embeddings": 128}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 4.0, 6.0]}
LONGROPE = {
    "original_max_position_embeddings": 16,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 16,
        **FACTORS,
    },
}
JITTER = {"input_jitter_noise": 0.1, "router_jitter_noise": 0.05}
TYPES: dict[str, dict[str, Any]] = {
    "phimoe": {"sliding_window": 16, **JITTER, **MOE},
    "jetmoe": {"kv_channels": 8, "num_local_experts": 4},
}


def saved_model(path: Path, model_type: str, settings: dict[str, Any]) -> Path:
    """Save a tiny model of a type, with weights as large as trained weights."""
    config = transformers.AutoConfig.for_model(model_type, **{**SMALL, **settings})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.1 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5
            parameter.add_(torch.randn_like(parameter) * spread)
    model.save_pretrained(path / "model")
    return path


def ragged_rows() -> DataProto:
    prompt, response = torch.tensor(LENGTHS).unsqueeze(2).unbind(1)
    places = torch.arange(PROMPT + RESPONSE)
    mask = ((places >= PROMPT - prompt) & (places < PROMPT + response)).long()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, VOCAB, mask.shape, generator=generator) * mask
    columns = {
        "input_ids": tokens,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "responses": tokens[:, PROMPT:].clone(),
        "response_mask": mask[:, PROMPT:].clone(),
    }
    return DataProto(batch=TensorDict(columns, batch_size=[len(LENGTHS)]))


@pytest.mark.parametrize("model_type", TYPES)
def test_a_pass_of_one_short_row_matches_transformers(tmp_path: Path, model_type: str) -> None:
    folder, data = saved_model(tmp_path, model_type, TYPES[model_type]), ragged_rows()
    engine = started(ActorWorker, tiny_config(folder), 1).engine
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", attn_implementation="sdpa"
    ).eval()
    prompt, response = LENGTHS[4]
    tokens = data.batch["input_ids"][4][data.batch["attention_mask"][4] != 0]
    with torch.no_grad():
        logits = model(tokens[None], use_cache=False).logits[0, prompt - 1 : -1].log_softmax(-1)
    expected = logits.gather(1, tokens[prompt:, None]).squeeze(1)
    log_probs = engine.forward_rows(DataProto(batch=data.batch[4:5]), FOUR_ROWS)["log_probs"]
    torch.testing.assert_close(log_probs[0, :response], expected, atol=1e-4, rtol=0)


def test_rows_across_longrope_s_original_length_never_share_a_pass(
    tmp_path: Path,
) -> None:
    folder, data = saved_model(tmp_path, "phi3", LONGROPE), ragged_rows()
    engine = started(ActorWorker, tiny_config(folder), 1).engine
    cuts = engine.cut(Rows.from_batch(data, INPUTS).columns, MicroBatchBudget(tokens=10_000))
    assert cuts == [[0, 1, 2, 3, 4], [5, 6]]  # 17 tokens are above 16, and 13 below


def test_passes_with_quadratic_attention_are_short(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "LARGEST_SQUARE", 20)
    config = tiny_config(tiny_dir, model={"attn_implementation": "eager"})
    engine = started(ActorWorker, config, 1).engine
    columns = Rows.from_batch(make_batch(9), INPUTS).columns
    tokens = engine.row_passes.lengths(engine.reading.reads(columns))
    cuts = engine.cut(columns, MicroBatchBudget(tokens=10_000))
    assert engine.packs
    assert len(cuts) > 1
    assert max(sum(tokens[row] for row in rows) for rows in cuts) <= 20


def test_a_model_that_is_not_causal_is_rejected_before_a_step(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="model type bert cannot be trained.*Choose a causal LM"):
        started(ActorWorker, tiny_config(tmp_path), 1)


def test_a_class_that_is_not_listed_runs_padded_with_one_warning(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(support, "_table", dict)
    monkeypatch.setattr(lm_head, "CHUNK_BYTES", 4)
    with caplog.at_level(logging.WARNING):
        engine = started(ActorWorker, tiny_config(tiny_dir), 1).engine
        engine.forward_rows(make_batch(4), FOUR_ROWS)
    assert engine.row_passes.kind == "padded"
    assert caplog.text.count("is not in the table of tested classes") == 1


def test_gradient_checkpointing_that_a_class_lacks_is_rejected(tmp_path: Path) -> None:
    folder = saved_model(tmp_path, "jetmoe", TYPES["jetmoe"])
    config = tiny_config(folder, model={"enable_gradient_checkpointing": True})
    with pytest.raises(ConfigError, match="jetmoe has no gradient checkpointing"):
        started(ActorWorker, config, 1)


@pytest.mark.parametrize("prompt_end", [3, 5])
def test_a_prompt_padded_on_the_right_is_rejected_by_name(tiny_dir: Path, prompt_end: int) -> None:
    batch = make_batch(4)
    batch.batch["attention_mask"][2] = 1
    batch.batch["attention_mask"][2, prompt_end:6] = 0
    engine = started(ActorWorker, tiny_config(tiny_dir), 1).engine
    with pytest.raises(ConfigError, match="row 2 has a gap: .* again from column 6"):
        engine.forward_rows(batch, FOUR_ROWS)


def test_the_small_model_has_each_kind_of_layer_and_exceeds_every_limit() -> None:
    config = transformers.Gemma3TextConfig(num_hidden_layers=26, sliding_window=4096)
    small = shrunk(config, with_widths=True)
    assert set(small.layer_types) == set(config.layer_types)
    assert (small.sliding_window, small.hidden_size) == (16, 64)

    wide = {"original_max_position_embeddings": 4096, "max_position_embeddings": 131072}
    factors = {"long_factor": [1.0] * 48, "short_factor": [1.0] * 48}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors, **wide}
    phi = transformers.Phi3Config(rope_parameters=rope, **wide)
    assert factor_border(phi) == 4096
    assert factor_border(shrunk(phi, with_widths=True)) == 16
    assert row_kind(Support.of(phi)) == ("packed", "")
