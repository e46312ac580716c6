from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.samples import PROMPT, make_batch, started, tiny_config
from workers.roles.critic import CriticWorker


def critic_of(one_layer_dir: Path, **actor: Any) -> CriticWorker:
    return started(
        CriticWorker, tiny_config(one_layer_dir, **{"ppo_mini_batch_size": 8, **actor}), 20
    )


def test_values_start_at_zero(one_layer_dir: Path) -> None:
    values = critic_of(one_layer_dir).compute_values(make_batch(5)).batch["values"]
    assert values.shape == (5, 5)
    assert values.abs().max() == 0


def test_a_value_depends_only_on_earlier_tokens(one_layer_dir: Path) -> None:
    critic = critic_of(one_layer_dir)
    torch.nn.init.ones_(critic.engine.module.score.weight)
    batch = make_batch(6)
    for name in ("attention_mask", "response_mask"):
        batch.batch[name].fill_(1)
    before = critic.compute_values(batch).batch["values"]
    batch.batch["input_ids"][:, PROMPT + 2] = 7  # response token 2
    moved = (critic.compute_values(batch).batch["values"] - before).abs().amax(dim=0) > 0
    assert moved.tolist() == [False, False, False, True, True]


def test_values_are_zero_outside_the_response(one_layer_dir: Path) -> None:
    critic = critic_of(one_layer_dir)
    torch.nn.init.ones_(critic.engine.module.score.weight)
    batch = make_batch(6)
    values = critic.compute_values(batch).batch["values"]
    assert torch.equal(values != 0, batch.batch["response_mask"] != 0)


def test_updates_move_values_to_the_returns(one_layer_dir: Path) -> None:
    critic, batch = critic_of(one_layer_dir), make_batch(8)
    batch.batch["returns"].fill_(1.0)
    losses = []
    for _ in range(20):
        batch.batch["values"] = critic.compute_values(batch).batch["values"]
        metrics = critic.update_critic(batch)
        losses.append(metrics["critic/vf_loss"])
    assert losses[0] == pytest.approx(0.5)
    assert losses[-1] < 0.05
    names = {"vf_loss", "vf_clipfrac", "vpred_mean", "grad_norm", "lr", "skipped_steps"}
    names |= {"weights_changed_fraction"}
    assert metrics.keys() == {f"critic/{name}" for name in names}
    assert all(type(value) is float for value in metrics.values())


def test_mini_batch_and_epochs_default_to_the_actor_s(one_layer_dir: Path) -> None:
    critic = CriticWorker(tiny_config(one_layer_dir, ppo_mini_batch_size=6, ppo_epochs=3))
    assert (critic.engine.spec.mini_batch, critic.engine.spec.epochs) == (6, 3)


def test_the_aggregation_and_its_constant_default_to_the_actor_s(one_layer_dir: Path) -> None:
    losses = []
    for factor in (None, 4, 8):
        settings = {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": factor}
        critic = critic_of(one_layer_dir, **settings)
        batch = make_batch(8)
        losses.append(critic.update_critic(batch)["critic/vf_loss"])
    width = batch.batch["response_mask"].shape[1]
    assert losses[1] == pytest.approx(2 * losses[2])
    assert losses[0] == pytest.approx(losses[1] * 4 / width)


def test_the_critic_can_have_its_own_aggregation(one_layer_dir: Path) -> None:
    losses = {}
    for mode in (None, "token-mean", "token-sum"):
        config = tiny_config(one_layer_dir, ppo_mini_batch_size=8, loss_agg_mode="token-mean")
        config.critic.loss_agg_mode = mode
        metrics = started(CriticWorker, config, 20).update_critic(make_batch(8))
        losses[mode] = metrics["critic/vf_loss"]
    assert losses[None] == losses["token-mean"]
    num_tokens = int(make_batch(8).batch["response_mask"].sum())
    assert losses["token-sum"] == pytest.approx(losses["token-mean"] * num_tokens, rel=1e-5)
