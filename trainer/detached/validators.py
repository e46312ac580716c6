"""The makers that generate for a validation, while all of them rest.

They are those with one and the same rollout, the first living maker's: engines differ in their last
bits, and a quantised one in more, so which makers live must not move the metrics of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trainer.detached.config import DetachedConfig
from trainer.detached.losses import MakerLosses
from trainer.detached.maker import Maker
from trainer.groups.worker_groups import WorkerGroups
from trainer.rollouts.samples import concat_rows
from verl_like.batch.protocol import DataProto
from verl_like.calls.future import gather
from verl_like.calls.result import Result
from verl_like.errors import WorkerDiedError


def validators_of(makers: Sequence[Maker], config: DetachedConfig) -> list[Maker]:
    """Those of the makers that would validate now."""
    living = [maker for maker in makers if not maker.has_ended] or [makers[0]]
    first = config.rollout_of(living[0].number)
    return [maker for maker in living if config.rollout_of(maker.number) == first]


def generate_in_parts(groups: WorkerGroups, makers: Sequence[Maker], asked: DataProto) -> DataProto:
    """The samples of these rows, in their order; every maker makes as many as the others."""
    makers = makers[: len(asked)]
    futures = [
        groups[maker.role].generate_sequences.remote(part)
        for maker, part in zip(makers, asked.chunk(len(makers)), strict=True)
    ]
    return concat_rows([Result.of(result).batch for result in gather(*futures)])


def at_once(act: Callable[[Maker], Any], makers: Sequence[Maker]) -> None:
    """`act` on all of them side by side; one that fails does not keep it from the others."""
    with ThreadPoolExecutor(len(makers), "validation") as threads:
        futures = [threads.submit(act, maker) for maker in makers]
    for future in futures:
        future.result()


def replace_lost(makers: Sequence[Maker], losses: MakerLosses, error: WorkerDiedError) -> None:
    """Each of these that has lost a process is started anew, with weights, or ends.

    Raises where the run cannot go on; where it is none of them, the error.
    """
    lost = [maker for maker in makers if not losses.is_alive(maker.number)] or makers[:1]
    for maker in lost:
        death = error
        while maker.replace(death):
            try:
                maker.take_weights()
                break
            except WorkerDiedError as another:
                death = another
