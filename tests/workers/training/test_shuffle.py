"""Shuffled mini-batches in every pass: on any number of ranks, and after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.workers.kept_ranks import run_kept
from tests.workers.samples import learned, make_batch, own_chunk, started, tiny_config
from trainer.ppo.sampling import balance_ranks
from verl_like.batch.protocol import DataProto
from verl_like.batch.split import split_rows
from verl_like.errors import BatchError, MissingColumnError
from workers.columns import write_columns
from workers.roles.actor import ActorWorker
from workers.training.microbatch import Rows, mini_batch
from workers.training.update import SAMPLE_NUMBER, epoch_rows

NAMES = ("responses", "response_mask", "attention_mask", SAMPLE_NUMBER)
ROWS = 12


def numbered(num_rows: int = ROWS, seed: int = 0) -> DataProto:
    return write_columns(make_batch(num_rows, seed), sample_number=torch.arange(num_rows))


def mini_batches(
    batch: DataProto, world_size: int, seed: int | None = 7, call: int = 0
) -> list[set[int]]:
    """Return the sample numbers of every mini-batch of two passes, over all ranks."""
    numbers: list[set[int]] = [set() for _ in range(6)]
    for chunk in split_rows(batch, world_size):
        rows = Rows.from_batch(chunk, NAMES, world_size)
        for epoch, ordered in enumerate(epoch_rows(rows, 2, seed, call)):
            for index in range(3):
                chosen = mini_batch(ordered, index, 3, None).columns[SAMPLE_NUMBER]
                numbers[3 * epoch + index] |= set(chosen.tolist())
    return numbers


def test_a_pass_has_every_sample_once_in_mini_batches_of_equal_size() -> None:
    batches = mini_batches(numbered(), 1)
    assert [len(numbers) for numbers in batches] == [4] * 6
    assert set.union(*batches[:3]) == set.union(*batches[3:]) == set(range(ROWS))


def test_passes_updates_and_seeds_have_different_mini_batches() -> None:
    batches = mini_batches(numbered(), 1)
    assert batches[:3] != batches[3:]
    assert mini_batches(numbered(), 1, call=1) != batches
    assert mini_batches(numbered(), 1, seed=8) != batches
    assert mini_batches(numbered(), 1) == batches


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_ranks_balanced_by_tokens_have_the_same_mini_batches(world_size: int) -> None:
    lengths = make_batch(ROWS).batch["attention_mask"].sum(-1)
    sorted_rows = make_batch(ROWS).select_idxs(lengths.argsort())
    rows = write_columns(sorted_rows, sample_number=torch.arange(ROWS))
    batch, _ = balance_ranks(rows, world_size, 2)
    if world_size < 5:  # five ranks do not divide twelve rows, which keep their order
        assert batch.batch[SAMPLE_NUMBER].tolist() != list(range(ROWS))
    assert mini_batches(batch, world_size) == mini_batches(rows, 1)


def test_samples_removed_after_the_numbering_are_rejected() -> None:
    rows = Rows.from_batch(numbered().select_idxs([0, 2, 11]), NAMES)
    with pytest.raises(BatchError, match="sample_number 11 in a batch of 3 samples"):
        list(epoch_rows(rows, 1, 7, 0))


def actor_of(one_layer_dir: Path) -> ActorWorker:
    config = tiny_config(one_layer_dir, ppo_mini_batch_size=2, ppo_epochs=2, shuffle=True)
    return started(ActorWorker, config, 10)


def update(actor: ActorWorker, seed: int) -> dict[str, float]:
    return learned(actor.update_actor(own_chunk(numbered(4, seed), actor.rank, actor.world_size)))


def two_updates(one_layer_dir: Path) -> list[dict[str, float]]:
    actor = actor_of(one_layer_dir)
    return [update(actor, seed) for seed in range(2)]


def test_two_ranks_train_as_one(one_layer_dir: Path) -> None:
    one_rank = two_updates(one_layer_dir)
    for result in run_kept(2, two_updates, one_layer_dir):
        for metrics, expected in zip(result, one_rank, strict=True):
            assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_resumed_actor_continues_the_orders_bit_for_bit(
    one_layer_dir: Path, tmp_path: Path
) -> None:
    first, second = actor_of(one_layer_dir), actor_of(one_layer_dir)
    update(first, 0)
    first.save_checkpoint(str(tmp_path / "actor"))
    second.load_checkpoint(str(tmp_path / "actor"))
    assert update(second, 1) == update(first, 1)
    assert second.weights_checksum() == first.weights_checksum()


def test_a_batch_without_sample_numbers_names_their_writer(one_layer_dir: Path) -> None:
    with pytest.raises(MissingColumnError, match=r"sample_number.*the driver's balance"):
        actor_of(one_layer_dir).update_actor(make_batch(4))
