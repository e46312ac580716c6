"""The generators of a run, their queue, and the weights that are sent to them.

`Generators` observes one attempt of the run from outside the loop. It checks after every step that
the sample log and the queue agree, puts its state into checkpoints, and stops its threads at the
end of the run.

If a generator is lost, the run ends, or it continues without the generator, or the generator is
restarted.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from trainer.async_training.activity import Activity
from trainer.async_training.buffer import ExperienceBuffer
from trainer.async_training.chunks import Rounds
from trainer.async_training.config import AsyncConfig
from trainer.async_training.generator import Generator
from trainer.async_training.origins import Origins
from trainer.async_training.topology import generator_role, role_on
from trainer.async_training.weights import WeightFeed
from trainer.groups.changing_pools import can_move, note_address, pools_to_move
from trainer.loop import StopRequested, Trainer
from trainer.lost_groups import wait_for_room
from trainer.restarts import LOOK_AGAIN_S
from trainer.run_folder.accounts import describe_log
from trainer.run_state import Run
from verl_like.batch.protocol import DataProto
from verl_like.calls.deadlines import Deadlines
from verl_like.calls.future import gather
from verl_like.errors import (
    InsufficientResourcesError,
    PlacementError,
    RolloutError,
    WaitTimeoutError,
    WorkerDiedError,
)
from verl_like.files import write_whole
from verl_like.placement.pools import expand_roles

PAUSE_S = 600.0
"""Seconds without a finished chunk after which a validation that waits for generators fails."""
END_S = 10.0
"""Seconds to wait for generators at the end of a run; short, so that a failed run ends soon."""


class Generators:
    """All generators of a run."""

    name = "async"

    def __init__(self, trainer: Any) -> None:
        """`start` starts the generators' threads. `trainer` is an `AsyncTrainer`."""
        config: AsyncConfig = trainer.config
        self.config, self.run = config, trainer.run
        self.activity, self.rounds = Activity(), Rounds.of(config)
        self.buffer = ExperienceBuffer(config, trainer.loader, self.activity, self.check_trainers)
        self.weights = WeightFeed(self.run, self.buffer, self.rounds, self.activity)
        self.origins = Origins(config.topology.trainers, self.buffer.log, self.weights)
        places = Places(self.run, self.buffer, trainer.init_arguments)
        self._threads = [
            Generator(number, trainer, self.buffer, self.weights, places, self.activity)
            for number in range(config.async_training.generators)
        ]
        self.validation_began = 0.0
        """The time (`time.time`) at which generators last paused for a validation."""

    def start(self) -> None:
        """Start the generators' threads; a second call does nothing."""
        for generator in self._threads:
            generator.start()

    # ------------------------------------------------------------------------------- validation

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block, let generators generate only for a validation."""
        self.start()
        with self.buffer.paused(PAUSE_S):
            self.validation_began = time.time()
            yield

    def validate(self, prompts: DataProto) -> DataProto:
        """Divide these rows among the validating generators, and return their samples."""
        return self.buffer.validate(prompts, self._validators())

    def model_role(self, role: str) -> str:
        """Return the role that computes this reward model's scores in a validation."""
        return role_on(role, self._validators()[0]) if role in self.config.score_roles else role

    def _validators(self) -> list[int]:
        return self.config.validators(self.buffer.generators)

    # ------------------------------------------------------------------- checks, state, the end

    def others(self) -> dict[str, Any]:
        """Return the groups of all roles except the generators'."""
        groups, roles = self.run.groups, self.config.generator_roles
        return {role: groups[role] for role in groups if role not in roles}

    def check_trainers(self) -> None:
        """Ping every training process: while the trainer waits, no call would notice a lost one."""
        pools = expand_roles(self.config.role_mapping)
        by_pool = {pools[role]: group for role, group in self.others().items()}
        gather(*(group.ping.remote() for group in by_pool.values()))

    def on_step_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Check that the sample log and the queue agree."""
        self.buffer.check()

    def state_dict(self) -> dict[str, Any]:
        """Return the sample log, and the position in the prompts."""
        return self.buffer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`; unfinished samples are generated again."""
        self.buffer.load_state_dict(state, self.run.checkpoints.resume.start)

    def write_files(self, folder: Path) -> None:
        """Write the queued samples to a checkpoint, if `async_training.on_resume=restore`."""
        self.buffer.write_samples(folder)

    def on_train_end(self, trainer: Trainer) -> None:
        """Stop the generators; check, print and write the sample log."""
        self.buffer.close()
        until = time.monotonic() + END_S
        for generator in self._threads:
            generator.wait_for_end(max(until - time.monotonic(), 0.0))
        self.buffer.check()
        log = self.buffer.log.state_dict()
        print(describe_log(log), flush=True)
        content = {"ledger": log, "activity": self.activity.seconds()}
        write_whole(self.run.folder / "async.json", json.dumps(content))


MOST_RESTARTS = 3
"""Maximum restarts of one generator per version of the weights; more would not help."""
JOIN_EVERY_S = 5.0
"""Seconds between two searches for a node with room for a generator."""
logger = logging.getLogger(__name__)


class Places:
    """Starts generators where there is room, and handles the loss of a generator.

    After a loss, `async_training.on_generator_failure` applies. With `min_generators`, the other
    generators go on while one has no place.
    """

    def __init__(
        self, run: Run, buffer: ExperienceBuffer, init_arguments: Callable[[str], dict[str, Any]]
    ) -> None:
        """`init_arguments` returns the arguments of a role's `init_model`."""
        self._config: AsyncConfig = run.config  # type: ignore[assignment]
        self._run, self._groups, self._buffer = run, run.groups, buffer
        self._init_arguments = init_arguments
        self._pools = expand_roles(self._config.role_mapping)
        self._restarts: Counter[tuple[int, int]] = Counter()
        self._lost: set[int] = set()
        self._fewest = self._config.async_training.min_generators
        if self._fewest is not None:
            note_address(run.folder)
        self._drained: dict[str, float] = {}
        self._asked_at = 0.0

    def lose(self, generator: int, error: WorkerDiedError, num_lost: int) -> bool:
        """Return whether this generator continues; raise if the run cannot continue."""
        if self._is_alive(generator):  # a trainer was lost while it sent weights
            raise error
        policy = self._config.async_training.on_generator_failure
        now = generator, self._buffer.version
        subject = f"generator {generator} died with {num_lost} unfinished samples"
        if policy == "restart" and self._restarts[now] < MOST_RESTARTS:
            self._restarts[now] += 1
            logger.warning("%s; restarting it. %s", subject, error)
            try:
                return self.place(generator)
            except WorkerDiedError as again:
                return self.lose(generator, again, num_lost=0)
            except StopRequested:  # while the run stops, the others finish the step
                if self._ranks_without(generator):
                    raise
                return False
            except InsufficientResourcesError:
                raise
            except PlacementError as problem:
                error.add_note(str(problem))
                raise error from None

        without = self._ranks_without(generator)
        if policy == "continue" and not without:
            logger.warning("%s; the other generators regenerate them. %s", subject, error)
            return False
        way_out = {
            "fail": "Set async_training.on_generator_failure=restart or continue to survive such "
            "a failure.",
            "restart": f"It was restarted {self._restarts[now]} times at version {now[1]} of the "
            "weights, the maximum. Look for the cause in its log.",
            "continue": f"No generator is left for trainer rank {', '.join(map(str, without))}.",
        }
        raise RolloutError(f"{subject}: {error} {way_out[policy]}") from error

    def must_move(self, generator: int) -> bool:
        """Return whether Ray drains the generator's node, and it can leave that node."""
        if time.monotonic() - self._asked_at > LOOK_AGAIN_S:
            self._asked_at, self._drained = (
                time.monotonic(),
                pools_to_move(self._config, self._groups.placement),
            )
        pool = self._pools[generator_role(generator)]
        if pool not in self._drained:
            return False
        return self._fewest is not None or can_move(self._config, self._groups.placement, [pool])

    def must_leave(self, generator: int) -> bool:
        """Return whether an idle generator must move; raise if its processes are lost."""
        self._groups[generator_role(generator)].transport.check_idle("its turn")
        return self.must_move(generator)

    def place(self, generator: int) -> bool:
        """Start a generator once the cluster has room for it, and load the models of its roles.

        Return False if the run stops before, and goes on without this generator until then.
        """
        pool = self._pools[generator_role(generator)]
        if self._fewest is None:
            restart, name = partial(self._groups.restart, pool), f"generator {generator}"
            wait_for_room(restart, self._config, name, time.monotonic(), self._look_again)
        elif not self._join(generator, pool, self._fewest):
            return False
        for role, its_pool in self._pools.items():
            if its_pool == pool:
                self._groups[role].init_model(**self._init_arguments(role))
        self._buffer.join(generator)
        return True

    def _join(self, generator: int, pool: str, fewest: int) -> bool:
        """Leave the generator's place, and wait for another; return False if the run stops."""
        if pool in self._groups.placement.pools:
            self._groups.leave(pool)
        began, reason = time.monotonic(), ""
        limit_s = Deadlines.of(self._config.timeouts).placement_s
        while True:
            try:
                self._groups.join(pool)
            except (InsufficientResourcesError, WorkerDiedError, WaitTimeoutError) as error:
                can_wait = self._buffer.step_aside(generator, fewest)
                if not can_wait and time.monotonic() - began > limit_s:
                    raise
                if str(error) != reason:
                    reason = str(error)
                    logger.warning("generator %d waits for a node: %s", generator, reason)
            else:
                logger.warning("generator %d has joined.", generator)
                return True
            try:
                self._look_again(JOIN_EVERY_S)
            except StopRequested:
                if can_wait:
                    return False
                raise

    def _is_alive(self, generator: int) -> bool:
        try:
            self._groups[generator_role(generator)].ping()
        except WorkerDiedError:
            return False
        return True

    def _look_again(self, seconds: float = 0.0) -> None:
        until = time.monotonic() + max(seconds, LOOK_AGAIN_S)
        while time.monotonic() < until:
            if self._run.stop.received or self._buffer.is_closed:
                raise StopRequested("a node for a generator")
            time.sleep(LOOK_AGAIN_S)

    def _ranks_without(self, generator: int) -> list[int]:
        """Mark this generator as gone; return the trainer ranks that have no generator left."""
        self._lost.add(generator)
        topology = self._config.topology
        ranks = range(topology.trainers)
        return [rank for rank in ranks if self._lost >= set(topology.generators_of[rank])]
