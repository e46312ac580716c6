"""Generators get every published version."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.workers.stand_ins import Group, Receiver, Sender, checksums, train, versions
from trainer.async_training.activity import Activity
from trainer.async_training.config import AsyncConfig
from trainer.async_training.weights import WeightFeed


def generator() -> Group:
    return Group([Receiver()])


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> dict[str, Group]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return {"actor": Group([Sender()]), "rollout": generator(), "rollout_1": generator()}


def feed_of(groups: dict[str, Group]) -> WeightFeed:
    config = AsyncConfig()
    config.async_training.generators = 2
    run: Any = SimpleNamespace(config=config, groups=groups)
    unused: Any = None
    return WeightFeed(run, unused, unused, Activity())


def test_critic_copies_get_the_weights_of_each_version(groups: dict[str, Group]) -> None:
    critic, copies = Group([Sender()]), {"critic_copy": generator(), "critic_copy_1": generator()}
    groups |= {"critic": critic, **copies}
    feed = feed_of(groups)
    for version in (1, 2):
        train(critic)
        published = checksums(critic)
        feed.publish(version)
        train(critic)
        feed.publish(version)  # as for a validation by other weights of the actor
        assert [feed.deliver(0), feed.deliver(1)] == [version] * 2
        for copy in copies.values():
            assert checksums(copy) == published
            assert versions(copy) == [version]
