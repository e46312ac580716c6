"""Proof that the shards of all ranks cover each tensor of a checkpoint exactly once.

It needs only the places of the shards in their tensors, so a save proves it before anything reads
its files: before the checkpoint is committed, and before an older one is removed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from verl_like.errors import CheckpointError

Box = tuple[tuple[int, int], ...]
"""The begin and end of a shard along each dimension of its tensor."""
Shards = dict[str, tuple[tuple[int, ...], list[Box]]]
"""Name -> the shape of the whole tensor, and the shards that a rank writes, which may be none."""


def check_coverage(of_ranks: Sequence[Shards], subject: str) -> None:
    """Raise unless the shards of all ranks together are each tensor, once."""
    writers: dict[str, list[tuple[int, Box]]] = defaultdict(list)
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, shards in enumerate(of_ranks):
        for name, (shape, boxes) in shards.items():
            shapes[name] = shape
            writers[name] += [(rank, box) for box in boxes]

    wrong = [
        name
        for name, shape in shapes.items()
        if not is_partition([b for _, b in writers[name]], shape)
    ]
    if wrong:
        name = wrong[0]
        places = [f"rank {rank} {_text(box)}" for rank, box in writers[name]]
        raise CheckpointError(
            f"{subject}: its files would lack or repeat elements in {len(wrong)} of {len(shapes)} "
            f"tensors, such as {name} {list(shapes[name])}, of which "
            f"{', '.join(places[:8]) or 'no rank'} would be written. This is a bug in verl_like: "
            "please report this text and the section `parallel`. Until it is fixed, train with "
            "strategy=fsdp and without tp, sp, pp and ep."
        )


def is_partition(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """True if the boxes cover each element of a tensor of this shape once.

    Boxes must form a grid: those with the same span along a dimension cover it together.
    """
    if any(len(box) != len(shape) for box in boxes):
        return False
    if not shape:
        return len(boxes) == 1
    by_span: dict[tuple[int, int], list[Box]] = defaultdict(list)
    for span, *others in boxes:
        by_span[span].append(tuple(others))
    covered = 0
    for begin, end in sorted(by_span):
        if begin != covered:
            return False
        covered = end
    return covered == shape[0] and all(is_partition(rest, shape[1:]) for rest in by_span.values())


def _text(box: Box) -> str:
    return f"[{', '.join(f'{begin}:{end}' for begin, end in box)}]"
