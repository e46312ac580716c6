"""The generators of a run: threads that generate, their queue, and the weights sent to them.

`Generators` observes one attempt of the run from outside the loop. It checks after every step that
the sample log and the queue agree, puts its state into checkpoints, and stops its threads at the
end of the run.

If a generator is lost, the run ends, or it continues without the generator, or the generator is
restarted.

A `Generator` is a thread of the driver that keeps one rollout group generating:

    while True:
        take newer weights, if there are any
        submit chunks, if the queue has room for them
        collect what is finished; a chunk with all its samples goes to the queue

The rows of a validation form chunks, too. During a validation, generators get no other chunks.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from trainer.async_training.activity import Activity
from trainer.async_training.buffer import ExperienceBuffer, WeightVersion
from trainer.async_training.chunks import Rounds
from trainer.async_training.config import AsyncConfig
from trainer.async_training.origins import Origins
from trainer.async_training.samplers import SampleChunk
from trainer.async_training.topology import CRITIC_COPY, generator_role, role_on
from trainer.async_training.weights import WeightFeed
from trainer.groups.cluster import can_move, note_address, pools_to_move
from trainer.loop import StopRequested, Trainer
from trainer.lost_groups import wait_for_room
from trainer.recovery import LOOK_AGAIN_S
from trainer.rollouts.rollouts import join_results, with_responses
from trainer.run_folder.accounts import describe_log
from trainer.run_state import Metrics, Run
from verl_like.batch.protocol import DataProto
from verl_like.calls.deadlines import Deadlines
from verl_like.calls.future import gather
from verl_like.calls.result import CallResult
from verl_like.errors import (
    InsufficientResourcesError,
    PlacementError,
    RolloutError,
    WaitTimeoutError,
    WorkerDiedError,
)
from verl_like.files import write_atomic
from verl_like.placement.pools import expand_roles
from workers.columns import rm_column, select_reads
from workers.config import has_environment
from workers.rollout.client import RolloutClient, Submission

logger = logging.getLogger(__name__)

VALIDATION_TIMEOUT_S = 600.0
"""Seconds without a finished chunk after which a validation that waits for generators fails."""
END_TIMEOUT_S = 10.0
"""Seconds to wait for generators at the end of a run; short, so that a failed run ends soon."""
MAX_RESTARTS = 3
"""Maximum restarts of one generator per version of the weights; more would not help."""
JOIN_EVERY_S = 5.0
"""Seconds between two searches for a node with room for a generator."""
MIN_COLLECT_S = 0.25
"""Shortest time limit of `collect`. New weights, or the end of the run, wait until it returns."""
COLLECTS_PER_S = 250
"""Maximum calls of `collect` per second, by the driver, over the ranks of all generators."""
METHODS = {"ref": "compute_ref_log_prob", CRITIC_COPY: "compute_values"}
"""Maps a role to its scoring method. All other scoring roles are reward models."""
REWARD_METHOD = "compute_rm_score"
MADE_BY_GENERATORS = frozenset(
    ["generate_sequences", "submit", "collect", REWARD_METHOD, *METHODS.values()]
)


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
        with self.buffer.paused(VALIDATION_TIMEOUT_S):
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
        until = time.monotonic() + END_TIMEOUT_S
        for generator in self._threads:
            generator.wait_for_end(max(until - time.monotonic(), 0.0))
        self.buffer.check()
        log = self.buffer.log.state_dict()
        print(describe_log(log), flush=True)
        content = {"ledger": log, "activity": self.activity.seconds()}
        write_atomic(self.run.folder / "async.json", json.dumps(content))


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

    def on_loss(self, generator: int, error: WorkerDiedError, num_lost: int) -> bool:
        """Return whether this generator continues; raise if the run cannot continue."""
        if self._buffer.is_closed:  # the run is over, and has shut down the groups
            return False
        if self._is_alive(generator):  # a trainer was lost while it sent weights
            raise error
        policy = self._config.async_training.on_generator_failure
        now = generator, self._buffer.version
        subject = f"generator {generator} died with {num_lost} unfinished samples"
        if policy == "restart" and self._restarts[now] < MAX_RESTARTS:
            self._restarts[now] += 1
            logger.warning("%s; restarting it. %s", subject, error)
            try:
                return self.place(generator)
            except WorkerDiedError as again:
                return self.on_loss(generator, again, num_lost=0)
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
        remedy = {
            "fail": "Set async_training.on_generator_failure=restart or continue to survive such "
            "a failure.",
            "restart": f"It was restarted {self._restarts[now]} times at version {now[1]} of the "
            "weights, the maximum. Look for the cause in its log.",
            "continue": f"No generator is left for trainer rank {', '.join(map(str, without))}.",
        }
        raise RolloutError(f"{subject}: {error} {remedy[policy]}") from error

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
        limit_s = Deadlines.from_settings(self._config.timeouts).placement_s
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


class Generator:
    """One rollout group, and the thread that drives it."""

    def __init__(
        self,
        number: int,
        trainer: Any,
        buffer: ExperienceBuffer,
        weights: WeightFeed,
        places: Any,
        activity: Activity,
    ) -> None:
        """`start` starts the thread. `places` finds places for the group, and handles its loss.

        With `max_tokens_per_call`, a call of `collect` samples at most that many tokens of each
        response and does not wait for slow environments. New chunks may then start before others
        are finished, and weights arrive between two calls.
        """
        config, self._trainer, self._groups = trainer.config, trainer, trainer.groups
        self._number, self._role = number, generator_role(number)
        self._buffer, self._feed, self._places = buffer, weights, places
        self._activity = activity.of(f"generator {number}")
        self._weights = WeightVersion(0, 0)
        self._running: dict[Submission, SampleChunk] = {}
        self._max_tokens = config.rollout_of(number).max_tokens_per_call
        self._num_at_once = config.chunks_in_parallel(number)
        num_ranks = sum(sum(config.resource_pool_spec[pool]) for pool in config.child_pools)
        slice_s = max(MIN_COLLECT_S, num_ranks / COLLECTS_PER_S)
        self._collect_s = slice_s if has_environment(config) or not self._max_tokens else None
        self._takes_weights_within = config.takes_weights_at_once or bool(self._max_tokens)
        self._client: RolloutClient
        if self._role in self._groups:
            self._client = RolloutClient(self._groups[self._role])
        self._is_lost = False
        self._thread = threading.Thread(target=self._run, name=f"generator {number}", daemon=True)

    def start(self) -> None:
        """Start the thread, which runs until the buffer is closed; a second call does nothing."""
        if self._thread.ident is None:
            if self._role in self._groups:
                self._buffer.join(self._number)
            self._thread.start()

    def wait_for_end(self, seconds: float) -> None:
        """Wait until the thread has ended or the timeout has passed."""
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        """Generate until the buffer closes: take weights, submit prompts, collect samples.

        A generator whose process dies is replaced. The buffer gets the error that ends this thread.
        """
        failure: BaseException | None = None
        try:
            if self._role not in self._groups:
                self._place("it waits for a node with room")
            while not (self._buffer.is_closed or self._is_lost):
                try:
                    must_move = self._places.must_move(self._number)
                    if must_move and not self._running:
                        self._place("it leaves a drained node")
                        continue
                    self._take_weights()
                    if not must_move and (not self._running or self._max_tokens):
                        self._submit()
                    if self._running:
                        self._collect()
                except WorkerDiedError as error:
                    self._replace(error)
        except BaseException as error:  # noqa: BLE001 - raised where the trainer waits for samples
            failure = error
        self._buffer.leave(self._number, failure)

    def _take_weights(self) -> None:
        """Load the newest weights, unless a running generation does not allow it."""
        newest = self._buffer.weights
        if newest > self._weights and (self._takes_weights_within or not self._running):
            with self._activity.syncing(f"weights of version {newest.version}"):
                version = self._feed.deliver(self._number)
                self._weights = WeightVersion(newest.num_swaps, version)

    def _submit(self) -> None:
        """Submit chunks if the queue has room; wait for room only if nothing is running."""
        submissions: dict[Submission, SampleChunk] = {}
        while len(submissions) < self._num_at_once:
            waits = not (self._running or submissions)
            must_leave = partial(self._places.must_leave, self._number)
            chunk = self._buffer.begin(self._number, self._weights, waits, must_leave)
            if chunk is None:
                break
            assert chunk.rows is not None, "a chunk has rows until it is finished"
            rows = chunk.rows
            if not chunk.is_validation:
                rows = self._trainer.rollouts.prompt_columns(rows, self._role)
                rows.meta_info = rows.meta_info | {"attempt": chunk.attempt}
            submissions[Submission(rows)] = chunk
        self._running |= submissions
        for _, of_one_attempt in groupby(submissions, lambda submission: submission.rows.meta_info):
            self._client.submit(*of_one_attempt)

    def _collect(self) -> None:
        """Generate for one call of `collect`, and put finished chunks into the queue.

        With `score_on=generator`, score their samples first.
        """
        with self._activity.busy("generate"):
            finished = self._client.collect(self._max_tokens, self._collect_s)
        for submission in finished:
            chunk, buffer = self._running[submission], self._buffer
            chunk.samples = submission.samples()
            if not chunk.is_validation:
                assert chunk.rows is not None, "a chunk has rows until it is finished"
                chunk.samples = with_responses(chunk.rows, chunk.samples)
                kinds = self._trainer.config.score_roles
                if kinds and not buffer.is_closed:
                    roles = {kind: role_on(kind, self._number) for kind in kinds}
                    with self._activity.busy("score"):
                        scored = score_samples(self._groups, roles, chunk.samples)
                    chunk.samples, chunk.metrics = scored
            if not buffer.is_closed:
                buffer.put(chunk)
            del self._running[submission]

    def _replace(self, error: WorkerDiedError) -> None:
        """Hand back the chunks of a group that lost a process, and restart the group if allowed.

        Raise if the run cannot continue.
        """
        num_lost = self._buffer.lost(self._number)
        self._place("new processes are to replace the lost ones", error, num_lost)

    def _place(self, reason: str, error: WorkerDiedError | None = None, num_lost: int = 0) -> None:
        """Wait for new processes of the group, which get the newest weights; `reason` says why."""
        self._running, self._weights = {}, WeightVersion(0, 0)
        with self._activity.gone(reason):
            if error is None:
                self._is_lost = not self._places.place(self._number)
            else:
                self._is_lost = not self._places.on_loss(self._number, error, num_lost)
        if self._is_lost:
            self._activity.leave("the other generators have taken over")
        else:
            self._client = RolloutClient(self._groups[self._role])


def score_samples(
    groups: Any, roles: Mapping[str, str], samples: DataProto
) -> tuple[DataProto, Metrics]:
    """Add the columns of every scoring role of one generator to the samples; also return metrics.

    `roles` maps a role's name at generator 0 to its name at this generator. Each reward model has
    its own column until the trainer adds its scores to those of functions and servers.
    """
    futures = []
    for kind, role in roles.items():
        group, method = groups[role], METHODS.get(kind, REWARD_METHOD)
        sent = select_reads(samples, group.roles[role], method)
        futures.append(getattr(group, method).remote(sent))
    results = []
    for kind, answer in zip(roles, gather(*futures), strict=True):
        result = CallResult.of(answer)
        if kind not in METHODS:
            result.batch.rename("rm_scores", rm_column(kind))
        results.append(result)
    return join_results(samples, results)
