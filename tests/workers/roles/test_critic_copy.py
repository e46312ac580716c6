"""A frozen copy of the critic predicts what the critic does, version by version."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.workers.samples import make_batch, started, tiny_config
from tests.workers.stand_ins import Group
from verl_like.errors import WeightSyncError
from workers.roles.critic import CriticWorker
from workers.roles.critic_copy import CriticCopyWorker
from workers.training import engine
from workers.weights.delivery import deliver_weights, publish_weights


@pytest.fixture
def critic(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> CriticWorker:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return started(CriticWorker, tiny_config(tiny_dir, ppo_mini_batch_size=8), 20)


def test_values_are_the_critics_at_the_version_that_was_delivered(
    critic: CriticWorker, tiny_dir: Path
) -> None:
    copy = started(CriticCopyWorker, tiny_config(tiny_dir))
    with pytest.raises(WeightSyncError, match="copy of the critic holds no version of its weights"):
        copy.compute_values(make_batch(8))
    trainers, makers = Group([critic]), Group([copy])
    for version in (1, 2):
        critic.update_critic(make_batch(8))
        publish_weights(trainers, version)
        deliver_weights(trainers, makers)
        published = critic.compute_values(make_batch(8)).batch["values"]
        critic.update_critic(make_batch(8))
        found = copy.compute_values(make_batch(8)).batch
        assert torch.equal(found["values"], published)
        assert found["value_version"].tolist() == [version] * 8
        assert not torch.equal(critic.compute_values(make_batch(8)).batch["values"], published)


def test_weights_that_were_refused_are_not_scored_with(
    critic: CriticWorker, tiny_dir: Path
) -> None:
    copy = started(CriticCopyWorker, tiny_config(tiny_dir))
    copy.engine.commit(1)
    score = critic.engine.module.score
    score.weight = torch.nn.Parameter(torch.zeros(2, score.weight.shape[1]))
    publish_weights(Group([critic]), 2)
    with pytest.raises(WeightSyncError, match="of another shape: score.weight"):
        deliver_weights(Group([critic]), Group([copy]))
    with pytest.raises(WeightSyncError, match="holds no version"):
        copy.compute_values(make_batch(8))


def test_the_copy_makes_no_optimizer(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "build_optimizer", None)  # who calls it fails
    copy = started(CriticCopyWorker, tiny_config(tiny_dir))
    assert copy.engine.optimizer is None
    assert not any(parameter.requires_grad for parameter in copy.engine.parameters())
    with pytest.raises(TypeError):
        started(CriticWorker, tiny_config(tiny_dir), 20)
