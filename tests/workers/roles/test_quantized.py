"""Roles with int8 weights: their results on one rank and on two, and their unquantized parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.kept_ranks import run_kept
from tests.workers.samples import (
    beside,
    learned,
    make_batch,
    own_chunk,
    started,
    tiny_config,
)
from workers.config import DistillationConfig, RewardConfig, TeacherModelConfig
from workers.models.quantize import Int8Weight, is_quantized
from workers.roles.actor import ActorWorker
from workers.roles.reference import ReferenceWorker, TeacherWorker
from workers.roles.reward_model import RewardModelWorker
from workers.roles.rollout import RolloutWorker, SamplerWorker
from workers.weights.full_weights import checksum_of


def reference_of(one_layer_dir: Path | str, quantization: str | None) -> Any:
    config = tiny_config(one_layer_dir)
    config.actor_rollout_ref.ref.quantization = quantization
    return started(ReferenceWorker, config)


def inside(scores: Any, name: str, batch: Any) -> torch.Tensor:
    return scores.batch[name][batch.batch["response_mask"] != 0]


def scores_of_a_rank(one_layer_dir: str) -> tuple[bool, torch.Tensor]:
    reference = reference_of(one_layer_dir, "int8")
    chunk = own_chunk(make_batch(8), reference.rank, reference.world_size)
    return reference.engine.is_sharded, reference.compute_ref_log_prob(chunk).batch["ref_log_prob"]


def test_each_of_two_ranks_has_the_full_int8_model_and_the_same_scores(one_layer_dir: Path) -> None:
    (sharded, first), (_, second) = run_kept(2, scores_of_a_rank, str(one_layer_dir))
    by_one = reference_of(one_layer_dir, "int8").compute_ref_log_prob(make_batch(8))
    assert not sharded
    torch.testing.assert_close(
        torch.cat([first, second]), by_one.batch["ref_log_prob"], atol=1e-2, rtol=0
    )


def test_a_teacher_scores_with_int8(one_layer_dir: Path) -> None:
    batch, scores = make_batch(8), []
    for quantization in (None, "int8"):
        config = tiny_config(one_layer_dir)
        path = config.actor_rollout_ref.model.path
        teacher = TeacherModelConfig(model_path=path, quantization=quantization)
        config.distillation = DistillationConfig(teacher_model=teacher)
        worker = started(TeacherWorker, config)
        assert is_quantized(worker.engine.module) == bool(quantization)
        scores.append(inside(worker.compute_teacher_log_prob(batch), "teacher_log_prob", batch))
    assert 1e-6 < float((scores[0] - scores[1]).abs().mean()) < 0.02


@pytest.mark.parametrize("listed", [True, False])
def test_a_reward_model_scores_with_int8(
    one_layer_dir: Path, classifier: Path, listed: bool
) -> None:
    batch, scores = make_batch(6), []
    for quantization in (None, "int8"):
        config = tiny_config(one_layer_dir)
        path = str(classifier)
        if listed:
            reward = RewardConfig(name="one", kind="model", path=path, quantization=quantization)
            config.reward.list = [reward]
        else:
            config.reward.model.enable = True
            config.reward.model.path = path
            config.reward.model.quantization = quantization
        worker = started(RewardModelWorker, config)
        assert is_quantized(worker.engine.module) == bool(quantization)
        assert not isinstance(worker.engine.module.score.weight, Int8Weight)
        scores.append(worker.compute_rm_score(batch).batch["rm_scores"].sum(dim=1))
    assert float((scores[0] - scores[1]).abs().max()) < 0.05 * float(scores[0].abs().max())
    assert not torch.equal(*scores)


def updated(one_layer_dir: Path, quantization: str | None) -> tuple[Any, ...]:
    """Return metrics and weights of an actor next to a rollout, after two syncs and updates."""
    config = tiny_config(one_layer_dir, ppo_mini_batch_size=4)
    config.actor_rollout_ref.rollout.quantization = quantization
    actor = started(ActorWorker, config, 10)
    rollout = beside(actor, RolloutWorker, config)
    metrics = []
    for version in range(2):
        assert rollout.update_weights(version).error is None
        assert rollout.weights_checksum() == actor.weights_checksum()
        metrics.append(learned(actor.update_actor(make_batch(8, seed=version))))
    owns = rollout.engine.owns_weights
    return metrics, actor.weights_checksum(), owns, is_quantized(actor.engine.module)


def test_an_int8_rollout_does_not_change_the_actor_bit_for_bit(one_layer_dir: Path) -> None:
    plain, rounded = (updated(one_layer_dir, quantization) for quantization in (None, "int8"))
    assert rounded[:2] == plain[:2]
    assert (plain[2:], rounded[2:]) == ((False, False), (True, False))


def test_a_reference_s_checksum_is_of_its_rounded_weights(one_layer_dir: Path) -> None:
    plain, rounded, repeated = (reference_of(one_layer_dir, q) for q in (None, "int8", "int8"))
    named = {name: weight.float() for name, weight in plain.engine.module.named_parameters()}
    for name, weight in rounded.engine.module.named_parameters():
        named[name] = weight.floats() if isinstance(weight, Int8Weight) else weight
    assert rounded.weights_checksum() == checksum_of(named.items())
    assert rounded.weights_checksum() == repeated.weights_checksum() != plain.weights_checksum()


def test_a_sampler_rounds_the_weights_like_a_reference(one_layer_dir: Path) -> None:
    config = tiny_config(one_layer_dir)
    config.actor_rollout_ref.rollout.quantization = "int8"
    sampler, reference = started(SamplerWorker, config), reference_of(one_layer_dir, "int8")
    weights = dict(reference.engine.module.named_parameters())
    for name, weight in sampler.engine.module.named_parameters():
        if isinstance(weight, Int8Weight):
            assert torch.equal(weight.numbers, weights[name].numbers)
            torch.testing.assert_close(weight.scales, weights[name].scales, rtol=1e-6, atol=0)
