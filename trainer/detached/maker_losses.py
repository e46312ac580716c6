"""Lost makers: `detached.on_maker_loss` says whether a run ends, goes on, or restarts the maker."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from trainer.detached.buffer import ExperienceBuffer
from trainer.detached.config import DetachedConfig
from trainer.detached.topology import maker_role
from trainer.loop import ToldToStop
from trainer.record import Run
from trainer.restarts import LOOK_AGAIN_S, wait_for_room
from verl_like.errors import NoRoomError, PlacementError, RolloutError, WorkerDiedError
from verl_like.placement.roles import expand_roles

MOST_RESTARTS = 3
"""The most restarts of one maker per version of the weights; more would not help."""
logger = logging.getLogger(__name__)


class MakerLosses:
    """Handles the loss of a maker as `detached.on_maker_loss` says; restarts makers."""

    def __init__(
        self, run: Run, buffer: ExperienceBuffer, init_arguments: Callable[[str], dict[str, Any]]
    ) -> None:
        """While the run stops or is over, it waits for no node."""
        self._config: DetachedConfig = run.config  # type: ignore[assignment]
        self._run, self._groups, self._buffer = run, run.groups, buffer
        self._init_arguments = init_arguments
        self._pools = expand_roles(self._config.role_mapping)
        self._restarts: Counter[tuple[int, int]] = Counter()
        self._gone: set[int] = set()

    def __call__(self, maker: int, error: WorkerDiedError, num_lost: int) -> bool:
        """Return whether this maker goes on; raise where the run cannot."""
        if self._is_alive(maker):  # then a trainer died while it sent weights
            raise error
        policy, now = self._config.detached.on_maker_loss, (maker, self._buffer.version)
        what = f"maker {maker} is lost with {num_lost} samples that it was generating"
        if policy == "restart" and self._restarts[now] < MOST_RESTARTS:
            self._restarts[now] += 1
            logger.warning("%s: it is restarted. %s", what, error)
            return self._comes_back(maker, error)

        without = self._ranks_without(maker)
        if policy == "continue" and not without:
            logger.warning("%s: the other makers take them over. %s", what, error)
            return False
        way_out = {
            "fail": "detached.on_maker_loss=restart or continue would let the run go on.",
            "restart": f"It was restarted {self._restarts[now]} times with version {now[1]}.",
            "continue": f"No maker is left for trainer rank {', '.join(map(str, without))}.",
        }
        raise RolloutError(f"{what}: {error} {way_out[policy]}") from error

    def _is_alive(self, maker: int) -> bool:
        try:
            self._groups[maker_role(maker)].ping()
        except WorkerDiedError:
            return False
        return True

    def _comes_back(self, maker: int, error: WorkerDiedError) -> bool:
        """Restart the maker if it may be. A run that stops lets other makers end the step."""
        pool = self._pools[maker_role(maker)]
        restart = partial(self._groups.restart, pool)
        try:
            wait_for_room(
                restart, self._config, f"maker {maker}", time.monotonic(), self._look_again
            )
            for role, its_pool in self._pools.items():
                if its_pool == pool:
                    self._groups[role].init_model(**self._init_arguments(role))
        except WorkerDiedError as again:
            return self(maker, again, num_lost=0)
        except ToldToStop:
            if self._ranks_without(maker):
                raise
            return False
        except NoRoomError:
            raise
        except PlacementError as problem:
            error.add_note(str(problem))
            raise error from None
        return True

    def _look_again(self) -> None:
        if self._run.stop.received or self._buffer.is_closed:
            raise ToldToStop("a node to replace a maker's")
        time.sleep(LOOK_AGAIN_S)

    def _ranks_without(self, maker: int) -> list[int]:
        """The trainer ranks without a maker, now that this maker is gone, too."""
        self._gone.add(maker)
        topology = self._config.topology
        ranks = range(topology.trainers)
        return [rank for rank in ranks if self._gone >= set(topology.makers_of(rank))]
