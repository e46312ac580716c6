"""A frozen copy of the critic predicts what the critic does, version by version."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.workers.samples import make_batch, started, tiny_config
from tests.workers.stand_ins import Group
from verl_like.errors import WeightSyncError
from workers.roles.critic import CriticCopyWorker, CriticWorker
from workers.weights.sync import deliver_weights, publish_weights


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def test_the_copy_s_values_are_the_critic_s_at_the_delivered_version(tiny_dir: Path) -> None:
    config = tiny_config(tiny_dir, ppo_mini_batch_size=8)
    config.actor_rollout_ref.model.compute_dtype = "bfloat16"
    config.critic.model.compute_dtype = "bfloat16"
    critic, copy = started(CriticWorker, config, 20), started(CriticCopyWorker, config)
    assert {weight.dtype for weight in copy.engine.module.parameters()} == {torch.bfloat16}
    with pytest.raises(WeightSyncError, match="copy of the critic has no weights"):
        copy.compute_values(make_batch(8))
    trainers, generators = Group([critic]), Group([copy])
    for version in (1, 2):
        critic.update_critic(make_batch(8))
        publish_weights(trainers, version)
        deliver_weights(trainers, generators)
        published = critic.compute_values(make_batch(8)).batch["values"]
        critic.update_critic(make_batch(8))
        columns = copy.compute_values(make_batch(8)).batch
        assert torch.equal(columns["values"], published)
        assert columns["value_version"].tolist() == [version] * 8
        assert not torch.equal(critic.compute_values(make_batch(8)).batch["values"], published)


def test_a_copy_that_rejected_weights_computes_no_values(tiny_dir: Path) -> None:
    config = tiny_config(tiny_dir)
    critic, copy = started(CriticWorker, config, 1), started(CriticCopyWorker, config)
    copy.engine.commit(1)
    score = critic.engine.module.score
    score.weight = torch.nn.Parameter(torch.zeros(2, score.weight.shape[1]))
    publish_weights(Group([critic]), 2)
    with pytest.raises(WeightSyncError, match="of another shape: score.weight"):
        deliver_weights(Group([critic]), Group([copy]))
    with pytest.raises(WeightSyncError, match="has no weights"):
        copy.compute_values(make_batch(8))


def test_the_copy_has_no_optimizer(tiny_dir: Path) -> None:
    copy = started(CriticCopyWorker, tiny_config(tiny_dir))
    assert copy.engine.optimizer is None
    assert not any(weight.requires_grad for weight in copy.engine.module.parameters())
