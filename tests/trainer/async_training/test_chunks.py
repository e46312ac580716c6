"""Prompts go out in order, each once, to generators that have room."""

from __future__ import annotations

from typing import Any

from tests.trainer.async_training.stand_ins import NumberedPrompts, config_of
from trainer.async_training.chunks import ChunkStream
from trainer.async_training.samplers import SampleChunk


def stream_of(prompts: NumberedPrompts, **settings: Any) -> ChunkStream:
    """Return a stream of chunks of two prompts."""
    return ChunkStream(config_of(**settings), prompts)


def uids(stream: ChunkStream, chunk: SampleChunk) -> list[str]:
    stream.rows(chunk)
    return chunk.uids


def next_of(stream: ChunkStream, generator: int = 0) -> SampleChunk:
    chunk = stream.offer(generator)
    assert chunk is not None
    stream.waiting.remove(chunk)
    return chunk


def test_a_batch_is_cut_in_the_order_of_its_prompts() -> None:
    stream = stream_of(NumberedPrompts(5), samples=3)
    chunks = [next_of(stream) for _ in range(4)]
    assert [uids(stream, chunk) for chunk in chunks] == [["0", "1"], ["2", "3"], ["4"], ["5", "6"]]
    assert [chunk.num_samples for chunk in chunks] == [6, 6, 3, 6]


def test_a_chunk_has_a_row_for_each_sample_of_its_prompts() -> None:
    stream = stream_of(NumberedPrompts(), samples=3)
    rows = stream.rows(next_of(stream))
    assert rows.non_tensor_batch["uid"].tolist() == ["0"] * 3 + ["1"] * 3


def test_a_chunk_handed_back_is_the_next_to_go_out() -> None:
    stream = stream_of(NumberedPrompts(), samples=1)
    first, second = next_of(stream), next_of(stream)
    stream.hand_back([second, first])
    assert [next_of(stream), next_of(stream)] == [first, second]
    assert next_of(stream).number == 2


def test_generators_of_one_rank_get_its_part_of_every_batch() -> None:
    apart = {"generators": 2, "trainers": 2, "sample_routes": [[0, 0], [1, 1]]}
    stream = stream_of(NumberedPrompts(4), **apart)
    of_rank_1 = [next_of(stream, generator=1) for _ in range(2)]
    assert [uids(stream, chunk) for chunk in of_rank_1] == [["2", "3"], ["6", "7"]]
    assert [chunk.rank for chunk in stream.waiting] == [0, 0]
    assert uids(stream, next_of(stream, generator=0)) == ["0", "1"]


def test_prompts_that_end_give_nothing_more() -> None:
    stream = stream_of(NumberedPrompts(2, num_batches=1), samples=1)
    assert uids(stream, next_of(stream)) == ["0", "1"]
    assert stream.has_ended
    assert stream.offer(0) is None


def test_a_resumed_stream_goes_on_with_what_was_open_first() -> None:
    stream = stream_of(NumberedPrompts(4), samples=1)
    chunks = [next_of(stream) for _ in range(3)]
    state = stream.state_dict([chunks[2], chunks[0]])

    resumed = stream_of(NumberedPrompts(4), samples=1)
    resumed.load_state_dict(state)
    assert [next_of(resumed).number for _ in range(4)] == [0, 2, 3, 4]
