"""Configurations, batches and workers for tests; usable in a rank's process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict

from trainer.data.lm_rows import LMRow
from verl_like.batch.protocol import DataProto
from verl_like.batch.split import split_rows
from workers.config import (
    ActorRolloutRefConfig,
    CriticConfig,
    CriticModelConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RolloutConfig,
    RolloutCorrectionConfig,
    WorkersConfig,
)
from workers.parallel.sharding import dims_of
from workers.training.model_parts import check_axes
from workers.training.role_model_spec import RoleModelSpec

PROMPT, RESPONSE, VOCAB = 6, 5, 50


def with_doubled_head(tiny_dir: Path, folder: Path) -> None:
    """Write a copy of the tiny model with another head."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_dir / "model")
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(folder)


def tiny_config(
    tiny_dir: Path | str,
    parallel: ParallelConfig | None = None,
    model: Mapping[str, Any] | None = None,
    **actor: Any,
) -> WorkersConfig:
    """Return actor, reference and critic on the tiny model.

    `model` sets fields of the sections of both models, `actor` of the actor's section.
    """
    path = str(Path(tiny_dir) / "model")
    policy = ModelConfig(path=path)
    config = WorkersConfig(
        actor_rollout_ref=ActorRolloutRefConfig(
            model=policy, rollout=RolloutConfig(n=1, name="native")
        ),
        critic=CriticConfig(
            model=CriticModelConfig(path=path),
            optim={"lr": 1e-3},
            ppo_micro_batch_size_per_gpu=3,
        ),
        data=SimpleNamespace(max_prompt_length=PROMPT, max_response_length=RESPONSE),
        trainer=SimpleNamespace(seed=0),
        parallel=parallel or ParallelConfig(),
        algorithm=SimpleNamespace(rollout_correction=RolloutCorrectionConfig()),
    )
    section = config.actor_rollout_ref.actor
    section.optim = OptimConfig(lr=1e-3)
    section.use_dynamic_bsz = False
    section.ppo_micro_batch_size_per_gpu = 3
    for name, value in actor.items():
        setattr(section, name, value)
    for name, value in (model or {}).items():
        setattr(policy, name, value)
        setattr(config.critic.model, name, value)
    return config


def make_batch(num_rows: int, seed: int = 0) -> DataProto:
    """Return ragged prompts (padded left) and responses (padded right) with an update's columns."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange(PROMPT + RESPONSE)
    prompt_len = torch.randint(1, PROMPT + 1, (num_rows, 1), generator=generator)
    response_len = torch.randint(1, RESPONSE + 1, (num_rows, 1), generator=generator)
    attention_mask = (
        (positions >= PROMPT - prompt_len) & (positions < PROMPT + response_len)
    ).long()
    tokens = (
        torch.randint(6, VOCAB, (num_rows, PROMPT + RESPONSE), generator=generator) * attention_mask
    )
    floats = {
        name: torch.randn(num_rows, RESPONSE, generator=generator)
        for name in ("advantages", "values", "returns", "old_log_probs", "ref_log_prob")
    }
    for name in ("old_log_probs", "ref_log_prob"):
        floats[name] = 0.1 * floats[name] - 3.9
    columns = {
        "prompts": tokens[:, :PROMPT].clone(),
        "responses": tokens[:, PROMPT:].clone(),
        "input_ids": tokens,
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
        "response_mask": attention_mask[:, PROMPT:].clone(),
        **floats,
    }
    return DataProto(batch=TensorDict(columns, batch_size=[num_rows]))


def text_rows(num_rows: int) -> DataProto:
    """Return right-padded rows of text: every token but the first is in the loss."""
    rows = make_batch(num_rows, seed=3).batch
    ids, real = rows["input_ids"], rows["attention_mask"]
    ids, real = ids.roll(2, dims=1), real.roll(2, dims=1)
    order = real.argsort(dim=1, descending=True, stable=True)
    ids, real = ids.gather(1, order), real.gather(1, order)
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": real,
            "position_ids": (real.cumsum(1) - 1).clamp(min=0),
            "responses": ids[:, 1:].clone(),
            "response_mask": real[:, 1:].clone(),
        }
    )


def random_row(generator: torch.Generator) -> LMRow:
    """Return a text of 3 to 11 tokens, the second half of them in the loss."""
    length = int(torch.randint(3, 12, (1,), generator=generator))
    ids = torch.randint(6, VOCAB, (length,), generator=generator).numpy()
    return LMRow(ids, (torch.arange(length) >= length // 2).numpy())


def own_chunk(batch: DataProto, rank: int, world_size: int) -> DataProto:
    """Return the chunk that a group's dispatch passes to a rank."""
    return split_rows(batch, world_size)[rank]


def started(cls: type, config: WorkersConfig, *init_args: Any) -> Any:
    """Return a worker of this process with its model loaded."""
    worker = cls(config)
    worker.init_model(*init_args)
    return worker


def beside(actor: Any, cls: type, config: WorkersConfig) -> Any:
    """Return a worker that finds the actor in its own process."""
    worker = cls(config)
    worker._siblings["actor"] = actor
    worker.init_model()
    return worker


def check_axes_of(model: RoleModelSpec, num_ranks: int) -> None:
    """Reject axes that the model does not support on so many ranks."""
    sharding = model.sharding
    dims = dims_of(num_ranks, sharding)
    check_axes(model.meta_module, model.model, dims, model.axes_key, sharding.pp_schedule)


def weights_of(worker: Any) -> dict[str, torch.Tensor]:
    """Return copies of its model's whole weights."""
    return {name: tensor.clone() for name, tensor in worker.engine.named_full_tensors()}


def learned(metrics: dict[str, float]) -> dict[str, float]:
    """Return an update's metrics without those of the machine, which vary from run to run."""
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}
