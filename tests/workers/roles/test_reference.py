from __future__ import annotations

from pathlib import Path

import torch

from tests.workers.samples import make_batch, started, tiny_config, with_doubled_head
from workers.roles.actor import ActorWorker
from workers.roles.reference import ReferenceWorker


def test_the_reference_scores_as_the_actor_did_before_training(tiny_dir: Path) -> None:
    config = tiny_config(tiny_dir, ppo_mini_batch_size=8)
    config.actor_rollout_ref.rollout.temperature = 0.8
    actor, reference = started(ActorWorker, config, 10), started(ReferenceWorker, config)
    batch = make_batch(8)
    first = actor.compute_log_prob(batch)[0].batch["old_log_probs"]
    actor.update_actor(batch)
    scores = reference.compute_ref_log_prob(batch)
    assert torch.equal(scores.batch["ref_log_prob"], first)
    assert not torch.equal(actor.compute_log_prob(batch)[0].batch["old_log_probs"], first)
    assert set(scores.batch.keys()) == {"ref_log_prob"}


def test_a_reference_with_its_own_folder_is_that_model_without_adapters(
    tiny_dir: Path, tmp_path: Path
) -> None:
    with_doubled_head(tiny_dir, tmp_path)
    as_actor = tiny_config(tiny_dir)
    as_actor.actor_rollout_ref.model.path = str(tmp_path)
    config = tiny_config(tiny_dir)
    config.actor_rollout_ref.ref.model.path = str(tmp_path)
    config.actor_rollout_ref.model.lora_rank = 2
    assert ReferenceWorker.role_model(config).model.lora_rank == 0
    configs = (config, as_actor, tiny_config(tiny_dir))
    hashes = [started(ReferenceWorker, c).weights_checksum() for c in configs]
    assert hashes[0] == hashes[1] != hashes[2]
