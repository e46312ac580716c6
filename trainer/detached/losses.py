"""What becomes of a run whose maker has lost a process: `detached.on_maker_loss`.

Called in the maker's thread, when the buffer has been told to have the lost prompts made again. A
maker whose node is lost waits for another one as the other groups of a run do
(`trainer.restarts.wait_for_room`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from trainer.detached.config import DetachedConfig
from trainer.detached.endings import ToldToStop
from trainer.detached.topology import Topology, maker_role
from trainer.groups.worker_groups import WorkerGroups
from trainer.restarts import LOOK_AGAIN_S, wait_for_room
from verl_like.errors import NoRoomError, PlacementError, RolloutError, WorkerDiedError
from verl_like.placement.roles import expand_roles

logger = logging.getLogger(__name__)
MOST_RESTARTS = 3
"""Of one maker: what dies every time has a reason that a restart does not mend."""


class MakerLosses:
    """Decides, and restarts."""

    def __init__(
        self,
        config: DetachedConfig,
        groups: WorkerGroups,
        topology: Topology,
        init_arguments: Callable[[str], dict[str, Any]],
        is_ending: Callable[[], bool],
    ) -> None:
        """No maker is lost yet; `is_ending`: the run is to stop, or is over, and waits for none."""
        self._config, self._is_ending = config, is_ending
        self._policy = config.detached.on_maker_loss
        self._pools = expand_roles(config.role_mapping)
        self._groups, self._topology = groups, topology
        self._init_arguments = init_arguments
        self._restarts: Counter[int] = Counter()
        self._gone: set[int] = set()

    def __call__(self, maker: int, error: WorkerDiedError, num_lost: int) -> bool:
        """Whether this maker goes on; raises where the run cannot."""
        if self.is_alive(maker):  # then it is a trainer that died, while it sent weights
            raise error
        what = f"maker {maker} is lost with {num_lost} samples that it was making"
        if self._policy == "restart" and self._restarts[maker] < MOST_RESTARTS:
            self._restarts[maker] += 1
            logger.warning("%s: it is started anew. %s", what, error)
            return self._comes_back(maker, error)

        self._gone.add(maker)
        if self._policy == "continue" and not self._ranks_without_makers():
            logger.warning("%s: the other makers take them over. %s", what, error)
            return False
        raise RolloutError(f"{what}: {error} {self._way_out(maker)}") from error

    def is_alive(self, maker: int) -> bool:
        """Whether all processes of its group answer."""
        try:
            self._groups[maker_role(maker)].ping()
        except WorkerDiedError:
            return False
        return True

    def _comes_back(self, maker: int, error: WorkerDiedError) -> bool:
        """Whether it does; in a run that is told to stop, the other makers may end the step."""
        try:
            self._restart(maker)
        except ToldToStop:
            self._gone.add(maker)
            if self._ranks_without_makers():
                raise
            return False
        except NoRoomError:
            raise
        except PlacementError as problem:
            error.add_note(str(problem))
            raise error from None
        return True

    def _restart(self, maker: int) -> None:
        pool = self._pools[maker_role(maker)]
        restart, since = partial(self._groups.restart, pool), time.monotonic()
        wait_for_room(restart, self._config, f"maker {maker}", since, self._look_again)
        for role, its_pool in self._pools.items():
            if its_pool == pool:
                self._groups[role].init_model(**self._init_arguments(role))

    def _look_again(self) -> None:
        """In a moment."""
        if self._is_ending():
            raise ToldToStop
        time.sleep(LOOK_AGAIN_S)

    def _ranks_without_makers(self) -> list[int]:
        ranks = range(self._topology.trainers)
        return [rank for rank in ranks if self._gone >= set(self._topology.makers_of(rank))]

    def _way_out(self, maker: int) -> str:
        if self._policy == "fail":
            return "detached.on_maker_loss=restart or continue would let the run go on."
        if self._policy == "restart":
            return f"It was started anew {self._restarts[maker]} times."
        ranks = ", ".join(map(str, self._ranks_without_makers()))
        return f"No maker is left for trainer rank {ranks}."
