"""A maker: a thread of the driver that keeps one rollout group generating.

while True:
    newer weights, if there are any
    submit a piece, if there is room for it
    take what is finished: pieces whose samples are all there go to the buffer
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trainer.detached.activity import Activity
from trainer.detached.buffer import ExperienceBuffer
from trainer.detached.pieces import Experience, Order
from trainer.detached.topology import maker_role
from trainer.loop import Metrics
from trainer.rollouts.samples import repeat_prompts
from trainer.rollouts.trainer import with_responses
from verl_like.batch.protocol import DataProto
from verl_like.errors import VerlLikeError, WorkerDiedError
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
