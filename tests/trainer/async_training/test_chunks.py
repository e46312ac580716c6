"""Prompts go out in order, each once; later epochs of a round train in other orders."""

from __future__ import annotations

from typing import Any

from tests.trainer.async_training.stand_ins import NumberedPrompts, config_of
from trainer.async_training.chunks import Chunks, Rounds
from trainer.async_training.samplers import SampleChunk


def stream_of(prompts: NumberedPrompts, **settings: Any) -> Chunks:
    """Return a stream of chunks of two prompts."""
    return Chunks(config_of(**settings), prompts)


def uids(stream: Chunks, chunk: SampleChunk) -> list[str]:
    stream.rows(chunk)
    return chunk.uids


def next_of(stream: Chunks, generator: int = 0) -> SampleChunk:
    chunk = stream.offer(generator)
    assert chunk is not None
    stream.waiting.remove(chunk)
    return chunk


def test_chunks_follow_the_order_of_prompts() -> None:
    stream = stream_of(NumberedPrompts(5), samples=3)
    chunks = [next_of(stream) for _ in range(4)]
    assert [uids(stream, chunk) for chunk in chunks] == [["0", "1"], ["2", "3"], ["4"], ["5", "6"]]
    assert [chunk.num_samples for chunk in chunks] == [6, 6, 3, 6]


def test_a_chunk_has_a_row_for_each_sample_of_its_prompts() -> None:
    stream = stream_of(NumberedPrompts(), samples=3)
    rows = stream.rows(next_of(stream))
    assert rows.non_tensor_batch["uid"].tolist() == ["0"] * 3 + ["1"] * 3


def test_generators_of_one_rank_get_its_share_of_every_batch() -> None:
    apart = {"generators": 2, "trainers": 2, "sample_routes": [[0, 0], [1, 1]]}
    stream = stream_of(NumberedPrompts(4), **apart)
    of_rank_1 = [next_of(stream, generator=1) for _ in range(2)]
    assert [uids(stream, chunk) for chunk in of_rank_1] == [["2", "3"], ["6", "7"]]
    assert [chunk.rank for chunk in stream.waiting] == [0, 0]
    assert uids(stream, next_of(stream, generator=0)) == ["0", "1"]


def test_every_batch_of_a_round_is_trained_on_as_often_as_there_are_epochs() -> None:
    rounds = Rounds(update_steps=4, train_epochs=3, seed=7)
    seen: dict[int, list[int]] = {}
    for step in range(1, 13):
        number, epoch, place = rounds.place(step)
        assert number == 0
        seen.setdefault(epoch, []).append(rounds.order(number, epoch)[place])
    assert seen[0] == [0, 1, 2, 3]
    assert sorted(seen[1]) == sorted(seen[2]) == [0, 1, 2, 3]
    assert seen == {e: [Rounds(4, 3, 7).order(0, e)[p] for p in range(4)] for e in range(3)}


def test_orders_differ_between_epochs_and_rounds() -> None:
    rounds = Rounds(update_steps=8, train_epochs=3, seed=7)
    assert len({tuple(rounds.order(number, epoch)) for number in (0, 1) for epoch in (1, 2)}) == 4
