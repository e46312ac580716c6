"""Actor and rollout without a driver learn a toy task: say one token."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.workers.prompts import META, prompt_batch
from tests.workers.samples import beside, started, tiny_config
from workers.config import OptimConfig
from workers.roles.actor import ActorWorker
from workers.roles.rollout import RolloutWorker

WANTED = 11


def test_a_toy_task_is_learned_in_bfloat16_with_float32_masters(one_layer_dir: Path) -> None:
    config = tiny_config(one_layer_dir, ppo_mini_batch_size=32, optim=OptimConfig(lr=1e-2))
    config.actor_rollout_ref.model.compute_dtype = "bfloat16"
    actor = started(ActorWorker, config, 30)
    rollout = beside(actor, RolloutWorker, config)
    shares, gaps = [], []
    for step in range(9):
        assert rollout.update_weights(step).error is None
        batch = rollout.generate_sequences(prompt_batch(32, meta=META | {"attempt": step}))
        mask = batch.batch["response_mask"].float()
        hits = (batch.batch["responses"] == WANTED).float() * mask
        shares.append(float(hits.sum() / mask.sum()))
        batch.batch["advantages"] = (hits - shares[-1]) * mask
        old = actor.compute_log_prob(batch)[0].batch["old_log_probs"]
        gaps.append(float(((old - batch.batch["rollout_log_probs"]) * mask).abs().max()))
        batch.batch["old_log_probs"] = old
        actor.update_actor(batch)
    assert shares[0] < 0.1
    assert shares[-1] > 0.8
    assert max(gaps) < 0.2
    assert {weight.dtype for weight in actor.engine.parameters()} == {torch.float32}
