"""Generators wait for room and never start stale samples; the trainer waits for a batch."""

from __future__ import annotations

import random
import re
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.trainer.async_training.stand_ins import begin, finish, make_buffer, may_begin, train
from trainer import load_config
from trainer.async_training.buffer import EndOfSamples, ExperienceBuffer, StalledError
from trainer.async_training.chunks import Demand
from trainer.async_training.recipe import ASYNC
from trainer.async_training.samplers import (
    BatchSampler,
    BufferView,
    SampleChunk,
    SamplerError,
    SelectedBatch,
    chosen,
    select_chunks,
)
from trainer.observers.sample_log import QUEUED, SampleWatch
from trainer.run_folder.accounts import describe_log
from verl_like.batch.protocol import DataProto
from verl_like.errors import SampleLogError


def test_generators_run_ahead_only_as_far_as_staleness_allows() -> None:
    buffer = make_buffer(max_staleness=1)
    for _ in range(2):  # one batch of 4 prompts in chunks of 2
        finish(buffer, begin(buffer))
    assert not may_begin(buffer)
    assert buffer.depth == 4


def test_without_staleness_nothing_is_generated_ahead_of_a_batch() -> None:
    buffer = make_buffer(max_staleness=0)
    assert not may_begin(buffer)

    taken: list[SampleChunk] = []
    trainer = threading.Thread(target=lambda: taken.extend(buffer.take_batch(Demand(4))))
    buffer.join(0)
    trainer.start()
    for _ in range(2):
        finish(buffer, begin(buffer))
    trainer.join(30)
    assert [chunk.uids for chunk in taken] == [["0", "1"], ["2", "3"]]
    assert not may_begin(buffer)


def test_a_generator_with_old_weights_may_generate_less() -> None:
    buffer = make_buffer(max_staleness=1)
    buffer.publish(2)
    assert may_begin(buffer, version=2)
    assert not may_begin(buffer, version=1)


def test_a_full_buffer_that_evicts_keeps_the_newest_samples() -> None:
    buffer = make_buffer(max_staleness=4, max_inflight_samples=4, on_buffer_full="evict_oldest")
    for _ in range(3):
        finish(buffer, begin(buffer))
    assert [chunk.uids for chunk in buffer.chunks.ready] == [["2", "3"], ["4", "5"]]
    assert buffer.log.accounts[0].dropped == {"pushed out of the full buffer": 2}
    buffer.log.check()


def test_another_generator_takes_over_the_chunk_of_a_lost_one() -> None:
    buffer = make_buffer(max_staleness=4)
    lost, other = begin(buffer, generator=0), begin(buffer, generator=1)
    assert buffer.lost(0) == 2
    repeated = begin(buffer, generator=1)
    assert (repeated.uids, repeated.generator) == (["0", "1"], 1)
    assert repeated is lost
    finish(buffer, other)
    finish(buffer, repeated)
    assert [chunk.number for chunk in buffer.take_batch(Demand(4))] == [0, 1]
    assert buffer.log.accounts[0].dropped == {"lost with its generator": 2}
    buffer.log.check()


def test_samples_left_at_the_end_are_no_batch_and_are_reported() -> None:
    buffer = make_buffer(num_batches=1)
    left = [finish(buffer, begin(buffer)), finish(buffer, begin(buffer))]
    with pytest.raises(EndOfSamples, match="the queue has 4 of the 6 samples"):
        buffer.take_batch(Demand(6))
    assert buffer.log.open(QUEUED) == [name for chunk in left for name in chunk.names]
    line = describe_log(buffer.log.state_dict()).splitlines()[1]
    assert line.split() == ["generator", "0", "4", "0", "4", "0", "0"]


def test_a_deadlock_is_an_error_that_says_who_waits_for_what() -> None:
    buffer = make_buffer(max_inflight_samples=2, max_staleness=1, chunk=2)
    generators = threading.Thread(
        target=lambda: [finish(buffer, begin(buffer)), buffer.begin(0, buffer.weights)]
    )
    buffer.join(0)
    generators.start()
    with pytest.raises(StalledError, match=r"waits for 4 samples, 2 samples are queued.*room"):
        buffer.take_batch(Demand(4))
    buffer.close()
    generators.join(30)


def test_a_long_wait_for_a_batch_warns_who_waits_for_what(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.async_training.buffer.CHECK_EVERY_S", 0.02)
    buffer = make_buffer(chunk=4, warn_after_idle_s=0.05)
    buffer.join(0)
    chunk = begin(buffer)
    threading.Timer(0.3, lambda: finish(buffer, chunk)).start()
    with buffer._activity.of("generator 0").busy("generate"):
        buffer.take_batch(Demand(4))
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) > 1  # one after each 0.05 s
    assert all("no batch for" in warning for warning in warnings)
    words = r"trainer has waited .* for samples; generator 0 has been busy .* with generate"
    assert re.search(words, warnings[0])


def test_the_trainer_does_not_wait_without_a_generator() -> None:
    with pytest.raises(StalledError, match="no generator is left"):
        make_buffer().take_batch(Demand(4))


def test_the_trainer_raises_the_error_of_a_generator() -> None:
    buffer = make_buffer()
    buffer.join(0)
    buffer.leave(0, ValueError("no such model"))
    with pytest.raises(ValueError, match="no such model"):
        buffer.take_batch(Demand(4))


def test_a_pause_finishes_open_chunks_and_begins_none() -> None:
    buffer = make_buffer(max_staleness=4)
    buffer.join(0)
    chunk = begin(buffer)
    threading.Timer(0.05, lambda: finish(buffer, chunk)).start()
    with buffer.paused(5):
        assert buffer.in_flight() == []
        generator = threading.Thread(target=lambda: finish(buffer, begin(buffer)))
        generator.start()
        time.sleep(0.05)
        assert buffer.in_flight() == []
    generator.join(30)
    assert buffer.depth == 4


@pytest.mark.parametrize("sampler", ["in_order", "ready_first", "random"])
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_staleness_stays_within_its_bound_with_any_speed(sampler: str, max_staleness: int) -> None:
    buffer = make_buffer(max_staleness=max_staleness, sampler=sampler, samples=1)
    threads = [
        threading.Thread(target=_generate, args=(buffer, generator)) for generator in range(3)
    ]
    for generator, thread in enumerate(threads):
        buffer.join(generator)
        thread.start()
    try:
        seen: list[str] = []
        for version in range(1, 13):
            taken = buffer.take_batch(Demand(4))
            assert all(version - chunk.version <= max_staleness for chunk in taken)
            seen += [uid for chunk in taken for uid in chunk.uids]
            train(buffer, taken, version + 1)
    finally:
        buffer.close()
        for thread in threads:
            thread.join(30)
    assert len(set(seen)) == len(seen) == 12 * 4
    assert sum(account.dropped.total() for account in buffer.log.accounts.values()) == 0
    if sampler == "in_order":
        assert seen == [str(number) for number in range(12 * 4)]


def _generate(buffer: ExperienceBuffer, generator: int) -> None:
    """Generate at uneven speed, taking newer weights as they come."""
    pace = random.Random(generator)
    while not buffer.is_closed:
        chunk = buffer.begin(generator, buffer.weights)
        if chunk is not None:
            time.sleep(pace.random() * 0.004 * (1 + 4 * generator))
            finish(buffer, chunk)


@pytest.mark.parametrize(
    ("max_staleness", "chunk", "num_slow"), [(1, 1, 1), (1, 2, 0), (3, 1, 5), (6, 2, 1)]
)
@pytest.mark.parametrize("sampler", ["in_order", "ready_first", "random"])
def test_every_sampler_trains_on_each_sample_before_it_is_too_old(
    sampler: str, max_staleness: int, chunk: int, num_slow: int
) -> None:
    buffer = make_buffer(max_staleness=max_staleness, sampler=sampler, chunk=chunk)
    buffer.join(0)
    slow: list[SampleChunk] = []
    for version in range(1, 30):
        buffer._demand = Demand(4)  # as generators see it while the trainer waits
        while may_begin(buffer):
            begun = begin(buffer)
            if len(slow) < num_slow and version == 1:
                slow.append(begun)
            else:
                finish(buffer, begun)
        facts = (buffer._demand, buffer.version, buffer._num_taken)
        while slow and not chosen(buffer._sampler, next(buffer.chunks.views(*facts))).selected:
            finish(buffer, slow.pop())
        taken = buffer.take_batch(Demand(4))
        assert max(version - old.version for old in taken) <= max_staleness
        train(buffer, taken, version + 1)
    assert not slow


def test_the_second_batch_of_a_version_takes_the_rest_of_its_samples() -> None:
    buffer = make_buffer(max_staleness=0, update_steps=2, sampler="random", chunk=1)
    buffer._demand = Demand(4, samples_left_in_version=4)
    chunks = [begin(buffer) for _ in range(8)]
    assert not may_begin(buffer)
    for chunk in chunks[1:]:
        finish(buffer, chunk)
    # does not wait for the first chunk, which is in generation
    first = buffer.take_batch(Demand(4, samples_left_in_version=4))
    finish(buffer, chunks[0])
    second = buffer.take_batch(Demand(4))
    assert sorted(chunk.number for chunk in first + second) == list(range(8))


class NewestAtFirst(BatchSampler):
    """Samples the newest first, and old samples too late."""

    def choose(self, view: BufferView) -> SelectedBatch:
        newest = sorted(view.ready, key=lambda chunk: chunk.version, reverse=view.version < 3)
        return SelectedBatch(select_chunks(newest, view.num_samples))


class HalfABatch(BatchSampler):
    """Takes too few samples."""

    def choose(self, view: BufferView) -> SelectedBatch:
        return SelectedBatch(select_chunks(view.ready, view.num_samples // 2))


def test_a_user_sampler_that_leaves_samples_too_long_ends_the_run() -> None:
    buffer = make_buffer(max_staleness=1, sampler=f"{__name__}.NewestAtFirst")
    buffer.join(0)
    for version in (1, 2, 3):
        buffer._demand = Demand(4)
        while may_begin(buffer):
            finish(buffer, begin(buffer))
        if version < 3:
            train(buffer, buffer.take_batch(Demand(4)), version + 1)
    words = "NewestAtFirst selected samples of version 1 for the update of version 3.*staleness=1"
    with pytest.raises(SamplerError, match=words):
        buffer.take_batch(Demand(4))


def test_a_user_sampler_that_takes_less_than_a_batch_ends_the_run() -> None:
    buffer = make_buffer(sampler=f"{__name__}.HalfABatch")
    buffer.join(0)
    while may_begin(buffer):
        finish(buffer, begin(buffer))
    with pytest.raises(SamplerError, match="HalfABatch selected 2 samples for a batch of 4"):
        buffer.take_batch(Demand(4))


def test_generators_of_one_rank_leave_room_for_those_of_another() -> None:
    apart = {"generators": 2, "trainers": 2, "sample_routes": [[0, 0], [1, 1]]}
    buffer = make_buffer(max_staleness=1, sampler="random", chunk=1, **apart)
    for _ in range(2):  # the two of each rank that a batch of four has
        finish(buffer, begin(buffer, generator=0))
    assert not may_begin(buffer, generator=0)
    assert may_begin(buffer, generator=1)


def test_samples_outside_the_version_window_are_replaced() -> None:
    buffer = make_buffer(max_staleness=3, sampler="version_window", drop_older_than=1)
    old = finish(buffer, begin(buffer))
    buffer.publish(3)
    young = [finish(buffer, begin(buffer)) for _ in range(2)]
    assert buffer.take_batch(Demand(4)) == young
    assert buffer.log.accounts[0].dropped == {"older than 1 versions": old.num_samples}


def test_random_batches_depend_on_the_seed_and_repeat_no_sample() -> None:
    def drawn() -> list[list[int]]:
        buffer = make_buffer(max_staleness=5, sampler="random")
        for _ in range(8):
            finish(buffer, begin(buffer))
        return [[chunk.number for chunk in buffer.take_batch(Demand(4))] for _ in range(4)]

    first = drawn()
    assert first == drawn()
    assert sorted(number for batch in first for number in batch) == list(range(8))
    assert first != [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_group_that_contradicts_the_log_is_named() -> None:
    buffer = make_buffer(max_staleness=4)
    finish(buffer, begin(buffer))
    begin(buffer)
    buffer.check()
    lost = buffer.chunks.ready.pop()
    words = r"disagree about which groups are queued: \['0', '1'\]"
    with pytest.raises(SampleLogError, match=words):
        buffer.check()
    buffer.chunks.ready.append(lost)
    buffer.chunks.in_flight.clear()
    with pytest.raises(SampleLogError, match=r"groups are in flight: \['2', '3'\]"):
        buffer.check()


def test_a_resumed_buffer_regenerates_open_chunks() -> None:
    state = buffer_of_three_chunks().state_dict()
    resumed = make_buffer(max_staleness=4)
    resumed.load_state_dict(state, None)
    assert [begin(resumed).uids[0] for _ in range(4)] == ["0", "2", "4", "6"]
    assert resumed.log.accounts[0].dropped == {"repeated after a resume": 6}
    resumed.log.check()


def test_a_resumed_buffer_can_restore_queued_chunks(tmp_path: Path) -> None:
    saved = buffer_of_three_chunks()
    state = saved.state_dict()
    saved.write_samples(tmp_path)
    resumed = make_buffer(max_staleness=4, on_resume="restore")
    resumed.load_state_dict(state, tmp_path)
    assert [begin(resumed).uids[0] for _ in range(2)] == ["2", "6"]
    assert resumed.depth == 4
    assert resumed.log.accounts[0].dropped == {"repeated after a resume": 2}
    resumed.log.check()


def buffer_of_three_chunks() -> ExperienceBuffer:
    """A buffer with chunks 0 and 2 queued, and chunk 1 in flight."""
    buffer = make_buffer(max_staleness=4, on_resume="restore")
    chunks = [begin(buffer) for _ in range(3)]
    finish(buffer, chunks[0])
    finish(buffer, chunks[2])
    return buffer


def test_generators_with_the_rollout_of_the_first_living_one_validate() -> None:
    needed = ("data.train_files=x", "actor_rollout_ref.model.path=y", "async_training.generators=4")
    others = (f"async_training.generator_settings.{n}" for n in ("1={name: hf}", "2={name: auto}"))
    config = load_config([*needed, *others], ASYNC)

    assert config.rollout_of(2).name == "native"
    assert config.validators([0, 1, 2, 3]) == [0, 2, 3]
    assert config.validators([1, 2, 3]) == [1]
    assert config.validators([2, 3]) == [2, 3]


def generate_share(buffer: ExperienceBuffer, generator: int) -> None:
    share = buffer.begin(generator, buffer.weights)
    assert share is not None
    share.samples = share.rows
    buffer.put(share)


def test_rows_of_a_lost_generator_are_validated_by_another() -> None:
    buffer = make_buffer()
    for generator in (0, 1):
        buffer.join(generator)
    numbers: list[int] = []

    def validate() -> None:
        prompts = DataProto.from_dict({"input_ids": torch.arange(4)[:, None]})
        samples = buffer.validate(prompts, [0, 1])
        numbers.extend(samples.batch["input_ids"].flatten().tolist())

    thread = threading.Thread(target=validate)
    with buffer.paused(5):
        thread.start()
        lost = buffer.begin(0, buffer.weights)
        assert lost is not None
        assert (lost.generator, len(lost.rows or [])) == (0, 2)
        assert buffer.lost(0) == 2
        generate_share(buffer, 1)
        assert buffer.begin(1, buffer.weights, waits=False) is None, "generator 0 may be restarted"
        buffer.leave(0)
        generate_share(buffer, 1)
        thread.join(30)
    assert numbers == [0, 1, 2, 3]
    assert not buffer.log.accounts


def test_weights_published_again_count_as_newer() -> None:
    buffer = make_buffer()
    version = buffer.weights
    buffer.publish(buffer.version)
    assert buffer.weights > version
    assert buffer.begin(0, version) is None, "the generator takes the new weights first"


def test_the_queue_goes_on_while_the_sample_log_reads_a_batch() -> None:
    """A generator waits neither for the log's reading of the trainer's batch nor for its lock."""
    buffer, depths = make_buffer(), list[int]()

    class Read:
        @property
        def non_tensor_batch(self) -> dict[str, object]:
            """Let a generator's thread use the buffer in the middle of the reading."""
            generator = threading.Thread(target=lambda: depths.append(buffer.depth), daemon=True)
            generator.start()
            generator.join(5)
            return {}

    watch = SampleWatch()
    watch.log, watch._samples = buffer.log, dict.fromkeys(begin(buffer).names)
    watch.on_filter(None, "mine", Read(), Read())  # type: ignore[arg-type]
    assert depths == [0]
