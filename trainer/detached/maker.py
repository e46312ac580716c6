"""A maker: a thread of the driver that keeps one rollout group generating.

It moves references: what the group has made stays there until the trainer takes it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trainer.detached.activity import Activity
from trainer.detached.buffer import ExperienceBuffer
from trainer.detached.carry_over import CarriedOver
from trainer.detached.experience import Experience
from trainer.detached.pieces import LeftBehind, Order
from trainer.detached.scoring import Reading
from trainer.detached.topology import maker_role
from trainer.rollouts.samples import repeat_prompts
from trainer.rollouts.trainer import with_responses
from verl_like.batch.protocol import DataProto
from verl_like.calls.survivors import has_lost_ranks
from verl_like.errors import VerlLikeError, WorkerDiedError
from workers.roles.lost_samples import all_of, keep_samples

logger = logging.getLogger(__name__)
StartGenerating = Callable[[str, DataProto, int], Any]
"""(role, rows, attempt) -> the future of their samples."""
StartScoring = Callable[[int, Any], list[Reading]]
"""(number of a maker, samples or the future of them) -> what its roles say of them."""
TakeWeights = Callable[[int], int]
"""Number of a maker -> the version that it holds now, the newest there is."""
OnLoss = Callable[[int, WorkerDiedError, int], bool]
"""(maker, error, samples that were being made) -> whether the maker goes on."""


class Maker:
    """One rollout group and its thread; a second one brings weights, where they come at once."""

    def __init__(
        self,
        number: int,
        buffer: ExperienceBuffer,
        activity: Activity,
        start_generating: StartGenerating,
        take_weights: TakeWeights,
        on_loss: OnLoss,
        *,
        start_scoring: StartScoring | None = None,
        weights_come_at_once: bool = False,
        carries_over: bool = False,
        keeps_samples: bool = False,
    ) -> None:
        """`start` begins. `carries_over`: a call may leave responses unfinished; without
        `start_scoring` the trainers score. `keeps_samples`: those of ranks that live are waited
        for when one is lost.
        """
        self.number, self.role, self.name = number, maker_role(number), f"maker {number}"
        self.version = 0
        self._buffer, self._activity = buffer, activity.of(f"maker {number}")
        self._start_generating, self._take_weights = start_generating, take_weights
        self._start_scoring, self._on_loss = start_scoring, on_loss
        self._carried = CarriedOver() if carries_over else None
        self._keeps_samples = keeps_samples
        self._left_behind: dict[int, LeftBehind] = {}
        self._taking = threading.Condition(threading.RLock())
        """Guards the group's weights, and a restart of the group."""
        self._may_take = threading.Lock()
        """Held by whichever of its threads takes weights, and by whoever keeps it from that."""
        self.num_losses = 0
        """How often its group has lost a process."""
        self.has_ended = False
        """Nothing more comes of it: the run is over, or the group is lost and stays so."""
        self._threads = [threading.Thread(target=self._run, name=self.name, daemon=True)]
        if weights_come_at_once:
            bring = threading.Thread(target=self._bring_weights, name=f"{self.name} weights")
            bring.daemon = True
            self._threads.append(bring)

    def start(self) -> None:
        """Generate until the buffer is closed."""
        self._buffer.join(self.number)
        for thread in self._threads:
            thread.start()

    def wait_for_end(self, seconds: float) -> None:
        """Until its threads have ended."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(seconds)

    @contextmanager
    def keeps_weights(self) -> Iterator[None]:
        """Within, only the caller brings it weights: what is published may not be for samples."""
        with self._may_take:
            yield

    def look_after(self, error: WorkerDiedError, num_losses: int) -> None:
        """The group has lost a process in a call of the trainer's, while makers rest.

        It is started anew and has weights before its threads go on, or the maker ends; raises where
        the run cannot go on. `num_losses`: as many as there were before the call.
        """
        while self._goes_on_after(error, num_losses):
            num_losses = self.num_losses
            try:
                self.take_weights()
            except WorkerDiedError as another:
                error = another
            else:
                return
        self._buffer.leave(self.number)

    def take_weights(self) -> None:
        """Bring the group to the newest weights, if it has older ones."""
        with self._taking:
            if self.version < self._buffer.version:
                with self._activity.syncing(f"weights of version {self._buffer.version}"):
                    self.version = self._take_weights(self.number)

    def _bring_weights(self) -> None:
        """Newer weights as soon as they are published, whatever is being generated."""
        try:
            while self._buffer.wait_for_version(self.version) is not None:
                num_losses = self.num_losses
                try:
                    self._take_newer()
                except WorkerDiedError:
                    self._wait_for_restart(num_losses)
                if self.has_ended:
                    return
        except BaseException as error:  # noqa: BLE001 - raised where the trainer waits for samples
            self._buffer.fail(error)

    def _take_newer(self) -> None:
        """Take weights as its own threads do: not while somebody keeps them from that."""
        if self.version >= self._buffer.version:
            return
        with self._taking:
            pass  # a restart is waited for first: whoever validates need not wait for that
        with self._activity.waiting("the end of a validation"):
            self._may_take.acquire()
        try:
            self.take_weights()
        finally:
            self._may_take.release()

    def _wait_for_restart(self, num_losses: int) -> None:
        """The other thread sees the death too, and knows what to do: until it has done that."""
        with self._taking:
            while self.num_losses == num_losses and not self.has_ended:
                self._taking.wait()

    def _run(self) -> None:
        try:
            while not (self._buffer.is_closed or self.has_ended):
                num_losses = self.num_losses
                try:
                    self._next()
                except WorkerDiedError as error:
                    if not self._goes_on_after(error, num_losses):
                        break
        except BaseException as error:  # noqa: BLE001 - raised where the trainer waits for samples
            self._buffer.leave(self.number, error)
        else:
            self._buffer.leave(self.number)
        finally:
            with self._taking:
                self.has_ended = True
                self._taking.notify_all()

    def _goes_on_after(self, error: WorkerDiedError, num_losses: int) -> bool:
        """Whether it does; `num_losses`: as many as there were before what died was asked."""
        left_behind, self._left_behind = self._left_behind, {}
        pieces = self._buffer.lost(self.number, left_behind)
        num_lost = sum(piece.num_samples for piece in pieces)
        num_lost -= sum(len(left.kept.rows) for left in left_behind.values())
        if self._carried is not None:
            self._carried.clear()
        with self._taking:
            if self.num_losses > num_losses:  # another thread has looked after this one
                return not self.has_ended
            self.version = 0  # whatever comes up in its place has no weights
            with self._activity.waiting("processes in the place of the lost ones"):
                goes_on = self._on_loss(self.number, error, num_lost)
            self.num_losses += 1
            self.has_ended = not goes_on
            self._taking.notify_all()
        return goes_on

    def _next(self) -> None:
        """Newer weights if there are any, and a piece if there is room for it."""
        self._take_newer()
        if self._carried is not None:
            self._next_call(self._carried)
            return
        order = self._buffer.begin(self.number, self.version)
        if order is None:
            return
        rows, left = rows_of(order), order.left_behind
        asked = rows if left is None else rows.select_idxs(left.kept.lost_rows)
        future = self._start_generating(self.role, asked, order.attempt)
        with self._activity.busy("generate"):
            try:
                future.wait()
            except WorkerDiedError:
                self._keep(order, asked, future)
                raise
        if left is None:
            readings = self._score(future)
        else:
            samples = left.kept.with_later(all_of(future.batch())).whole()
            rows, future = with_responses(rows, samples), None
            readings = self._score(rows)
        if not self._buffer.is_closed:
            self._buffer.put(Experience.of(order, self.number, rows, future, readings))

    def _keep(self, order: Order, asked: DataProto, future: Any) -> None:
        """The samples of a lost group's ranks that live, for whoever makes the rest."""
        if not self._keeps_samples or not has_lost_ranks(future):
            return
        try:
            kept = keep_samples(future, asked)
        except VerlLikeError as error:
            logger.warning("%s: none of its samples are kept: %s", self.name, error)
            return
        before = order.left_behind
        if before is not None:
            kept = before.kept.with_later(kept)
        if kept.rows:
            uids = rows_of(order).non_tensor_batch["uid"][kept.rows]
            left = LeftBehind(self.number, order.version, kept, [str(uid) for uid in uids])
            self._left_behind[order.piece.number] = left
            words = "%s: %d samples of the lost group are kept, %d are made again."
            logger.warning(words, self.name, len(kept.rows), len(kept.lost_rows))

    def _next_call(self, carried: CarriedOver) -> None:
        """One call that draws a part of every response: of those that go on and of a new piece."""
        order = self._buffer.begin(self.number, self.version, waits=carried.is_empty)
        if order is None and carried.is_empty:
            return
        rows = carried.rows(order, None if order is None else rows_of(order))
        future = self._start_generating(self.role, rows, 0 if order is None else order.attempt)
        with self._activity.busy("generate"):
            samples = future.batch()
        for made, batch in carried.sort(rows, samples):
            readings = self._score(batch)
            self._buffer.put(Experience.of(made, self.number, batch, readings=readings))

    def _score(self, samples: Any) -> list[Reading]:
        """What this maker's roles say of its samples, on the workers; nothing if trainers score."""
        if self._start_scoring is None or self._buffer.is_closed:
            return []
        readings = self._start_scoring(self.number, samples)
        with self._activity.busy("score"):
            for reading in readings:
                reading.future.wait()
        return readings


def rows_of(order: Order) -> DataProto:
    """A row for each sample of the prompts that a maker is to answer."""
    return repeat_prompts(order.prompts, order.piece.num_samples // len(order.uids))
