"""The samples of a detached run's steps, from makers' threads, the queue and batches that return.

With `update_steps` U and `train_epochs` E the steps come in rounds of U x E: U fresh batches in
the order in which they arrive, then the same ones E - 1 times over, each time in a new order.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.detached.buffer import Demand, ExperienceBuffer
from trainer.detached.maker import Maker
from trainer.detached.samplers import Experience
from trainer.ppo.sample import over_draws
from trainer.record import Metrics
from trainer.rollouts.samples import concat_rows
from verl_like.batch.protocol import DataProto
from verl_like.errors import few
from workers.columns import count_ones

END_S = 10.0
"""Seconds that the end of a run waits for makers; a failed run reports soon."""


@dataclass(frozen=True)
class Rounds:
    """How often a batch is trained on, and how many batches belong to a weight version."""

    update_steps: int
    train_epochs: int
    seed: int

    @property
    def length(self) -> int:
        """Steps of a round; a version of the weights ends it."""
        return self.update_steps * self.train_epochs

    def place(self, step: int) -> tuple[int, int, int]:
        """(round, epoch, batch) of a step, which is 1 or more, all counted from 0."""
        number, place = divmod(step - 1, self.length)
        return number, *divmod(place, self.update_steps)

    def order(self, number: int, epoch: int) -> list[int]:
        """The order of a round's batches in that epoch: as they came in the first."""
        if epoch == 0:
            return list(range(self.update_steps))
        chosen = np.random.default_rng([self.seed, number, epoch]).permutation(self.update_steps)
        return [int(batch) for batch in chosen]

    def num_fresh(self, steps: int) -> int:
        """Fresh batches of so many steps from the run's first on."""
        whole, rest = divmod(steps, self.length)
        return whole * self.update_steps + min(rest, self.update_steps)

    def ends_with(self, step: int) -> bool:
        """Whether this step is the last one of its round."""
        return step % self.length == 0


class DetachedSource:
    """Batches that were made before they are asked for: makers' threads, the buffer, and reuse.

    source.begin(step, num_steps)
    if (again := source.batch_again()) is None:
        batch = source.draw(attempt)      # as often as the step needs
        source.keep(batch)                # with its scores
    """

    def __init__(self, buffer: ExperienceBuffer, makers: Sequence[Maker], rounds: Rounds) -> None:
        self.buffer, self._makers, self.rounds = buffer, list(makers), rounds
        self._step = 0
        self._num_steps: int | None = None
        self._drawn: list[str] = []
        self._read: list[Metrics] = []
        self._num_tokens = 0
        self._kept: list[DataProto] = []
        self.makers_of: dict[str, int] = {}
        """Uid -> who made its samples, of the batches of a round."""
        self._queued: list[Experience] = []
        self._has_started = False

    def begin(self, step: int, num_steps: int | None) -> None:
        """Begin the step, of `num_steps` in all; None: nobody knows how many samples they need."""
        self.start()
        self._step, self._num_steps = step, num_steps
        _, epoch, place = self.rounds.place(step)
        if epoch == place == 0:
            self._kept, self.makers_of = [], {}
        self._drawn, self._read, self._num_tokens = [], [], 0

    def batch_again(self) -> DataProto | None:
        """A batch of this round that comes again in this step; None in the round's first epoch."""
        number, epoch, place = self.rounds.place(self._step)
        return self._kept[self.rounds.order(number, epoch)[place]].select() if epoch else None

    def metrics(self) -> Metrics:
        """How the step's batch was drawn, or which batch has come again."""
        number, epoch, place = self.rounds.place(self._step)
        found = {"detached/drawn_tokens": float(self._num_tokens)}
        if self.rounds.train_epochs > 1:
            batch = self.rounds.order(number, epoch)[place]
            found |= {"detached/reused": float(epoch), "detached/batch_of_round": float(batch)}
        if epoch == 0:
            found["detached/queue_depth"] = float(self.buffer.depth)
        return over_draws(self._read) | found

    def in_words(self) -> str:
        """The samples of the step, for an error message."""
        if not self._drawn:
            return f"step {self._step} has no samples yet"
        named = few(self._drawn)
        return f"step {self._step} is on the samples of uid {named}"

    def keep(self, batch: DataProto) -> None:
        """The batch of this step with its scores, for the epochs in which it comes again."""
        _, epoch, _ = self.rounds.place(self._step)
        if self.rounds.train_epochs > 1 and epoch == 0:
            self._kept.append(batch.select())

    def state_dict(self) -> dict[str, Any]:
        """The place in the prompts, the ledger, and what is queued, but for its samples."""
        state, self._queued = self.buffer.state_dict()
        facts = [
            {"piece": one.place(), "maker": one.maker, "version": one.version, "uids": one.uids}
            for one in self._queued
        ]
        return state | {"queued": facts}

    def write_samples(self, folder: Path) -> None:
        """The samples that were queued at the last `state_dict`, a file a piece."""
        folder.mkdir()
        for one in self._queued:
            assert one.samples is not None, "what is queued is made"
            one.samples.save_to_disk(folder / f"{one.number}.safetensors")

    def load_state_dict(self, state: dict[str, Any], folder: Path | None) -> None:
        """Go on there: with the samples that were queued if they are in `folder`, else they are
        made again.
        """
        queued = []
        for facts in state.pop("queued"):
            one = Experience(**facts.pop("piece"), **facts)
            path = None if folder is None else folder / f"{one.number}.safetensors"
            if path is not None and path.is_file():
                one.samples = DataProto.load_from_disk(path)
            queued.append(one)
        self.buffer.load_state_dict(state, queued)

    def close(self) -> None:
        """Begin nothing more; what is being made is waited for a little."""
        self.buffer.close()
        until = time.monotonic() + END_S
        for maker in self._makers:
            maker.wait_for_end(max(until - time.monotonic(), 0.0))

    def start(self) -> None:
        """The makers' threads, the first time."""
        for maker in [] if self._has_started else self._makers:
            maker.start()
        self._has_started = True

    def draw(self, attempt: int) -> DataProto:
        """The samples of one draw; the next attempt has other prompts."""
        _, _, place = self.rounds.place(self._step)
        fresh = self.rounds.num_fresh(self._step) - 1
        sizes = self.buffer.stream.num_samples
        rest = range(fresh + 1, fresh + self.rounds.update_steps - place)
        rest_of_run = None
        if self._num_steps is not None:
            total = self.rounds.num_fresh(self._num_steps)
            rest = range(rest.start, min(rest.stop, total))
            # no further than makers may go ahead: the bound of staleness is the lower one there
            ahead = (self.buffer.settings.max_staleness + 1) * self.rounds.update_steps
            rest_of_run = sum(map(sizes, range(fresh + 1, min(total, fresh + 1 + ahead))))

        rest_of_version = sum(map(sizes, rest))
        experiences = self.buffer.take(Demand(sizes(fresh), attempt, rest_of_version, rest_of_run))
        experiences.sort(key=lambda one: (one.rank, one.number))
        self.makers_of |= {uid: one.maker for one in experiences for uid in one.uids}
        self._drawn += [uid for one in experiences for uid in one.uids]
        self._read += [one.metrics for one in experiences]
        drawn = concat_rows([one.samples for one in experiences if one.samples is not None])
        self._num_tokens += int(count_ones(drawn, "response_mask").sum())
        return drawn
