"""The state of roles that have lost a rank, from ranks that live and hold the same.

To be saved before the processes of a lost group are started anew: what is saved goes with the
step's beginning to the next attempt, which loads it (`StepStart.restore`).
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.groups.worker_groups import WorkerGroups
from trainer.run_folder.step_start import REPLICAS, SavedReplicas
from verl_like.calls.future import WorkerFuture
from verl_like.calls.survivors import surviving_answers
from verl_like.errors import CheckpointError, VerlLikeError, WorkerDiedError
from workers.training.manifest import write_manifest

Replicas = Mapping[str, Sequence[Sequence[int]]]
"""Role -> lists of ranks; those of one list hold the role's whole state together."""
LEAST_S = 5.0
"""What ranks that live get to answer, also where their time is over: others have used it up."""
logger = logging.getLogger(__name__)


def save_replicas(
    groups: WorkerGroups, roles: Iterable[str], replicas: Replicas, until: float
) -> SavedReplicas | None:
    """Have the state of these roles written by ranks that live; None where it cannot be had.

    They may finish what they are doing `until` then, as `time.monotonic` has it.
    """
    folder = Path(groups.config.trainer.default_local_dir).resolve() / REPLICAS
    shutil.rmtree(folder, ignore_errors=True)
    ranks: dict[str, Sequence[int]] = {}
    saved = SavedReplicas(folder, ranks)
    try:
        for role in roles:
            ranks[role] = _save(groups[role], replicas[role], folder / role, until)
    except (VerlLikeError, OSError) as error:
        logger.warning("the ranks that live cannot give the state of the lost group: %s", error)
        saved.drop()
        return None
    return saved


def _save(
    group: Any, replicas: Sequence[Sequence[int]], folder: Path, until: float
) -> Sequence[int]:
    """The ranks that have written the state of one role."""
    living = _answers(group.answer_in_turn.remote(), max(until - time.monotonic(), LEAST_S))
    ranks = next((ranks for ranks in replicas if living.keys() >= set(ranks)), None)
    if ranks is None:
        raise CheckpointError(
            f"of {group.name} rank(s) {', '.join(map(str, living)) or 'none'} live, and its whole "
            f"state is on {' or '.join(map(str, replicas))}"
        )
    parts = _answers(group.save_replica.remote(str(folder), list(ranks)))
    missing = [rank for rank in ranks if rank not in parts]
    if missing:
        raise CheckpointError(f"{group.name} has lost rank(s) {missing} while they wrote it")
    write_manifest(folder, [parts[rank] for rank in ranks])
    return ranks


def _answers(future: WorkerFuture, seconds: float | None = None) -> dict[int, Any]:
    """What the ranks that live answer, by rank."""
    try:
        return dict(enumerate(future.get(seconds)))
    except WorkerDiedError:
        return surviving_answers(future, seconds)
