"""Weights arrive bit for bit, and no error in transit changes a version."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.workers.kept_ranks import run_kept
from tests.workers.samples import beside, make_batch, own_chunk, started, tiny_config
from tests.workers.stand_ins import (
    Group,
    InlineGroup,
    Receiver,
    Sender,
    TiedModel,
    assert_rejected,
    checksums,
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
from workers.weights.full_weights import checksum_of
from workers.weights.sync import sync_weights


def sharded_actor_and_separate_rollout(one_layer_dir: Path, folder: Path) -> list[Any]:
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
    reports = []
    for version in range(3):
        if rank == world - 1:
            if version in (0, 2):
                rollout = started(RolloutWorker, config)
            report = rollout.receive_weights(store.get(f"address {version}").decode(), version)
            assert rollout.engine.version == version
            reports.append((report.error, rollout.weights_checksum()))
            continue
        if version in (0, 2):
            actor = started(ActorWorker, config, 10)
        if version == 2:
            actor.load_checkpoint(folder)
            assert checksum_of(actor.engine.named_full_tensors()) == reports[-1][1]
        actor.update_actor(own_chunk(make_batch(12, seed=version), rank, world - 1))
        address = actor.open_weight_channel()
        if rank == 0:
            store.set(f"address {version}", address)
        report = actor.send_weights(address or "", 1, 0.01)
        reports.append((report.error, checksum_of(actor.engine.named_full_tensors())))
        if version == 1:
            actor.save_checkpoint(folder)
    return reports


def test_a_sharded_actor_sends_to_a_rollout_in_another_pool(
    one_layer_dir: Path, tmp_path: Path
) -> None:
    arguments = str(one_layer_dir), str(tmp_path / "actor")
    results = run_kept(3, sharded_actor_and_separate_rollout, *arguments)
    assert results == [results[0]] * 3
    assert [error for error, _ in results[0]] == [None] * 3
    assert len({checksum for _, checksum in results[0]}) == 3


def colocated(one_layer_dir: Path) -> tuple[bool, str | None]:
    """Sync an actor with a rollout on the same ranks after two updates, with a sleep in between.

    Return whether they share the module, and the error of a sync whose copy is damaged.
    """
    config = tiny_config(one_layer_dir, ppo_mini_batch_size=4)
    actor = started(ActorWorker, config, 10)
    rollout = beside(actor, RolloutWorker, config)
    for version in range(2):
        actor.update_actor(own_chunk(make_batch(8), actor.rank, actor.world_size))
        assert rollout.update_weights(version).error is None
        assert rollout.weights_checksum() == checksum_of(actor.engine.named_full_tensors())
        assert rollout.engine.version == version
        if version == 0:
            rollout.sleep()

    load = rollout.engine._load
    rollout.engine._load = lambda tensors: load(list(tensors)[1:])
    return rollout.engine.module is actor.engine.module, rollout.update_weights(2).error


@pytest.mark.parametrize("world", [1, 2])
def test_a_colocated_rollout_shares_the_module_or_gathers_a_copy(
    one_layer_dir: Path, world: int
) -> None:
    for rank, (is_shared, error) in enumerate(run_kept(world, colocated, str(one_layer_dir))):
        words = f"rollout rank {rank}: engine: 1 missing: model.embed_tokens.weight."
        assert (is_shared, error) == ((True, None) if world == 1 else (False, words))


def test_the_version_changes_when_every_rank_has_verified(actor: Group, rollout: Group) -> None:
    for version in range(2):
        train(actor)
        metrics = sync_weights(actor, rollout, version)
        assert versions(rollout) == [version] * 2
        assert set(checksums(rollout)) == {checksums(actor)[0]}
        assert metrics["training/weight_version"] == version
    assert metrics["perf/weight_sync_mib"] > 0


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


def test_no_version_changes_if_one_rank_rejects_the_weights(actor: Group, rollout: Group) -> None:
    rollout.workers[1].engine.module = TiedModel(0, hidden=7)
    assert_rejected(actor, rollout, "rollout rank 1: engine: .*embed.weight")
    rollout.workers[1].engine.module = TiedModel(1)
    sync_weights(actor, rollout, 6)
    assert versions(rollout) == [6, 6]


def test_foreign_entries_in_the_store_change_no_sync(actor: Group, rollout: Group) -> None:
    sync_weights(actor, rollout, 0)
    stranger = dist.TCPStore("127.0.0.1", actor.workers[0].connections._own_store[0].port)
    for name in ("joined/1", "complete", "weights/0/0", "weights/0/1", "held/1"):
        for part in ("", "sync 2/", "2/"):
            stranger.set(part + name, "a stranger's")
    train(actor)
    sync_weights(actor, rollout, 1)
    assert versions(rollout) == [1, 1]
    assert set(checksums(rollout)) == {checksums(actor)[0]}


@pytest.mark.parametrize("entry", ["who has joined", "how gloo is reached"])
def test_an_overwritten_entry_of_the_store_ends_the_sync(
    actor: Group, rollout: Group, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    set_value = SignedStore.set

    def set_and_overwrite(store: SignedStore, key: str, value: str | bytes) -> None:
        set_value(store, key, value)
        if key.startswith("joined/") == (entry == "who has joined"):
            stranger = dist.TCPStore("127.0.0.1", actor.workers[0].connections._own_store[0].port)
            for name in stranger.list_keys():
                if name.startswith(store._prefix):  # other groups may still be forming
                    stranger.set(name, "a stranger's")

    monkeypatch.setattr(SignedStore, "set", set_and_overwrite)
    monkeypatch.setattr(connection, "JOIN_TIMEOUT", timedelta(seconds=0.2))
    with pytest.raises(WeightSyncError, match="was not written by a process of this run"):
        sync_weights(actor, rollout, 1)
    assert versions(rollout) == [None, None]
    monkeypatch.undo()
    sync_weights(actor, rollout, 2)
    assert versions(rollout) == [2, 2]


def test_weights_without_the_secret_are_rejected(
    actor: Group, rollout: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Channel.send

    def send_as_a_stranger(channel: Channel, *arguments: Any, **named: Any) -> None:
        channel._sign = SignedStore(dist.HashStore(), new_secret(), "sync 1").sign
        send(channel, *arguments, **named)

    monkeypatch.setattr(Channel, "send", send_as_a_stranger)
    assert_rejected(
        actor,
        rollout,
        r"the end marker \(wrong signature\), the header of bucket 0 \(wrong signature\)",
    )


def test_rejected_weights_are_sent_once_more(
    actor: Group,
    rollout: Group,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = rollout.workers[1].engine.module
    rollout.workers[1].engine.module = TiedModel(0, hidden=7)
    figures = sync._figures

    def fix_then_reject(*reports: Any) -> Any:
        rollout.workers[1].engine.module = module
        return figures(*reports)

    monkeypatch.setattr(sync, "_figures", fix_then_reject)
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
    assert type(caught.value) is WeightSyncError, "no retry"
    assert versions(rollout) == [None]
