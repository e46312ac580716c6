"""The proof of a save: shards that lack or repeat an element are never a checkpoint."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.workers.kept_ranks import run_kept
from tests.workers.samples import started, tiny_config
from verl_like.errors import CheckpointError
from workers.config import ParallelConfig
from workers.roles.actor import ActorWorker
from workers.training.checkpoints import shards
from workers.training.checkpoints.coverage import Box, check_coverage, is_partition


def grid(shape: tuple[int, ...], cuts: random.Random) -> list[Box]:
    """Return the boxes of a random grid."""
    along = []
    for size in shape:
        ends = sorted({*cuts.sample(range(1, size + 1), cuts.randint(0, size)), size})
        along.append(list(zip([0, *ends], ends, strict=False)))
    return list(itertools.product(*along))


def counts(boxes: list[Box], shape: tuple[int, ...]) -> Tensor:
    """Return how often the boxes cover each element."""
    counts = torch.zeros(shape)
    for box in boxes:
        counts[tuple(slice(begin, end) for begin, end in box)] += 1
    return counts


@pytest.mark.parametrize("seed", range(8))
def test_only_boxes_that_cover_each_element_once_are_a_partition(seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(50):
        shape = tuple(generator.randint(1, 5) for _ in range(generator.randint(0, 3)))
        boxes = grid(shape, generator)
        generator.shuffle(boxes)
        assert counts(boxes, shape).eq(1).all()
        assert is_partition(boxes, shape)
        changed = boxes[1:] if generator.random() < 0.3 else [*boxes, generator.choice(boxes)]
        if shape and generator.random() < 0.5:  # one box moves, so that the volume stays
            place, dim = generator.randrange(len(boxes)), generator.randrange(len(shape))
            moved = list(boxes[place])
            moved[dim] = moved[dim][0] + 1, moved[dim][1] + 1
            changed = [*boxes[:place], tuple(moved), *boxes[place + 1 :]]
        assert not is_partition(changed, shape)


def test_a_tensor_that_no_rank_writes_is_named() -> None:
    of_ranks = [{"a": ((2,), [((0, 2),)]), "b": ((3,), [])}, {"b": ((3,), [])}]
    message = r"1 of 2 tensors, such as b \[3\], of which no rank would be written"
    with pytest.raises(CheckpointError, match=message):
        check_coverage(of_ranks, "the checkpoint x was not written")


def save_twice(folder: Path, one_layer_dir: Path) -> str:
    """Save, then save with ranks that all write their copies; return the error."""
    actor = started(ActorWorker, tiny_config(one_layer_dir, ParallelConfig(tp=2)), 10)
    actor.save_checkpoint(str(folder), 1)
    shards.is_first_replica = lambda *_: True
    with pytest.raises(CheckpointError) as error:
        actor.save_checkpoint(str(folder), 2)
    return str(error.value)


def test_a_save_whose_ranks_repeat_a_shard_leaves_the_earlier_checkpoint(
    one_layer_dir: Path, tmp_path: Path
) -> None:
    for message in run_kept(2, save_twice, tmp_path / "actor", one_layer_dir):
        assert "(an earlier one is untouched): its files would lack or repeat elements" in message
        assert "norm.weight [64], of which rank 0 [0:64], rank 1 [0:64] would be" in message
    assert json.loads((tmp_path / "actor" / "manifest.json").read_text())["step"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["actor"]
