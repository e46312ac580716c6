"""Weights arrive bit for bit, and whatever goes wrong on the way flips no version."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from distributed import run
from prompts import prompt_batch
from samples import make_batch, own_piece, started, tiny_config
from stand_ins import Group, InlineGroup, Receiver, Sender, TiedModel

import workers.weight_channel as weight_channel
import workers.weight_sync as weight_sync
from verl_like.errors import RolloutError, WeightSyncError
from verl_like.local_backend import LocalWorkerGroup
from verl_like.resources import ResourcePool
from verl_like.worker_group import ClassWithInitArgs, create_colocated_worker_cls
from workers.actor import ActorWorker
from workers.rollout import RolloutWorker
from workers.weight_sync import sync_weights
from workers.weights import Hashing, checksum_of, hash_of


@pytest.fixture
def actor(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return Group([Sender(0), Sender(1)])


@pytest.fixture
def rollout():
    return Group([Receiver(0, 2), Receiver(1, 2)])


def checksums(group):
    return [checksum_of(worker.engine.module.named_parameters()) for worker in group.workers]


def versions(group):
    return [worker.engine.version for worker in group.workers]


def train(actor):
    with torch.no_grad():
        for worker in actor.workers:
            for i, parameter in enumerate(worker.engine.module.parameters()):
                parameter += 1 + i


def three_versions():
    """Rank 0 trains and sends, ranks 1 and 2 receive; every rank's checksum after each of three versions."""
    rank = int(os.environ["RANK"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=30))
    worker = Receiver(rank - 1, 2) if rank else Sender()
    seen = []
    for version in range(3):
        if rank == 0:
            train(Group([worker]))
            store.set(f"address {version}", worker.open_weight_channel())
            report = worker.send_weights(2, 0.001)
        else:
            report = worker.receive_weights(store.get(f"address {version}").decode(), version)
        assert report.error is None
        assert rank == 0 or worker.engine.version == version
        seen.append(checksum_of(worker.engine.module.named_parameters()))
    return seen


def test_processes_have_equal_weights_after_each_version():
    sent, *received = run(3, three_versions)
    assert received == [sent, sent]
    assert len(set(sent)) == 3


def sharded_actor_and_lonely_rollout(tiny_dir, folder, fsdp_size, lora_rank):
    """All ranks but the last train one sharded actor, the last is a rollout in a pool of its own.

    Five versions; before the fourth, actor and rollout are made anew and the actor resumes. Returns what each rank
    thinks of every version.
    """
    rank, world, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=30))
    os.environ.update({"RANK": "0", "WORLD_SIZE": "1"} if rank == world - 1 else {"WORLD_SIZE": str(world - 1)})
    config = tiny_config(tiny_dir, ppo_mini_batch_size=12)
    config.actor_rollout_ref.model.lora_rank = lora_rank
    config.actor_rollout_ref.actor.fsdp_config.fsdp_size = fsdp_size
    found = []
    for version in range(5):
        if rank == world - 1:
            if version in (0, 3):
                rollout = started(RolloutWorker, config)
            report = rollout.receive_weights(store.get(f"address {version}").decode(), version)
            assert rollout.engine.version == version
            found.append((report.error, rollout.weights_checksum()))
            continue
        if version in (0, 3):
            actor = started(ActorWorker, config, 10)
        if version == 3:
            actor.load_checkpoint(folder)
            again = checksum_of(actor.engine.named_full_tensors())
            assert again == found[-1][1]
        actor.update_actor(own_piece(make_batch(12, seed=version), rank, world - 1))
        address = actor.open_weight_channel()
        if rank == 0:
            store.set(f"address {version}", address)
        report = actor.send_weights(1, 0.01)
        found.append((report.error, checksum_of(actor.engine.named_full_tensors())))
        if version == 2:
            actor.save_checkpoint(folder)
    return found


@pytest.mark.parametrize(("world", "fsdp_size", "lora_rank"), [(4, -1, 4), (5, 2, 0)])
def test_a_sharded_actor_fills_a_rollout_in_another_pool(tiny_dir, tmp_path, world, fsdp_size, lora_rank):
    arguments = (str(tiny_dir), str(tmp_path / "actor"), fsdp_size, lora_rank)
    results = run(world, sharded_actor_and_lonely_rollout, *arguments)
    assert results == [results[0]] * world
    assert [error for error, _ in results[0]] == [None] * 5
    assert len({checksum for _, checksum in results[0]}) == 5


def colocated(tiny_dir):
    """An actor and a rollout on the same ranks: two updates, each with its sync, and a sleep between."""
    config = tiny_config(tiny_dir, ppo_mini_batch_size=4)
    actor, rollout = ActorWorker(config), RolloutWorker(config)
    rollout._facts.workers["actor"] = actor
    actor.init_model(10)
    rollout.init_model()
    actor.update_actor(own_piece(make_batch(8), actor.rank, actor.world_size))
    reports = [rollout.update_weights(0)]
    first = rollout.weights_checksum() == checksum_of(actor.engine.named_full_tensors())
    rollout.sleep()
    actor.update_actor(own_piece(make_batch(8), actor.rank, actor.world_size))
    reports.append(rollout.update_weights(1))
    second = rollout.weights_checksum() == checksum_of(actor.engine.named_full_tensors())
    shared = rollout.engine.module is actor.engine.module
    return [report.error for report in reports], first, second, rollout.engine.version, shared


@pytest.mark.parametrize("world", [1, 2])
def test_beside_its_actor_a_rollout_shares_the_module_or_gathers_a_copy(tiny_dir, world):
    assert run(world, colocated, str(tiny_dir)) == [([None, None], True, True, 1, world == 1)] * world


def test_rollout_log_probs_are_the_actors_at_every_version(tiny_dir):
    config = tiny_config(tiny_dir, ppo_mini_batch_size=4)
    config.actor_rollout_ref.rollout.temperature = 0.8
    recipes = {"actor": ClassWithInitArgs(ActorWorker, config), "rollout": ClassWithInitArgs(RolloutWorker, config)}
    group = LocalWorkerGroup(ResourcePool([1]), create_colocated_worker_cls(recipes))
    actor, rollout = group.spawn(["actor", "rollout"]).values()
    actor.init_model(10)
    rollout.init_model()
    for version in range(2):
        sync_weights(actor, rollout, version)
        assert actor.weights_checksum() == rollout.weights_checksum()
        data = rollout.generate_sequences(prompt_batch(12))
        assert data.meta_info["policy_version"] == version
        old = actor.compute_log_prob(data).batch["old_log_probs"]
        torch.testing.assert_close(data.batch["rollout_log_probs"], old, atol=1e-5, rtol=0)
        actor.update_actor(make_batch(8)).get()
    group.shutdown()


def test_the_driver_flips_the_version_when_every_rank_has_verified(actor, rollout, monkeypatch):
    connections = []
    for name in ("open_store", "join_store"):
        connect = getattr(weight_sync, name)
        monkeypatch.setattr(weight_sync, name, lambda *a, c=connect, n=name: connections.append(n) or c(*a))
    for version in range(2):
        train(actor)
        metrics = sync_weights(actor, rollout, version)
        assert versions(rollout) == [version] * 2
        assert set(checksums(rollout)) == {checksums(actor)[0]}
        assert metrics["training/weight_version"] == version
    assert metrics["perf/weight_sync_mb"] > 0
    assert sorted(connections) == ["join_store", "join_store", "open_store"]


@pytest.mark.parametrize(
    ("senders", "receivers"),
    [
        (InlineGroup([Sender()]), Group([Receiver(0, 2), Receiver(1, 2)])),
        (Group([Sender(), Sender(1)]), InlineGroup([Receiver()])),
    ],
)
def test_a_group_in_the_drivers_own_thread_syncs_with_a_larger_one(senders, receivers, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(weight_channel, "FORM_TIMEOUT", timedelta(seconds=5))
    sync_weights(senders, receivers, 0)
    assert set(checksums(receivers)) == {checksums(senders)[0]}


def refused(actor, rollout, words):
    with pytest.raises(WeightSyncError, match=words):
        sync_weights(actor, rollout, 5)
    assert versions(rollout) == [None, None]


def test_a_flipped_bit_is_caught_and_no_version_flips(actor, rollout, monkeypatch):
    start = weight_channel.Channel._start_broadcast

    def flip(channel, tensor, *group):
        if tensor.dtype == torch.uint8 and tensor.numel() > 5000 and channel.rank == 0:
            tensor = tensor.clone()
            tensor[700] ^= 16
        return start(channel, tensor, *group)

    monkeypatch.setattr(weight_channel.Channel, "_start_broadcast", flip)
    refused(actor, rollout, "rollout rank 0: transfer: 1 corrupt: layer.weight.*rollout rank 1")
    cards_of(monkeypatch, iter(["a/0", "a/1", "b/0"]))
    refused(actor, rollout, "rollout rank 0: transfer: 1 corrupt: layer.weight.*rollout rank 1")


def cards_of(monkeypatch, cards):
    """Ranks believe that these are their cards; sizes of what travels over the group that stands for nccl's."""
    sizes = []

    class Cards:
        def __init__(self, store, rank, size):
            self.rank, self.gloo = rank, dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=20))

        def broadcast(self, tensors, options):
            if self.rank == 0:
                sizes.append(tensors[0].numel())
            return self.gloo.broadcast(tensors, options)

    monkeypatch.setattr(weight_channel, "card_of", lambda device: next(cards))
    monkeypatch.setattr(weight_channel, "group_of_cards", Cards)
    return sizes


def test_buckets_go_from_card_to_card_where_every_rank_has_its_own(actor, rollout, monkeypatch):
    sizes = cards_of(monkeypatch, iter(["a/0", "a/1", "b/0"] * 2))
    for version in range(2):
        train(actor)
        sync_weights(actor, rollout, version, bucket_mb=0.001)
        assert checksums(rollout) == checksums(actor)[:1] * 2
        assert versions(rollout) == [version, version]
    total = sum(p.numel() * p.element_size() for p in actor.workers[0].engine.module.parameters())
    assert len(sizes) > 4
    assert sum(sizes) == 2 * total


@pytest.mark.parametrize("cards", [["a/0", "a/0", "a/1"], ["a/0", "", "a/1"], ["", "a/0", "a/1"], ["", "", ""]])
def test_a_shared_card_or_none_leaves_all_to_gloo(actor, rollout, monkeypatch, cards):
    sizes = cards_of(monkeypatch, iter(cards))
    sync_weights(actor, rollout, 1)
    assert checksums(rollout) == checksums(actor)[:1] * 2
    assert not sizes


def buckets_through(monkeypatch, change):
    """What the sender makes of its buckets of at most 100 bytes is `change` of them."""
    buckets = weight_channel.Channel._buckets

    def changed(channel, tensors, limit):
        return iter(change([(held, payload.clone()) for held, payload in buckets(channel, tensors, 100)]))

    monkeypatch.setattr(weight_channel.Channel, "_buckets", changed)


def test_a_dropped_bucket_is_caught(actor, rollout, monkeypatch):
    buckets_through(monkeypatch, lambda kept: kept[1:])
    refused(actor, rollout, "2 missing: scale, small")


def announced(monkeypatch, change):
    """What the sender says that a bucket holds is `change` of it."""
    announce = weight_channel.Channel._announce
    monkeypatch.setattr(
        weight_channel.Channel,
        "_announce",
        lambda channel, size, held: announce(channel, size, change(held) if held else held),
    )


def test_a_repeated_bucket_is_caught(actor, rollout, monkeypatch):
    announced(monkeypatch, lambda held: held | {"number": max(held["number"] - 1, 0)})
    buckets_through(monkeypatch, lambda kept: [kept[0], *kept])
    refused(actor, rollout, "bucket 0 in the place of bucket 1")


def test_a_bucket_of_another_size_than_announced_is_caught(actor, rollout, monkeypatch):
    def longer(kept):
        held, payload = kept[0]
        return [(held, torch.cat([payload, payload])), *kept[1:]]

    buckets_through(monkeypatch, longer)
    refused(actor, rollout, "2 missing: scale, small.*bucket 0 of 20 bytes, announced as 10")


def test_buckets_stay_within_their_size_and_two_buffers_serve_all():
    channel = weight_channel.Channel.__new__(weight_channel.Channel)
    channel._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
    channel.hashing = Hashing()
    tensors = [(f"w{i}", torch.full((7 * i + 1,), float(i))) for i in range(40)]
    seen, sizes = {}, []
    for held, payload in channel._buckets(iter(tensors), 600):
        sizes.append(len(payload))
        pieces = torch.split(payload, [4 * torch.Size(shape).numel() for _, _, shape, _ in held])
        for (name, _, shape, value), piece in zip(held, pieces, strict=True):
            assert hash_of(piece) == value
            seen[name] = piece.clone().view(torch.float32).reshape(shape)
    assert all(torch.equal(seen[name], tensor) for name, tensor in tensors)
    assert sum(map(len, channel._buffers)) <= 2 * 600
    assert max(size for size in sizes if size not in {4 * (7 * i + 1) for i in range(22, 40)}) <= 600


def test_a_bucket_out_of_turn_is_caught(actor, rollout, monkeypatch):
    announced(monkeypatch, lambda held: held | {"number": 7 if held["number"] == 0 else held["number"]})
    refused(actor, rollout, "bucket 7 in the place of bucket 0")


def test_a_flipped_bit_in_what_a_bucket_is_said_to_hold_is_caught(actor, rollout, monkeypatch):
    start = weight_channel.Channel._start_broadcast

    def flip(channel, tensor, *group):
        if channel.rank == 0 and tensor.dtype == torch.uint8 and b'"layer.bias"' in tensor.numpy().tobytes():
            tensor = tensor.clone()
            tensor[20] ^= 2
        return start(channel, tensor, *group)

    monkeypatch.setattr(weight_channel.Channel, "_start_broadcast", flip)
    refused(actor, rollout, "5 missing: .*transfer: 1 corrupt: what bucket 0 is said to hold")


def test_names_missing_unknown_and_of_another_shape_are_listed(actor, rollout):
    tensors = dict(TiedModel(0).named_parameters())
    tensors["stranger"] = tensors.pop("layer.bias")
    tensors["small"] = torch.zeros(4)
    actor.workers[0].engine.named_full_tensors = lambda on_all_ranks: iter(tensors.items())
    words = r"1 missing: layer.bias; 1 unknown: stranger; 1 of another shape: small \(is \[3\], was sent \[4\]\)"
    refused(actor, rollout, words)


def test_one_rank_that_refuses_keeps_all_versions_from_flipping(actor, rollout):
    rollout.workers[1].engine.module = TiedModel(0, hidden=7)
    refused(actor, rollout, "rollout rank 1: engine: .*embed.weight")
    rollout.workers[1].engine.module = TiedModel(1)
    sync_weights(actor, rollout, 6)
    assert versions(rollout) == [6, 6]


def test_an_engine_that_is_generating_refuses_and_no_one_waits_for_it(actor, rollout):
    def load_weights(tensors):
        raise WeightSyncError("engine: 7 samples are being generated")

    rollout.workers[0].engine.load_weights = load_weights
    start = time.monotonic()
    refused(actor, rollout, "rollout rank 0: engine: 7 samples are being generated")
    assert time.monotonic() - start < 10


def test_an_engine_that_never_joins_is_named(actor, monkeypatch):
    monkeypatch.setattr(weight_channel, "FORM_TIMEOUT", timedelta(seconds=1))
    rollout = Group([Receiver(0, 2)])
    rollout.world_size = 2
    with pytest.raises(WeightSyncError, match="rollout rank 1: not there"):
        sync_weights(actor, rollout, 0)
    assert versions(rollout) == [None]


def test_a_rollout_before_its_first_sync_does_not_generate(tiny_dir):
    rollout = started(RolloutWorker, tiny_config(tiny_dir))
    with pytest.raises(RolloutError, match="no verified weights"):
        rollout.engine.generate([], None)
