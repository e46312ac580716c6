"""Which generators generate for a validation, and that all of them do."""

from __future__ import annotations

import threading

import torch

from tests.trainer.async_training.stand_ins import make_buffer
from trainer import load_config
from trainer.async_training.buffer import ExperienceBuffer
from trainer.async_training.recipe import ASYNC
from verl_like.batch.protocol import DataProto


def test_every_generator_with_the_rollout_of_the_first_one_that_lives_validates() -> None:
    needed = ("data.train_files=x", "actor_rollout_ref.model.path=y", "async_training.generators=4")
    config = load_config([*needed, "async_training.generator_settings.1={name: hf}"], ASYNC)

    assert config.validators([0, 1, 2, 3]) == [0, 2, 3]
    assert config.validators([1, 2, 3]) == [1]
    assert config.validators([2, 3]) == [2, 3]


def rows(num: int) -> DataProto:
    return DataProto.from_dict({"input_ids": torch.arange(num)[:, None]})


def validated_by(
    buffer: ExperienceBuffer, generators: list[int]
) -> tuple[threading.Thread, list[int]]:
    """Return a thread that validates, and the numbers of the rows whose samples it got."""
    found: list[int] = []

    def validate() -> None:
        with buffer.paused(5):
            samples = buffer.validate(rows(4), generators)
            found.extend(samples.batch["input_ids"].flatten().tolist())

    thread = threading.Thread(target=validate)
    thread.start()
    return thread, found


def make_part(buffer: ExperienceBuffer, generator: int) -> None:
    part = buffer.begin(generator, buffer.weights)
    assert part is not None
    part.samples = part.rows
    buffer.put(part)


def test_a_part_is_the_generators_own_while_it_lives_and_anyones_then() -> None:
    buffer = make_buffer()
    for generator in (0, 1):
        buffer.join(generator)
    thread, found = validated_by(buffer, [0, 1])
    lost = buffer.begin(0, buffer.weights)
    assert lost is not None
    assert (lost.generator, len(lost.rows or [])) == (0, 2)
    assert buffer.lost(0) == 2
    make_part(buffer, 1)
    assert buffer.begin(1, buffer.weights, waits=False) is None, "generator 0 may be started anew"
    buffer.leave(0)
    make_part(buffer, 1)
    thread.join(30)
    assert found == [0, 1, 2, 3]
    assert not buffer.log.accounts


def test_weights_of_the_same_version_are_newer_ones() -> None:
    buffer = make_buffer()
    held = buffer.weights
    buffer.publish(buffer.version)
    assert buffer.weights > held
    assert buffer.begin(0, held) is None, "it takes them first"
