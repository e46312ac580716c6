"""Handle lost generators: end the run, go on without them, or restart them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from trainer.async_training.buffer import ExperienceBuffer
from trainer.async_training.config import AsyncConfig
from trainer.async_training.topology import generator_role
from trainer.loop import ToldToStop
from trainer.record import Run
from trainer.restarts import LOOK_AGAIN_S, wait_for_room
from verl_like.errors import NoRoomError, PlacementError, RolloutError, WorkerDiedError
from verl_like.placement.roles import expand_roles

MOST_RESTARTS = 3
"""The most restarts of one generator per version of the weights; more would not help."""
logger = logging.getLogger(__name__)


class LostGenerators:
    """Handles the loss of a generator as `async_training.on_generator_loss` asks."""

    def __init__(
        self, run: Run, buffer: ExperienceBuffer, init_arguments: Callable[[str], dict[str, Any]]
    ) -> None:
        """`init_arguments` returns the arguments of a role's `init_model`."""
        self._config: AsyncConfig = run.config  # type: ignore[assignment]
        self._run, self._groups, self._buffer = run, run.groups, buffer
        self._init_arguments = init_arguments
        self._pools = expand_roles(self._config.role_mapping)
        self._restarts: Counter[tuple[int, int]] = Counter()
        self._gone: set[int] = set()

    def __call__(self, generator: int, error: WorkerDiedError, num_lost: int) -> bool:
        """Return whether this generator goes on; raise if the run cannot."""
        if self._is_alive(generator):  # then a trainer died while it sent weights
            raise error
        policy = self._config.async_training.on_generator_loss
        now = generator, self._buffer.version
        what = f"generator {generator} is lost with {num_lost} samples that it was generating"
        if policy == "restart" and self._restarts[now] < MOST_RESTARTS:
            self._restarts[now] += 1
            logger.warning("%s: it is restarted. %s", what, error)
            return self._comes_back(generator, error)

        without = self._ranks_without(generator)
        if policy == "continue" and not without:
            logger.warning("%s: the other generators take them over. %s", what, error)
            return False
        way_out = {
            "fail": "async_training.on_generator_loss=restart or continue would let the run go on.",
            "restart": f"It was restarted {self._restarts[now]} times with version {now[1]}.",
            "continue": f"No generator is left for trainer rank {', '.join(map(str, without))}.",
        }
        raise RolloutError(f"{what}: {error} {way_out[policy]}") from error

    def _is_alive(self, generator: int) -> bool:
        try:
            self._groups[generator_role(generator)].ping()
        except WorkerDiedError:
            return False
        return True

    def _comes_back(self, generator: int, error: WorkerDiedError) -> bool:
        """Restart the generator, if allowed. A stopping run lets the others end the step."""
        pool = self._pools[generator_role(generator)]
        restart = partial(self._groups.restart, pool)
        what, since = f"generator {generator}", time.monotonic()
        try:
            wait_for_room(restart, self._config, what, since, self._look_again)
            for role, its_pool in self._pools.items():
                if its_pool == pool:
                    self._groups[role].init_model(**self._init_arguments(role))
        except WorkerDiedError as again:
            return self(generator, again, num_lost=0)
        except ToldToStop:
            if self._ranks_without(generator):
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
            raise ToldToStop("a node to replace a generator's")
        time.sleep(LOOK_AGAIN_S)

    def _ranks_without(self, generator: int) -> list[int]:
        """Return the trainer ranks without a generator, now that this one is gone."""
        self._gone.add(generator)
        topology = self._config.topology
        ranks = range(topology.trainers)
        return [rank for rank in ranks if self._gone >= set(topology.generators_of(rank))]
