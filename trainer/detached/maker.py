"""A maker: a thread of the driver that keeps one rollout group generating.

while True:
    newer weights, if there are any
    submit a piece, if there is room for it
    take what is finished: pieces whose samples are all there go to the buffer
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from trainer.detached.activity import Activity
from trainer.detached.buffer import ExperienceBuffer, ToldToStop
from trainer.detached.config import DetachedConfig
from trainer.detached.pieces import Experience, Order
from trainer.detached.topology import Topology, maker_role
from trainer.groups.worker_groups import WorkerGroups
from trainer.loop import Metrics
from trainer.restarts import LOOK_AGAIN_S, wait_for_room
from trainer.rollouts.samples import concat_rows, repeat_prompts
from trainer.rollouts.trainer import with_responses
from verl_like.batch.protocol import DataProto
from verl_like.calls.future import gather
from verl_like.calls.result import Result
from verl_like.errors import (
    NoRoomError,
    PlacementError,
    RolloutError,
    VerlLikeError,
    WorkerDiedError,
)
from verl_like.placement.roles import expand_roles
from workers.rollout.client import RolloutClient, Submission

logger = logging.getLogger(__name__)
SLICE_S = 0.25
"""How long a take lasts: weights and the end of a run wait for it."""


@dataclass(frozen=True)
class MakerCalls:
    """What a maker's thread asks of the run."""

    group: Callable[[], Any]
    """The rollout group, which may be another one after a loss."""
    asked: Callable[[DataProto, int], DataProto]
    """(rows, attempt) -> what the group is sent of them."""
    take_weights: Callable[[], int]
    """Brings the newest weights there are; their version."""
    on_loss: Callable[[WorkerDiedError, int], bool]
    """(error, samples that were being made) -> whether the maker goes on."""
    score: Callable[[DataProto], tuple[DataProto, Metrics]] | None = None
    """What the maker's own roles say of samples; None where the trainers score."""


class Maker:
    """One rollout group and its thread."""

    def __init__(
        self,
        number: int,
        buffer: ExperienceBuffer,
        activity: Activity,
        calls: MakerCalls,
        *,
        max_tokens: int | None = None,
        weights_at_once: bool = False,
        keeps_samples: bool = False,
    ) -> None:
        """`start` begins.

        With `max_tokens` a take draws so many of a response, pieces begin beside unfinished ones,
        and newer weights are taken in between; with `weights_at_once` they are, too.
        `keeps_samples`: those of ranks that live are waited for when one is lost.
        """
        self.number, self.role, self.name = number, maker_role(number), f"maker {number}"
        self.version = 0
        self._buffer, self._activity = buffer, activity.of(f"maker {number}")
        self._calls, self._client = calls, RolloutClient(calls.group())
        self._orders: dict[Submission, tuple[Order, DataProto]] = {}
        """What is being made, with the rows of the prompts."""
        self._max_tokens, self._keeps_samples = max_tokens, keeps_samples
        self._takes_weights_within = weights_at_once or max_tokens is not None
        self._owns_group = threading.Lock()
        """Held while the group takes weights or is restarted, and by whoever validates with it."""
        self.has_ended = False
        """Nothing more comes of it: the run is over, or the group is lost and stays so."""
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def start(self) -> None:
        """Generate until the buffer is closed."""
        self._buffer.join(self.number)
        self._thread.start()

    def wait_for_end(self, seconds: float) -> None:
        """Until its thread has ended."""
        if self._thread.ident is not None:
            self._thread.join(seconds)

    @contextmanager
    def keeps_group(self) -> Iterator[None]:
        """Within, only the caller brings it weights and starts it anew."""
        with self._owns_group:
            yield

    def take_weights(self) -> None:
        """Bring the group to the newest weights, if it has older ones."""
        if self.version < self._buffer.version:
            with self._activity.syncing(f"weights of version {self._buffer.version}"):
                self.version = self._calls.take_weights()

    def replace(self, error: WorkerDiedError, num_lost: int = 0) -> bool:
        """The group has lost a process: whether another one comes in its place, without weights.

        Raises where the run cannot go on.
        """
        self.version = 0
        with self._activity.waiting("processes in the place of the lost ones"):
            goes_on = self._calls.on_loss(error, num_lost)
        if goes_on:
            self._client = RolloutClient(self._calls.group())
        else:
            self.has_ended = True
            self._buffer.leave(self.number)
        return goes_on

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while not (self._buffer.is_closed or self.has_ended):
                try:
                    self._next()
                except WorkerDiedError as error:
                    self._hand_back(error)
        except BaseException as error:  # noqa: BLE001 - raised where the trainer waits for samples
            failure = error
        self._buffer.leave(self.number, failure)
        self.has_ended = True

    def _next(self) -> None:
        is_behind = self.version < self._buffer.version
        if is_behind and (self._takes_weights_within or not self._orders):
            with self._activity.waiting("the end of a validation"):
                self._owns_group.acquire()
            try:
                self.take_weights()
            finally:
                self._owns_group.release()
        if not self._orders or self._max_tokens is not None:
            self._begin()
        if not self._orders:
            return
        with self._activity.busy("generate"):
            finished = self._client.take(self._max_tokens, None if self._max_tokens else SLICE_S)
        for submission in finished:
            order, rows = self._orders[submission]
            self._put(order, with_responses(rows, submission.samples()))
            del self._orders[submission]

    def _begin(self) -> None:
        """Submit a piece, if there is room for it; waits for room where nothing else is to do."""
        order = self._buffer.begin(self.number, self.version, waits=not self._orders)
        if order is None:
            return
        rows = rows_of(order)
        begun = order.begun
        asked = self._calls.asked(rows, order.attempt)
        submission = Submission(asked) if begun is None else begun.submission
        self._orders[submission] = order, rows
        self._client.submit(submission)

    def _put(self, order: Order, samples: DataProto) -> None:
        metrics: Metrics = {}
        if self._calls.score is not None and not self._buffer.is_closed:
            with self._activity.busy("score"):
                samples, metrics = self._calls.score(samples)
        if not self._buffer.is_closed:
            self._buffer.put(Experience.of(order, self.number, samples, metrics))

    def _hand_back(self, error: WorkerDiedError) -> None:
        """What was being made is to be made by whoever comes; samples that are there stay."""
        if self._keeps_samples:
            try:
                self._client.take_from_living()
            except VerlLikeError as problem:
                logger.warning("%s: its other ranks give nothing more: %s", self.name, problem)
        begun = {}
        for submission, (order, _) in self._orders.items():
            if self._keeps_samples and submission.num_there:
                begun[order.piece.number] = submission
                words = "%s: %d samples of the lost group are kept, %d are made again."
                logger.warning(words, self.name, submission.num_there, len(submission.missing))
        num_lost = self._buffer.lost(self.number, begun)
        self._orders = {}
        with self._owns_group:
            self.replace(error, num_lost)


def rows_of(order: Order) -> DataProto:
    """A row for each sample of the prompts that a maker is to answer."""
    return repeat_prompts(order.prompts, order.piece.num_samples // len(order.uids))


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
