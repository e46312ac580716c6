"""A maker: a thread of the driver that keeps one rollout group generating.

    while True:
        take newer weights, if there are any
        submit pieces, if the queue has room for them
        take what is finished; a piece with all its samples goes to the queue

The rows of a validation are pieces, too; during a validation makers get no others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby
from typing import Any, Protocol

from trainer.detached.activity import Activity
from trainer.detached.buffer import ExperienceBuffer, Weights
from trainer.detached.config import DetachedConfig
from trainer.detached.samplers import Experience
from trainer.detached.topology import maker_role, role_on
from trainer.detached.weights import WeightFeed
from trainer.groups.worker_groups import WorkerGroups
from trainer.loop import ToldToStop
from trainer.ppo.sizes import CRITIC_COPY
from trainer.record import Metrics
from trainer.restarts import LOOK_AGAIN_S, wait_for_room
from trainer.rollouts.rollouts import Rollouts, join_results, with_responses
from verl_like.batch.protocol import DataProto
from verl_like.calls.future import gather
from verl_like.calls.result import Result
from verl_like.errors import (
    NoRoomError,
    PlacementError,
    RolloutError,
    WorkerDiedError,
)
from verl_like.placement.roles import expand_roles
from workers.columns import read_columns, rm_column, select_reads
from workers.config import plays
from workers.rollout.client import RolloutClient, Submission

logger = logging.getLogger(__name__)
SLICE_S = 0.25
"""Seconds of a take; new weights and the end of a run wait for it."""
TAKES_PER_S = 250
"""The most takes per second of all makers' ranks together; each take is a call of the driver."""
MOST_RESTARTS = 3
"""The most restarts of one maker per version of the weights; more would not help."""


class MakersTrainer(Protocol):
    """The part of a `DetachedTrainer` that a maker's thread uses."""

    config: DetachedConfig
    groups: WorkerGroups
    """After a loss a role has another group here."""
    buffer: ExperienceBuffer
    activity: Activity
    feed: WeightFeed
    losses: MakerLosses
    rollouts: Rollouts


class Maker:
    """One rollout group and its thread."""

    def __init__(self, number: int, trainer: MakersTrainer) -> None:
        """`start` begins.

        With `max_new_tokens_per_call` a take draws that many tokens of a response and waits for no
        slow environment. Pieces then begin next to unfinished ones, and weights come in between.
        """
        self._number, self._role, self._trainer = number, maker_role(number), trainer
        self._buffer = trainer.buffer
        self._activity = trainer.activity.of(f"maker {number}")
        self._weights = Weights(0, 0)
        self._running: dict[Submission, Experience] = {}
        detached = trainer.config.detached
        self._max_tokens = trainer.config.rollout_of(number).max_new_tokens_per_call
        self._num_at_once = trainer.config.pieces_at_once(number)
        slice_s = max(SLICE_S, trainer.config.num_maker_ranks / TAKES_PER_S)
        self._take_s = slice_s if plays(trainer.config) or not self._max_tokens else None
        self._takes_weights_within = detached.new_weights == "at_once" or bool(self._max_tokens)
        self._client = RolloutClient(trainer.groups[self._role])
        self._is_lost = False
        self._thread = threading.Thread(target=self._run, name=f"maker {number}", daemon=True)

    def start(self) -> None:
        """Generate until the buffer is closed."""
        self._buffer.join(self._number)
        self._thread.start()

    def wait_for_end(self, seconds: float) -> None:
        """Wait until its thread has ended, or so long."""
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while not (self._buffer.is_closed or self._is_lost):
                try:
                    self._next()
                except WorkerDiedError as error:
                    self._replace(error)
        except BaseException as error:  # noqa: BLE001 - raised where the trainer waits for samples
            failure = error
        self._buffer.leave(self._number, failure)

    def _next(self) -> None:
        newest = self._buffer.weights
        if newest > self._weights and (self._takes_weights_within or not self._running):
            with self._activity.syncing(f"weights of version {newest.version}"):
                self._weights = Weights(newest.num_swaps, self._trainer.feed.deliver(self._number))
        if not self._running or self._max_tokens:
            self._begin()
        if self._running:
            with self._activity.busy("generate"):
                finished = self._client.take(self._max_tokens, self._take_s)
            for submission in finished:
                self._put(submission, self._running[submission])
                del self._running[submission]

    def _begin(self) -> None:
        """Submit pieces, if the queue has room; wait for room if nothing else is to do."""
        begun: list[Experience] = []
        while len(begun) < self._num_at_once:
            waits = not (self._running or begun)
            experience = self._buffer.begin(self._number, self._weights, waits)
            if experience is None:
                break
            begun.append(experience)
        submissions = {self._submission_of(experience): experience for experience in begun}
        self._running |= submissions
        for _, alike in groupby(submissions, lambda one: one.rows.meta_info):  # that of their draw
            self._client.submit(*alike)

    def _submission_of(self, experience: Experience) -> Submission:
        assert experience.rows is not None, "of what is being made"
        rows = experience.rows
        if not experience.is_validation:
            rows = self._trainer.rollouts.prompt_columns(rows, self._role)
            rows.meta_info = rows.meta_info | {"attempt": experience.attempt}
        return Submission(rows)

    def _put(self, submission: Submission, experience: Experience) -> None:
        samples = submission.samples()
        if not experience.is_validation:
            assert experience.rows is not None, "of what is being made"
            samples = with_responses(experience.rows, samples)
            if (roles := self._trainer.config.score_roles) and not self._buffer.is_closed:
                own = {role: role_on(role, self._number) for role in roles}
                with self._activity.busy("score"):
                    scored = score_samples(self._trainer.groups, own, samples)
                    samples, experience.metrics = scored
        experience.samples = samples
        if not self._buffer.is_closed:
            self._buffer.put(experience)

    def _replace(self, error: WorkerDiedError) -> None:
        """The group has lost a process: its pieces are generated again by it or by other makers.

        Raises where the run cannot go on.
        """
        num_lost = self._buffer.lost(self._number)
        self._running, self._weights = {}, Weights(0, 0)
        with self._activity.gone("others are to come in the place of the lost ones"):
            self._is_lost = not self._trainer.losses(self._number, error, num_lost)
        if self._is_lost:
            self._activity.leave("the other makers have taken over")
        else:
            self._client = RolloutClient(self._trainer.groups[self._role])


class MakerLosses:
    """Handles the loss of a maker as `detached.on_maker_loss` says; restarts makers."""

    def __init__(
        self,
        config: DetachedConfig,
        groups: WorkerGroups,
        init_arguments: Callable[[str], dict[str, Any]],
        is_ending: Callable[[], bool],
        version: Callable[[], int],
    ) -> None:
        """`is_ending` tells whether the run stops or is over, so that it waits for no node;
        `version` returns the version of the newest weights.
        """
        self._config, self._groups = config, groups
        self._init_arguments, self._is_ending = init_arguments, is_ending
        self._version = version
        self._pools = expand_roles(config.role_mapping)
        self._restarts: Counter[tuple[int, int]] = Counter()
        self._gone: set[int] = set()

    def __call__(self, maker: int, error: WorkerDiedError, num_lost: int) -> bool:
        """Whether this maker goes on; raises where the run cannot."""
        if self._is_alive(maker):  # then it is a trainer that died, while it sent weights
            raise error
        policy, now = self._config.detached.on_maker_loss, (maker, self._version())
        what = f"maker {maker} is lost with {num_lost} samples that it was making"
        if policy == "restart" and self._restarts[now] < MOST_RESTARTS:
            self._restarts[now] += 1
            logger.warning("%s: it is started anew. %s", what, error)
            return self._comes_back(maker, error)

        without = self._ranks_without(maker)
        if policy == "continue" and not without:
            logger.warning("%s: the other makers take them over. %s", what, error)
            return False
        way_out = {
            "fail": "detached.on_maker_loss=restart or continue would let the run go on.",
            "restart": f"It was started anew {self._restarts[now]} times with version {now[1]}.",
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
        if self._is_ending():
            raise ToldToStop("a node in the place of a maker's")
        time.sleep(LOOK_AGAIN_S)

    def _ranks_without(self, maker: int) -> list[int]:
        """The trainer ranks without a maker, now that this maker is gone, too."""
        self._gone.add(maker)
        topology = self._config.topology
        ranks = range(topology.trainers)
        return [rank for rank in ranks if self._gone >= set(topology.makers_of(rank))]


# ------------------------------------------------------------- scores, with detached.score_on=maker

METHODS = {"ref": "compute_ref_log_prob", CRITIC_COPY: "compute_values"}
"""Role -> its method; all others are reward models."""
REWARD_METHOD = "compute_rm_score"
MADE_BY_MAKERS = frozenset(
    ["generate_sequences", "submit", "take", REWARD_METHOD, *METHODS.values()]
)


def score_samples(
    groups: Any, roles: Mapping[str, str], samples: DataProto
) -> tuple[DataProto, Metrics]:
    """The samples with the columns of every role that scores them, and metrics.

    `roles` are one maker's: name at maker 0 -> name at this maker. Scores of reward models stay
    columns of their own until the trainer adds them to the scores of functions and servers.
    """
    futures = []
    for role, own in roles.items():
        group, method = groups[own], METHODS.get(role, REWARD_METHOD)
        sent = select_reads(samples, group.roles[own], method)
        futures.append(getattr(group, method).remote(sent))
    results = []
    for role, answer in zip(roles, gather(*futures), strict=True):
        result = Result.of(answer)
        if role not in METHODS:
            result.batch.rename("rm_scores", rm_column(role))
        results.append(result)
    return join_results(samples, results)


class ScoresHere:
    """The future of a reward model's scores that a maker has brought along."""

    def __init__(self, batch: DataProto, role: str) -> None:
        """`role` as maker 0 has it."""
        self._role, column = role, rm_column(role)
        self._scores = read_columns(batch, column)[column]

    def __str__(self) -> str:
        """The role, for messages about a failure."""
        return f"scores of {self._role}"

    def done(self) -> bool:
        return True

    def get(self, timeout: float | None = None) -> DataProto:
        """The scores in a batch, as `compute_rm_score` returns them."""
        return DataProto.from_dict({"rm_scores": self._scores})
