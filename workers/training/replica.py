"""A role's state from ranks that live, when others of its group are gone.

Under ddp every rank holds all weights and moments; with `fsdp_size` below the number of ranks, so
does every group of so many. Such ranks are a replica. The driver calls:

    parts = group.save_replica(folder, ranks)    # no collective: the others would not come
    write_manifest(folder, parts)                # over the files of all these ranks
    new_group.load_checkpoint(folder)            # as one that another number of ranks has written

It is the state of the last finished step only where the role has not begun to learn since.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

from verl_like.calls.dispatch import Dispatch, register
from verl_like.errors import CheckpointError
from verl_like.files import fingerprint
from verl_like.process.random_state import random_state_text
from workers.training.checkpoint import Checkpointed, manifest_of, saved_tensors
from workers.training.shards import own_piece, write_pieces

if TYPE_CHECKING:
    from workers.training.average import WeightAverage
    from workers.training.engine import TrainEngine

CONTENTS = ["model", "optimizer", "extra"]
"""Whatever `checkpoint.save_contents` leaves out: the run is to go on as if nothing had happened.
"""


class SavesReplica(Checkpointed):
    """Adds it to a worker that calls `note_random_state` when its model is built."""

    _random_state = ""

    def note_random_state(self) -> None:
        """From here on a role that draws no random numbers has this state on every rank."""
        self._random_state = random_state_text()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, keeps_state=True)
    def save_replica(self, path: str, ranks: Sequence[int]) -> dict[str, Any] | None:
        """Write what this rank holds of the replica `ranks`; gives its part of the manifest.

        Other ranks do nothing. A role that draws random numbers while it learns is refused: those
        of the lost rank are not known.
        """
        if self.rank not in ranks:
            return None
        if random_state_text() != self._random_state:
            raise CheckpointError(
                f"{self.role} draws random numbers while it learns (dropout does), and where a "
                "lost rank stood in them is lost with it"
            )
        return _save_part(self.engine, Path(path), self.rank, ranks, self.average)


def _save_part(
    engine: TrainEngine,
    folder: Path,
    rank: int,
    ranks: Sequence[int],
    average: WeightAverage | None,
) -> dict[str, Any]:
    """This rank's shards; what is whole on every rank is written by the first of `ranks`."""
    tensors = saved_tensors(engine, CONTENTS, average)
    pieces = {}
    for name, tensor in tensors.items():
        piece = own_piece(tensor)
        is_mine = isinstance(tensor, DTensor) or rank == ranks[0]
        if is_mine and piece.values.numel():
            pieces[name] = piece

    path = folder / "shards" / f"{rank}.safetensors"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_pieces(pieces, path)
        files = {path.relative_to(folder).as_posix(): fingerprint(path)}
    except OSError as error:
        raise CheckpointError(f"rank {rank} cannot write {path}: {error}") from error
    steps = engine.scheduler.num_steps
    return manifest_of(engine, steps, len(ranks), CONTENTS, tensors, files)
