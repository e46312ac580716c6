"""A maker: a thread of the driver that keeps one rollout group generating.

It moves references: what the group has made stays there until the trainer takes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from trainer.detached.activity import Activity
from trainer.detached.buffer import ExperienceBuffer, Order
from trainer.detached.experience import Experience
from trainer.detached.topology import maker_role
from trainer.ppo.samples import repeat_prompts
from verl_like.batch.protocol import DataProto
from verl_like.errors import WorkerDiedError

StartGenerating = Callable[[str, DataProto, int], Any]
"""(role, rows, attempt) -> the future of their samples."""
TakeWeights = Callable[[int], int]
"""Number of a maker -> the version that it holds now, the newest there is."""
OnLoss = Callable[[int, WorkerDiedError, int], bool]
"""(maker, error, samples that were being made) -> whether the maker goes on."""


class Maker:
    """One rollout group and its thread."""

    def __init__(
        self,
        number: int,
        buffer: ExperienceBuffer,
        activity: Activity,
        start_generating: StartGenerating,
        take_weights: TakeWeights,
        on_loss: OnLoss,
    ) -> None:
        """`start` begins."""
        self.number, self.role, self.name = number, maker_role(number), f"maker {number}"
        self.version = 0
        self._buffer, self._activity = buffer, activity.of(f"maker {number}")
        self._start_generating, self._take_weights = start_generating, take_weights
        self._on_loss = on_loss
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def start(self) -> None:
        """Generate until the buffer is closed."""
        self._buffer.join(self.number)
        self._thread.start()

    def wait_for_end(self, seconds: float) -> None:
        """Until the thread has ended."""
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def take_weights(self) -> None:
        """Bring the group to the newest weights, if it has older ones."""
        if self.version < self._buffer.version:
            with self._activity.syncing(f"weights of version {self._buffer.version}"):
                self.version = self._take_weights(self.number)

    def _run(self) -> None:
        try:
            while not self._buffer.is_closed:
                try:
                    self._next()
                except WorkerDiedError as error:
                    pieces = self._buffer.lost(self.number)
                    self.version = 0  # whatever comes up in its place has no weights
                    num_samples = sum(piece.num_samples for piece in pieces)
                    if not self._on_loss(self.number, error, num_samples):
                        break
        except BaseException as error:  # noqa: BLE001 - raised where the trainer waits for samples
            self._buffer.leave(self.number, error)
        else:
            self._buffer.leave(self.number)

    def _next(self) -> None:
        """Newer weights if there are any, and a piece if there is room for it."""
        self.take_weights()
        order = self._buffer.begin(self.number, self.version)
        if order is not None:
            with self._activity.busy("generate"):
                experience = self._make(order)
            if experience is not None:
                self._buffer.put(experience)

    def _make(self, order: Order) -> Experience | None:
        """The samples of a piece; None if the run has ended meanwhile."""
        samples_per_prompt = order.piece.num_samples // len(order.uids)
        rows = repeat_prompts(order.prompts, samples_per_prompt)
        future = self._start_generating(self.role, rows, order.attempt)
        future.wait()
        if self._buffer.is_closed:
            return None
        return Experience(order.piece, self.number, order.version, order.uids, rows, future)
