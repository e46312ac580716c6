"""Every role on families of models, each from a folder with only a config.json."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.workers.gradients import ACTOR_COLUMNS, gradients
from tests.workers.samples import VOCAB, make_batch, started, text_rows, tiny_config
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError
from workers.config import ModelConfig
from workers.config.rows import RowWorkerConfig, TrainedModelConfig
from workers.models.load import load_model
from workers.roles.actor import ActorWorker
from workers.roles.rows import SFTWorker

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB}
SEED = 3
FAMILIES = {
    "LlamaConfig": {"num_key_value_heads": 2, "intermediate_size": 64},
    "Qwen2Config": {"num_key_value_heads": 2, "intermediate_size": 64, "tie_word_embeddings": True},
    "GPT2Config": {},
    "OPTConfig": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "BloomConfig": {},
}


@pytest.fixture(scope="module", params=["LlamaConfig", "GPT2Config", "BloomConfig"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder `model` with the config of a family's tiny model."""
    folder = tmp_path_factory.mktemp(request.param)
    config = getattr(transformers, request.param)(
        **SIZES, **FAMILIES[request.param], pad_token_id=0, num_labels=1
    )
    config.save_pretrained(folder / "model")
    return folder


def model_of(folder: Path, **settings: Any) -> ModelConfig:
    return ModelConfig(path=str(folder / "model"), random_init_seed=SEED, **settings)


def config_of(folder: Path, **settings: Any) -> Any:
    config = tiny_config(folder, ppo_mini_batch_size=4)
    config.actor_rollout_ref.model = model_of(folder, **settings)
    return config


def plain(folder: Path) -> Any:
    """The model as transformers creates it."""
    torch.manual_seed(SEED)
    config = transformers.AutoConfig.from_pretrained(folder / "model")
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def row_of(rows: DataProto, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the real tokens of one row, and which of them but the first are in the loss."""
    real = rows.batch["attention_mask"][number].bool()
    tokens = rows.batch["input_ids"][number][real]
    return tokens, rows.batch["response_mask"][number][: len(tokens) - 1].bool()


def test_random_weights_equal_those_of_transformers_and_need_a_seed(folder: Path) -> None:
    model = load_model(model_of(folder), "token")
    for name, weight in plain(folder).state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    other = load_model(replace(model_of(folder), random_init_seed=SEED + 1), "token")
    embedding = model.get_input_embeddings().weight
    assert not torch.equal(other.get_input_embeddings().weight, embedding)
    with pytest.raises(ConfigError, match="no weights.*model.random_init_seed=<number>"):
        load_model(replace(model_of(folder), random_init_seed=None), "token")


def test_supervised_fine_tuning_has_the_loss_of_transformers_and_learns(folder: Path) -> None:
    model = TrainedModelConfig(path=str(folder / "model"), random_init_seed=SEED)
    worker = started(SFTWorker, RowWorkerConfig(model=model), 10)
    worker.engine.optimizer.param_groups[0]["lr"] = 1e-2
    rows, module, losses = text_rows(4), plain(folder), []
    for number in range(4):
        tokens, in_loss = row_of(rows, number)
        log_probs = module(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
        losses.append(-log_probs.gather(-1, tokens[1:, None])[:, 0][in_loss])
    first = worker.update_model(rows)["train/loss"]
    assert first == pytest.approx(torch.cat(losses).mean().item(), abs=1e-5)
    assert worker.update_model(rows)["train/loss"] < first


def test_gradient_checkpointing_saves_memory_and_keeps_gradients(folder: Path) -> None:
    batch, grads, saved = make_batch(4), [], []
    for checkpointing in (False, True):
        config = config_of(folder, enable_gradient_checkpointing=checkpointing)
        actor = started(ActorWorker, config, 10)
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        weights = {p.untyped_storage().data_ptr() for p in actor.engine.module.parameters()}
        actor.engine.module.train()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            grads.append(gradients(actor, batch, ACTOR_COLUMNS))
        saved.append(sum(size for pointer, size in sizes.items() if pointer not in weights))
    assert saved[1] < 0.6 * saved[0]
    for name, gradient in grads[0].items():
        torch.testing.assert_close(grads[1][name], gradient, rtol=0, atol=0, msg=name)
