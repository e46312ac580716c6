"""The moving average of the actor's weights: values, storage, checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers.kept_ranks import run_kept
from tests.workers.samples import started, tiny_config, weights_of
from tests.workers.training.test_moving_average_engine import (
    DECAY,
    Weights,
    assert_average,
    update,
)
from workers.roles.actor import ActorWorker


def actor_of(
    one_layer_dir: Path | str, decay: float | None = DECAY, lora_rank: int = 0
) -> ActorWorker:
    settings = {"ppo_mini_batch_size": 4, "ema_decay": decay}
    config = tiny_config(one_layer_dir, model={"lora_rank": lora_rank}, **settings)
    return started(ActorWorker, config, 10)


def averaged(actor: ActorWorker) -> Weights:
    actor.use_average(True)
    average = weights_of(actor)
    actor.use_average(False)
    return average


def after_two_updates(one_layer_dir: str) -> tuple[list[Weights], Weights]:
    """Return the weights around each update, and the average; the weights are restored."""
    actor = actor_of(one_layer_dir)
    policies = [weights_of(actor)]
    for seed in range(2):
        update(actor, seed)
        policies.append(weights_of(actor))
    average = averaged(actor)
    assert all(tensor.equal(policies[-1][name]) for name, tensor in weights_of(actor).items())
    return policies, average


def test_shards_have_the_average_of_whole_weights(one_layer_dir: Path) -> None:
    for policies, average in run_kept(2, after_two_updates, str(one_layer_dir)):
        assert_average([*policies, average], DECAY)


def test_a_resumed_actor_has_the_same_average_bit_for_bit(
    one_layer_dir: Path, tmp_path: Path
) -> None:
    first, second = (actor_of(one_layer_dir, lora_rank=4) for _ in range(2))
    update(first, 0)
    first.save_checkpoint(str(tmp_path / "actor"))
    second.load_checkpoint(str(tmp_path / "actor"))
    for actor in (first, second):
        update(actor, 1)

    expected, policy = averaged(first), weights_of(first)
    assert any(not tensor.equal(policy[name]) for name, tensor in expected.items())
    assert all(tensor.equal(expected[name]) for name, tensor in averaged(second).items())


def test_the_average_does_not_change_training(one_layer_dir: Path) -> None:
    sums = []
    for decay in (DECAY, None):
        actor = actor_of(one_layer_dir, decay)
        for seed in range(2):
            update(actor, seed)
            if decay is not None:
                averaged(actor)
        sums.append(actor.weights_checksum())
    assert sums[0] == sums[1]


def test_without_a_saved_average_it_starts_at_the_weights_and_warns(
    one_layer_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    without, actor = actor_of(one_layer_dir, None), actor_of(one_layer_dir)
    update(without, 0)
    without.save_checkpoint(str(tmp_path / "actor"))
    actor.load_checkpoint(str(tmp_path / "actor"))
    assert "holds no moving average" in caplog.text
    expected = weights_of(without)
    assert all(tensor.equal(expected[name]) for name, tensor in averaged(actor).items())


def test_a_checkpoint_with_an_average_resumes_without_one(
    one_layer_dir: Path, tmp_path: Path
) -> None:
    first, without = actor_of(one_layer_dir), actor_of(one_layer_dir, None)
    update(first, 0)
    first.save_checkpoint(str(tmp_path / "actor"))
    without.load_checkpoint(str(tmp_path / "actor"))
    assert without.weights_checksum() == first.weights_checksum()
