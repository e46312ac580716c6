"""Which generators generate for a validation, and that all of them do."""

from __future__ import annotations

import threading

import torch

from tests.trainer.async_training.stand_ins import make_buffer
from trainer import load_config
from trainer.async_training.buffer import ExperienceBuffer
from trainer.async_training.recipe import ASYNC
from verl_like.batch.protocol import DataProto


def test_generators_with_the_rollout_of_the_first_living_one_validate() -> None:
    needed = ("data.train_files=x", "actor_rollout_ref.model.path=y", "async_training.generators=4")
    config = load_config([*needed, "async_training.generator_settings.1={name: hf}"], ASYNC)

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
