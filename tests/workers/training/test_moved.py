"""The share of weights that the first update moved, and what is said where it is small."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from tests.workers.kept_ranks import run_kept
from tests.workers.samples import make_batch, own_piece, started, tiny_config
from workers.config import OptimConfig
from workers.roles.actor import ActorWorker
from workers.training import moved
from workers.training.moved import count_moved, moved_share, sample_weights

CPU = torch.device("cpu")


def shares(
    one_layer_dir: Path, dtype: str, lr: float, strategy: str = "fsdp"
) -> list[float | None]:
    """`actor/moved_share` of two updates."""
    config = tiny_config(
        one_layer_dir, ppo_mini_batch_size=6, optim=OptimConfig(lr=lr), strategy=strategy
    )
    config.actor_rollout_ref.model.dtype = dtype
    actor = started(ActorWorker, config, 10)
    data = own_piece(make_batch(6), actor.rank, actor.world_size)
    return [actor.update_actor(data).get("actor/moved_share") for _ in range(2)]


def test_float32_weights_move_where_bfloat16_ones_stand_still(
    one_layer_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        first, second = shares(one_layer_dir, "float32", 1e-6)
        assert not caplog.records
        rounded, _ = shares(one_layer_dir, "bfloat16", 1e-6)
    assert second is None
    assert first is not None
    assert rounded is not None
    assert first > 0.5 > 20 * rounded
    said = [record.message for record in caplog.records]
    assert len(said) == 1
    assert "moved 1.4 % of the weights" in said[0]


def test_a_run_whose_weights_stand_still_warns(
    one_layer_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert shares(one_layer_dir, "float32", 0.0)[0] == 0.0
        assert not caplog.records
        assert shares(one_layer_dir, "float32", 1e-60)[0] == 0.0
    assert "at a learning rate of 1e-60 moved none of the" in caplog.text


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_agree_on_the_share_of_one(one_layer_dir: Path, strategy: str) -> None:
    results = run_kept(2, shares, one_layer_dir, "float32", 1e-6, strategy)
    assert results[0] == results[1]
    assert results[0][0] == pytest.approx(shares(one_layer_dir, "float32", 1e-6)[0], abs=0.01)


def test_of_many_weights_a_sample_of_every_parameter_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moved, "MOST_ELEMENTS", 100)
    parameters = [torch.zeros(70, 10), torch.zeros(300), torch.zeros(2)]
    before = sample_weights(parameters)
    assert sum(map(len, before)) <= 100 + len(parameters)
    assert all(len(sample) for sample in before)
    parameters[0] += 1
    num_moved, num_sampled = count_moved(before, parameters, CPU).tolist()
    assert moved_share(num_moved, num_sampled, 1.0) == pytest.approx(0.7, abs=0.02)
