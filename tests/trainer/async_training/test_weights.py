"""Generators get every published version, and `syncs.jsonl` has a line for every delivery."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.runs import lines
from tests.workers.stand_ins import Group, Receiver, Sender, checksums, train, versions
from trainer.async_training.activity import Activity
from trainer.async_training.config import AsyncConfig
from trainer.async_training.weights import SyncLog, WeightFeed


def generator() -> Group:
    return Group([Receiver()])


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> dict[str, Group]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return {"actor": Group([Sender()]), "rollout": generator(), "rollout_1": generator()}


def feed_of(groups: dict[str, Group]) -> WeightFeed:
    config = AsyncConfig()
    config.async_training.generators = 2
    config.async_training.score_on = "generator" if "critic" in groups else "trainer"
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


def figures(version: int) -> dict[str, float]:
    """Return the report of a delivery of 5 MiB."""
    return {
        "timing_s/weight_sync": 0.25,
        "perf/weight_sync_hash_s": 0.125,
        "perf/weight_sync_mib": 5.0,
        "training/weight_version": float(version),
    }


def test_a_line_describes_a_delivery(tmp_path: Path) -> None:
    SyncLog(tmp_path).add(1, "rollout_1", figures(3))
    (line,) = lines(tmp_path, "syncs.jsonl")
    assert line.pop("time") > 1.7e9
    assert line.pop("driver_rss_bytes") > 2**24
    assert line == {
        "version": 3,
        "generator": 1,
        "role": "rollout_1",
        "seconds": 0.25,
        "hash_s": 0.125,
        "bytes": 5 * 2**20,
    }
