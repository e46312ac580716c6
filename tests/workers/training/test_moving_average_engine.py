"""A reference whose weights follow the actor's: averages, shards, precision, checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.workers.kept_ranks import run_kept
from tests.workers.samples import beside, make_batch, own_chunk, started, tiny_config, weights_of
from verl_like.errors import CheckpointError, WeightSyncError
from workers.config import WorkersConfig
from workers.roles.actor import ActorWorker
from workers.roles.reference import ReferenceWorker

DECAY = 0.75
Weights = dict[str, torch.Tensor]


def config_of(one_layer_dir: Path | str, decay: float = DECAY) -> WorkersConfig:
    config = tiny_config(one_layer_dir, ppo_mini_batch_size=4)
    config.actor_rollout_ref.ref.update_every = 1
    config.actor_rollout_ref.ref.ema_decay = decay
    return config


def update(actor: ActorWorker, seed: int) -> None:
    actor.update_actor(own_chunk(make_batch(4, seed), actor.rank, actor.world_size))


def follow(one_layer_dir: str, decay: float, folder: str, saved: bool = False) -> list[Weights]:
    """Return the actor's weights around two updates, then the reference's.

    With `saved`, another reference resumes from a checkpoint between the two.
    """
    config = config_of(one_layer_dir, decay)
    actor = started(ActorWorker, config, 10)
    reference = beside(actor, ReferenceWorker, config)
    weights = [weights_of(actor)]
    for seed in range(2):
        update(actor, seed)
        assert reference.update_weights(seed).error is None
        weights.append(weights_of(actor))
        if saved and seed == 0:
            reference.save_checkpoint(folder)
            reference = beside(actor, ReferenceWorker, config)
            reference.load_checkpoint(folder)
    return [*weights, weights_of(reference)]


def assert_average(weights: list[Weights], decay: float) -> None:
    """Compare the last weights with the moving average of the others in float64."""
    *policies, average = weights
    for name, first in policies[0].items():
        expected = first.double()
        for policy in policies[1:]:
            expected = decay * expected + (1 - decay) * policy[name].double()
        torch.testing.assert_close(average[name].double(), expected, rtol=0, atol=1e-7)


def test_without_a_decay_the_reference_equals_the_actor(
    one_layer_dir: Path, tmp_path: Path
) -> None:
    *_, policy, reference = follow(str(one_layer_dir), 0.0, str(tmp_path))
    assert all(weight.equal(policy[name]) for name, weight in reference.items())


def test_shards_have_the_average_and_resume_from_a_checkpoint(
    one_layer_dir: Path, tmp_path: Path
) -> None:
    for weights in run_kept(2, follow, str(one_layer_dir), DECAY, str(tmp_path), True):
        assert_average(weights, DECAY)


def test_one_rank_resumes_its_average_bit_for_bit(one_layer_dir: Path, tmp_path: Path) -> None:
    weights = follow(str(one_layer_dir), DECAY, str(tmp_path))
    assert_average(weights, DECAY)
    resumed = follow(str(one_layer_dir), DECAY, str(tmp_path), True)[-1]
    assert all(resumed[name].equal(weight) for name, weight in weights[-1].items())


def test_bfloat16_weights_are_averaged_in_float32(one_layer_dir: Path, tmp_path: Path) -> None:
    config = config_of(one_layer_dir, 0.999)
    actor = started(ActorWorker, config, 10)
    config.actor_rollout_ref.model.dtype = "bfloat16"
    reference = beside(actor, ReferenceWorker, config)
    before = {name: average.clone() for name, average in reference.engine.averages.items()}
    name, weight = next(actor.engine.named_full_tensors())
    weight += 1.0
    for version in range(3):
        reference.update_weights(version)

    expected = before[name] + (1 - 0.999**3) * (weight - before[name])
    torch.testing.assert_close(reference.engine.averages[name], expected, rtol=0, atol=1e-6)
    assert weights_of(reference)[name].equal(expected.bfloat16())

    reference.save_checkpoint(str(tmp_path))
    other = beside(actor, ReferenceWorker, config)
    other.load_checkpoint(str(tmp_path))
    assert other.engine.averages[name].equal(reference.engine.averages[name])
    assert weights_of(other)[name].equal(weights_of(reference)[name])


def test_weights_of_another_model_are_rejected_by_name(one_layer_dir: Path) -> None:
    actor = started(ActorWorker, config_of(one_layer_dir), 1)
    reference = beside(actor, ReferenceWorker, config_of(one_layer_dir))
    tensors = weights_of(actor)
    first, second, *_ = tensors
    tensors["another.weight"] = tensors.pop(first)
    tensors[second] = torch.zeros(2, 3)
    with pytest.raises(WeightSyncError) as caught:
        reference.engine.load_weights(tensors.items())
    for part in (f"missing: {first}", "unknown: another.weight", "was sent [2, 3]"):
        assert part in str(caught.value)


def test_a_checkpoint_of_a_fixed_reference_is_rejected(one_layer_dir: Path, tmp_path: Path) -> None:
    started(ReferenceWorker, tiny_config(one_layer_dir)).save_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"holds no weights.*ref.update_every"):
        started(ReferenceWorker, config_of(one_layer_dir)).load_checkpoint(str(tmp_path))
