"""The driver's side of a rollout group: what is asked of its ranks, and what of it is there.

    client = RolloutClient(group)
    client.submit(Submission(rows))
    while client.submissions:
        for submission in client.take(seconds=0.5):   # those whose samples are all there
            samples = submission.samples()

Decoding issues no collective, so each rank is asked for samples of its own. Weights, or further
submissions, may come between two takes. A sample depends neither on who makes it nor on what is
made beside it: what a lost rank had not given is submitted to the group that comes in its place,
and of trajectories the turns that it had finished, from which they go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np
import torch

from verl_like.batch.columns import object_rows
from verl_like.batch.protocol import DataProto
from verl_like.batch.split import view_rows
from verl_like.calls.future import WorkerFuture, gather
from verl_like.errors import LostSamplesError, WorkerDiedError
from workers.columns import count_ones
from workers.rollout.batches import REQUEST
from workers.rollout.begun import BEGUN, Begun

logger = logging.getLogger(__name__)
PART_S = 1.0
"""How long a rollout that may be replaced plays before it tells which turns are finished."""
ROW_BITS = 32
"""A request's number is that of its submission, then that of its row."""


class Submission:
    """Rows that are to be generated, and those of their samples that are there."""

    def __init__(self, rows: DataProto) -> None:
        self.rows = rows
        self.begun: dict[int, Begun] = {}
        """Row -> finished turns of its trajectory, which has not ended."""
        self._numbers: list[int] = []
        self._parts: list[DataProto] = []

    def add(self, numbers: Sequence[int], samples: DataProto) -> None:
        """The samples of the rows with these numbers."""
        for number in numbers:
            self.begun.pop(number, None)
        self._numbers += numbers
        self._parts.append(samples)

    @property
    def num_there(self) -> int:
        """Samples that are there."""
        return len(self._numbers)

    @property
    def has_begun(self) -> bool:
        """Whether there is a sample, or a turn of one."""
        return bool(self._numbers or self.begun)

    @property
    def rows_there(self) -> list[int]:
        """The numbers of their rows."""
        return sorted(self._numbers)

    @property
    def missing(self) -> list[int]:
        """The numbers of the other rows."""
        return np.delete(np.arange(len(self.rows)), self._numbers).tolist()

    @property
    def num_tokens(self) -> int:
        """Drawn tokens of the samples and turns that are there."""
        parts = [int(count_ones(part, "response_mask").sum()) for part in [*self._parts]]
        return sum(parts) + sum(turns.num_drawn for turns in [*self.begun.values()])

    def in_words(self) -> str:
        """What there is of it after a loss."""
        num_begun = len(self.begun)
        words = f"{self.num_there} samples of the lost group are kept, {len(self.missing)} are made"
        return f"{words} again{f', {num_begun} of them from their last turn on' * (num_begun > 0)}."

    def samples(self) -> DataProto:
        """All samples in the order of their rows, once none is missing."""
        assert not self.missing, "a submission is taken when it is whole"
        whole = self._parts[0] if len(self._parts) == 1 else DataProto.concat(self._parts)
        if self._numbers == list(range(len(self.rows))):
            return whole
        return whole.select_idxs(np.argsort(self._numbers))


Replace = Callable[[LostSamplesError, Submission], Any]
"""Gives the group that comes in the place of the lost one; raises where there is none."""


class RolloutClient:
    """What one rollout group is asked for."""

    def __init__(self, group: Any, keeps_turns: bool = False) -> None:
        """With `keeps_turns` trajectories that a lost rank has begun go on."""
        self.group, self._keeps_turns = group, keeps_turns
        self.submissions: dict[int, Submission] = {}
        """Those that are not taken, by number."""
        self._last_number = 0
        self._num_open: dict[int, int] = {}
        """Rank -> samples that it is making."""
        self._lost: set[int] = set()
        self._sent: list[WorkerFuture] = []
        """Futures of what was submitted since the last take."""
        self._following: list[WorkerFuture] = []
        """Those of ranks that share an engine with one that was called."""

    def generate(self, rows: DataProto, replace: Replace | None = None) -> DataProto:
        """`group.generate_sequences(rows)`, also where the group loses a process meanwhile.

        Without `replace` an error then names the samples that are lost.
        """
        submission = Submission(rows)
        if self._keeps_turns and replace is not None:
            self._play(submission, replace)
        while missing := submission.missing:
            shares = self._shares(missing)
            calls = {
                rank: self._ask("generate_sequences", rank, _rows(rows, share))
                for rank, share in shares.items()
            }
            grace_s = None if replace else self.group.transport.deadlines.grace_s
            try:
                gather(*calls.values(), *self._others(), grace_s=grace_s)
            except WorkerDiedError as error:
                lost = [rank for rank, call in calls.items() if call.lost_ranks]
                if replace is None or not lost:
                    missing = [row for rank in lost or calls for row in shares[rank]]
                    raise lost_samples(submission, error, missing) from error
                logger.warning("%s The other ranks finish their samples.", error)
                for rank in calls.keys() - lost:
                    submission.add(shares[rank], calls[rank].get())
                if submission.missing:
                    found = lost_samples(submission, error, submission.missing)
                    self.group = replace(found, submission)
            else:
                for rank, call in calls.items():
                    submission.add(shares[rank], call.get())
        return submission.samples()

    def _play(self, submission: Submission, replace: Replace) -> None:
        """Take the submission in parts, so that turns are known when a rank is lost."""
        while submission.missing:
            self.submit(submission)
            try:
                while self.submissions:
                    self.take(seconds=PART_S)
            except WorkerDiedError as error:
                if not self._lost:
                    raise
                logger.warning("%s The other ranks finish their samples.", error)
                self.take_from_living()
                self.forget()
                logger.warning("rollout: %s", submission.in_words())
                if submission.missing:
                    found = lost_samples(submission, error, submission.missing)
                    self.group = replace(found, submission)

    def submit(self, *submissions: Submission) -> None:
        """Begin the samples that are missing of them, beside those that are being made.

        All of them have the same columns and meta entries.
        """
        has_begun = any(submission.begun for submission in submissions)
        rows = []
        for submission in submissions:
            self._last_number += 1
            self.submissions[self._last_number] = submission
            if submission.missing:  # else a lost group has given all of it, and it is taken next
                rows.append(self._numbered(submission, self._last_number, has_begun))
        if not rows:
            return
        asked = rows[0] if len(rows) == 1 else DataProto.concat(rows)
        for rank, share in self._shares(range(len(asked))).items():
            self._sent.append(self._ask("submit", rank, _rows(asked, share)))
            self._num_open[rank] = self._num_open.get(rank, 0) + len(share)

    @staticmethod
    def _numbered(submission: Submission, number: int, has_begun: bool) -> DataProto:
        """Its missing rows, each with its number; where one `has_begun`, with turns or None."""
        missing = submission.missing
        requests = torch.tensor(missing) + (number << ROW_BITS)
        turns = [submission.begun.get(row) for row in missing]
        begun = {BEGUN: object_rows(turns)} if has_begun else {}
        rows = _rows(submission.rows, missing).select()
        return rows.union(DataProto.from_dict({REQUEST: requests}, begun))

    def take(self, max_tokens: int | None = None, seconds: float | None = None) -> list[Submission]:
        """The submissions that are whole, once every rank has gone so far; see an engine's `take`.

        Raises `WorkerDiedError` where a rank is lost; what the others gave is there.
        """
        ranks = [rank for rank, number in self._num_open.items() if number]
        calls = {rank: self._ask("take", rank, max_tokens, seconds) for rank in ranks}
        keeps = ranks if self._keeps_turns else []
        begun = {rank: self._ask("begun", rank) for rank in keeps}
        sent, self._sent = self._sent, []
        try:
            gather(*sent, *calls.values(), *begun.values(), *self._others())
        finally:
            self._collect(calls)
            self._note_begun(begun)
        whole = [number for number, one in self.submissions.items() if not one.missing]
        return [self.submissions.pop(number) for number in whole]

    def take_from_living(self) -> None:
        """All that the ranks make which live, after another one was lost."""
        ranks = [rank for rank, num in self._num_open.items() if num and rank not in self._lost]
        calls = {rank: self._ask("take", rank) for rank in ranks}
        with suppress(WorkerDiedError):
            gather(*calls.values(), *self._others())
        self._collect(calls)

    def forget(self) -> list[Submission]:
        """What is not taken; nothing of it comes any more."""
        left = list(self.submissions.values())
        self.submissions, self._num_open, self._sent, self._lost = {}, {}, [], set()
        self._following = []
        return left

    @cached_property
    def _ranks_of_engine(self) -> int:
        num_engines = len(self.group.generate_sequences.collecting_ranks())
        return int(self.group.world_size) // num_engines

    def _ask(self, method: str, rank: int, *args: Any) -> WorkerFuture:
        """Call the first rank of an engine; its others follow."""
        others = range(rank + 1, rank + self._ranks_of_engine)
        self._following += [self.group.follow.remote_on(other) for other in others]
        call: WorkerFuture = getattr(self.group, method).remote_on(rank, *args)
        return call

    def _others(self) -> list[WorkerFuture]:
        """What the others have followed since they were last asked for."""
        following, self._following = self._following, []
        return following

    def _collect(self, calls: Mapping[int, WorkerFuture]) -> None:
        for rank, call in calls.items():
            if call.lost_ranks:
                self._lost.add(rank)
            else:
                self._add(rank, call.get())

    def _note_begun(self, calls: Mapping[int, WorkerFuture]) -> None:
        for call in [call for rank, call in calls.items() if rank not in self._lost]:
            for request, turns in call.get()[0]:
                submission = self.submissions[request >> ROW_BITS]
                submission.begun[request & ((1 << ROW_BITS) - 1)] = turns

    def _add(self, rank: int, answers: Sequence[DataProto | None]) -> None:
        samples = answers[0]
        if samples is None:
            return
        self._num_open[rank] -= len(samples)
        requests = samples.pop([REQUEST]).padded(REQUEST)
        of_submission = requests >> ROW_BITS
        for number in of_submission.unique().tolist():
            places = of_submission == number
            rows = (requests[places] & ((1 << ROW_BITS) - 1)).tolist()
            part = samples if bool(places.all()) else samples.select_idxs(places)
            self.submissions[number].add(rows, part)

    def _shares(self, rows: Sequence[int]) -> dict[int, Sequence[int]]:
        """Rank -> the rows that it makes; as many as the others."""
        ranks = self.group.generate_sequences.collecting_ranks()
        size = -(-len(rows) // len(ranks))
        shares = {rank: rows[place * size :][:size] for place, rank in enumerate(ranks)}
        return {rank: share for rank, share in shares.items() if share}


def _rows(rows: DataProto, numbers: Sequence[int]) -> DataProto:
    first, last = numbers[0], numbers[-1]
    if last - first == len(numbers) - 1:  # they ascend: a share of rows that follow each other
        return view_rows(rows, first, last + 1)
    return rows.select_idxs(list(numbers))


def lost_samples(
    submission: Submission, error: Exception, missing: Sequence[int]
) -> LostSamplesError:
    """The error that names the samples that are not there."""
    rows = submission.rows.select_idxs(list(missing))
    uids, indices = rows.non_tensor_batch["uid"], rows.padded("sample_index").tolist()
    names = [f"{uid}/{index}" for uid, index in zip(uids, indices, strict=True)]
    return LostSamplesError(
        f"rollout: {error} Of {len(submission.rows)} samples {len(names)} (uid/index) were not "
        f"finished: {', '.join(names)}. Generating them again gives the same samples."
    )
