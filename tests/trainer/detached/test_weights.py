"""Makers get every version that is published, ahead of time where they have room for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.detached.test_run import detached, shared_numbers
from tests.workers.stand_ins import Group, Sender, checksums, keeping, train, versions
from trainer.detached.config import DetachedConfig
from trainer.detached.topology import Topology
from trainer.detached.weights import WeightFeed


def maker() -> Group:
    return Group([keeping(takes_changes=False)])


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> dict[str, Group]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return {"actor": Group([Sender()]), "rollout": maker(), "rollout_1": maker()}


def feed_of(groups: dict[str, Group]) -> WeightFeed:
    """Maker 0 has a second buffer, maker 1 has none."""
    config = DetachedConfig()
    config.detached.makers = 2
    config.detached.maker_settings = {"0": {"double_buffer": True}}
    return WeightFeed(config, groups, Topology.of(2, 1))


def test_what_was_sent_ahead_is_loaded_when_the_maker_asks(groups: dict[str, Group]) -> None:
    feed = feed_of(groups)
    for version in range(1, 4):
        before = checksums(groups["rollout"])
        train(groups["actor"])
        feed.publish(version)
        feed._threads[0].submit(lambda: None).result()  # the delivery has ended
        assert checksums(groups["rollout"]) == before
        assert groups["rollout"].workers[0].copy.version == version
        assert [feed.deliver(0), feed.deliver(1)] == [version] * 2
        for role in ("rollout", "rollout_1"):
            assert checksums(groups[role]) == checksums(groups["actor"])
            assert versions(groups[role]) == [version]


def test_a_maker_that_was_started_anew_is_sent_what_it_lost(groups: dict[str, Group]) -> None:
    feed = feed_of(groups)
    feed.publish(1)
    feed._threads[0].submit(lambda: None).result()
    groups["rollout"] = maker()
    assert feed.deliver(0) == 1
    assert checksums(groups["rollout"]) == checksums(groups["actor"])


def test_a_copy_of_the_critic_gets_the_critics_weights_once_for_each_version(
    groups: dict[str, Group],
) -> None:
    critic, copies = Group([Sender()]), {"critic_copy": maker(), "critic_copy_1": maker()}
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


def test_weights_in_parts_and_ahead_of_time_change_no_number(
    tiny_dir: Path, tmp_path: Path, plain: Path
) -> None:
    ours = ("detached.max_staleness=0", "actor_rollout_ref.rollout.double_buffer=true")
    more = (*ours, "actor_rollout_ref.rollout.sync=changed")
    folder = detached(tiny_dir, tmp_path, *more)
    assert shared_numbers(folder) == shared_numbers(plain)
