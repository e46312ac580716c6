"""Weights arrive bit for bit, and no error in transit changes a version."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.workers.kept_ranks import run_kept
from tests.workers.samples import beside, make_batch, own_chunk, started, tiny_config
from tests.workers.stand_ins import (
    Group,
    InlineGroup,
    Receiver,
    Sender,
    TiedModel,
    checksums,
    refused,
    train,
    versions,
)
from verl_like.errors import WeightSyncError
from verl_like.process.info import new_secret
from verl_like.process.store import SignedStore
from workers.roles.actor import ActorWorker
from workers.roles.rollout import RolloutWorker
from workers.weights import connection, sync
from workers.weights.channel import Channel
from workers.weights.checksum import checksum_of
from workers.weights.sync import sync_weights


def sharded_actor_and_lonely_rollout(one_layer_dir: Path, folder: Path) -> list[Any]:
    """All ranks but the last train one sharded actor, the last is a rollout in another pool.

    Sync three versions; before the last, create actor and rollout again, and let the actor resume.
    Return what each rank reports about every version.
    """
    rank, world, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=30))
    os.environ.update(
        {"RANK": "0", "WORLD_SIZE": "1"} if rank == world - 1 else {"WORLD_SIZE": str(world - 1)}
    )
    config = tiny_config(one_layer_dir, ppo_mini_batch_size=12)
    config.actor_rollout_ref.model.lora_rank = 4
    config.actor_rollout_ref.rollout.weight_sync = "changed"
    found = []
    for version in range(3):
        if rank == world - 1:
            if version in (0, 2):
                rollout = started(RolloutWorker, config)
            report = rollout.receive_weights(store.get(f"address {version}").decode(), version)
            assert rollout.engine.version == version
            found.append((report.error, rollout.weights_checksum()))
            continue
        if version in (0, 2):
            actor = started(ActorWorker, config, 10)
        if version == 2:
            actor.load_checkpoint(folder)
            again = checksum_of(actor.engine.named_full_tensors())
            assert again == found[-1][1]
        actor.update_actor(own_chunk(make_batch(12, seed=version), rank, world - 1))
        address = actor.open_weight_channel()
        if rank == 0:
            store.set(f"address {version}", address)
        report = actor.send_weights(address or "", 1, 0.01)
        found.append((report.error, checksum_of(actor.engine.named_full_tensors())))
        if version == 1:
            actor.save_checkpoint(folder)
    return found


def test_a_sharded_actor_fills_a_rollout_in_another_pool(
    one_layer_dir: Path, tmp_path: Path
) -> None:
    arguments = str(one_layer_dir), str(tmp_path / "actor")
    results = run_kept(3, sharded_actor_and_lonely_rollout, *arguments)
    assert results == [results[0]] * 3
    assert [error for error, _ in results[0]] == [None] * 3
    assert len({checksum for _, checksum in results[0]}) == 3


def colocated(one_layer_dir: Path) -> tuple[Any, ...]:
    """An actor and a rollout on the same ranks: two updates with syncs, and a sleep between them.

    Then a sync whose copy is damaged, if there is one.
    """
    config = tiny_config(one_layer_dir, ppo_mini_batch_size=4)
    actor = started(ActorWorker, config, 10)
    rollout = beside(actor, RolloutWorker, config)
    actor.update_actor(own_chunk(make_batch(8), actor.rank, actor.world_size))
    reports = [rollout.update_weights(0)]
    first = rollout.weights_checksum() == checksum_of(actor.engine.named_full_tensors())
    rollout.sleep()
    actor.update_actor(own_chunk(make_batch(8), actor.rank, actor.world_size))
    reports.append(rollout.update_weights(1))
    second = rollout.weights_checksum() == checksum_of(actor.engine.named_full_tensors())
    shared = rollout.engine.module is actor.engine.module
    whole = [report.error for report in reports], first, second, rollout.engine.version, shared

    load = rollout.engine._load
    rollout.engine._load = lambda tensors: load(list(tensors)[1:])
    return whole, rollout.update_weights(2).error


@pytest.mark.parametrize("world", [1, 2])
def test_beside_its_actor_a_rollout_shares_the_module_or_gathers_a_copy(
    one_layer_dir: Path, world: int
) -> None:
    results = run_kept(world, colocated, str(one_layer_dir))
    assert [whole for whole, _ in results] == [([None, None], True, True, 1, world == 1)] * world
    words = "engine: 1 missing: model.embed_tokens.weight."
    damaged = [f"rollout rank {rank}: {words}" for rank in range(world)]
    assert [error for _, error in results] == ([None] if world == 1 else damaged)


def test_the_driver_flips_the_version_when_every_rank_has_verified(
    actor: Group, rollout: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def noted(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any) -> Any:
            made.append(name)
            return make(*args)

        return note

    for name in ("open_weight_store", "join_weight_store", "form_groups"):
        monkeypatch.setattr(connection, name, noted(name, getattr(connection, name)))
    for version in range(2):
        train(actor)
        metrics = sync_weights(actor, rollout, version)
        assert versions(rollout) == [version] * 2
        assert set(checksums(rollout)) == {checksums(actor)[0]}
        assert metrics["training/weight_version"] == version
    assert metrics["perf/weight_sync_mb"] > 0
    assert sorted(made) == ["form_groups"] * 3 + ["join_weight_store"] * 3 + ["open_weight_store"]


@pytest.mark.parametrize(
    ("senders", "receivers"),
    [
        (InlineGroup([Sender()]), Group([Receiver(0, 2), Receiver(1, 2)])),
        (Group([Sender(), Sender(1)]), InlineGroup([Receiver()])),
    ],
)
def test_a_group_in_the_drivers_own_thread_syncs_with_a_larger_one(
    senders: Group, receivers: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(connection, "JOIN_TIMEOUT", timedelta(seconds=5))
    sync_weights(senders, receivers, 0)
    assert set(checksums(receivers)) == {checksums(senders)[0]}


def test_names_missing_unknown_and_of_another_shape_are_listed(
    actor: Group, rollout: Group
) -> None:
    tensors = dict(TiedModel(0).named_parameters())
    tensors["stranger"] = tensors.pop("layer.bias")
    tensors["small"] = torch.zeros(4)
    actor.workers[0].engine.named_full_tensors = lambda **_: iter(tensors.items())
    words = (
        "1 missing: layer.bias; 1 unknown: stranger; "
        r"1 of another shape: small \(is \[3\], was sent \[4\]\)"
    )
    refused(actor, rollout, words)


def test_one_rank_that_refuses_keeps_all_versions_from_flipping(
    actor: Group, rollout: Group
) -> None:
    rollout.workers[1].engine.module = TiedModel(0, hidden=7)
    refused(actor, rollout, "rollout rank 1: engine: .*embed.weight")
    rollout.workers[1].engine.module = TiedModel(1)
    sync_weights(actor, rollout, 6)
    assert versions(rollout) == [6, 6]


def test_what_strangers_write_into_the_store_changes_no_sync(actor: Group, rollout: Group) -> None:
    sync_weights(actor, rollout, 0)
    stranger = dist.TCPStore("127.0.0.1", actor.workers[0].connections._own_store[0].port)
    for name in ("joined/1", "complete", "weights/0/0", "weights/0/1", "held/1"):
        for part in ("", "sync 2/", "2/"):
            stranger.set(part + name, "a stranger's")
    train(actor)
    sync_weights(actor, rollout, 1)
    assert versions(rollout) == [1, 1]
    assert set(checksums(rollout)) == {checksums(actor)[0]}


@pytest.mark.parametrize("what", ["who has joined", "how gloo is reached"])
def test_what_a_stranger_writes_over_ends_a_sync_in_words(
    actor: Group, rollout: Group, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    put = SignedStore.set

    def written_over(store: SignedStore, key: str, value: str | bytes) -> None:
        put(store, key, value)
        if key.startswith("joined/") == (what == "who has joined"):
            stranger = dist.TCPStore("127.0.0.1", actor.workers[0].connections._own_store[0].port)
            for name in stranger.list_keys():
                if name.startswith(store._prefix):  # whoever forms a group may do so a while longer
                    stranger.set(name, "a stranger's")

    monkeypatch.setattr(SignedStore, "set", written_over)
    monkeypatch.setattr(connection, "JOIN_TIMEOUT", timedelta(seconds=0.2))
    with pytest.raises(WeightSyncError, match="was not written by a process of this run"):
        sync_weights(actor, rollout, 1)
    assert versions(rollout) == [None, None]
    monkeypatch.undo()
    sync_weights(actor, rollout, 2)
    assert versions(rollout) == [2, 2]


def test_nobody_sends_weights_without_the_secret(
    actor: Group, rollout: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Channel.send

    def send_as_a_stranger(channel: Channel, *arguments: Any, **named: Any) -> None:
        channel._sign = SignedStore(dist.HashStore(), new_secret(), "sync 1").sign
        send(channel, *arguments, **named)

    monkeypatch.setattr(Channel, "send", send_as_a_stranger)
    refused(
        actor,
        rollout,
        r"the end marker \(wrong signature\), the header of bucket 0 \(wrong signature\)",
    )


def test_what_is_refused_is_sent_once_more(
    actor: Group,
    rollout: Group,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = rollout.workers[1].engine.module
    rollout.workers[1].engine.module = TiedModel(0, hidden=7)
    refuse = sync._figures

    def mend_then_refuse(*reports: Any) -> Any:
        rollout.workers[1].engine.module = whole
        return refuse(*reports)

    monkeypatch.setattr(sync, "_figures", mend_then_refuse)
    sync_weights(actor, rollout, 3)
    assert versions(rollout) == [3, 3]
    assert set(checksums(rollout)) == {checksums(actor)[0]}
    assert "version 3 was not applied: rollout rank 1: engine: " in caplog.text
    assert caplog.text.count("Retrying once.") == 1


def test_an_engine_that_never_joins_is_named(actor: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "JOIN_TIMEOUT", timedelta(seconds=1))
    rollout = Group([Receiver(0, 2)])
    rollout.world_size = 2
    with pytest.raises(WeightSyncError, match="receiving rank 1 did not connect") as caught:
        sync_weights(actor, rollout, 0)
    assert type(caught.value) is WeightSyncError, "it is not waited for once more"
    assert versions(rollout) == [None]
