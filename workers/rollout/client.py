"""The driver's client of a rollout group: it submits rows to ranks and takes their samples.

    client = RolloutClient(group)
    client.submit(Submission(rows))
    while client.submissions:
        for submission in client.collect(seconds=0.5):   # the submissions that are complete
            samples = submission.samples()

Engines run independently of each other. Between two takes, you can sync weights and submit more
rows. A sample's noise depends neither on its rank nor on the rest of the batch. So if a group is
lost, its replacement generates the unfinished samples again from their prompts and the same noise.
In float32 on a CPU, native and hf then sample the same tokens of a dense model again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from verl_like.batch.protocol import DataProto
from verl_like.batch.split import view_rows
from verl_like.calls.future import WorkerFuture, gather
from verl_like.errors import LostSamplesError, WorkerDiedError
from workers.columns import PLAYERS, split_player_uid
from workers.rollout.sample import REQUEST

logger = logging.getLogger(__name__)
ROW_BITS = 32
"""Low bits of a request number that hold the row's number; higher bits hold the submission's."""


class Submission:
    """Rows for which samples are generated, and the samples that have arrived."""

    def __init__(self, rows: DataProto) -> None:
        self.rows = rows
        self._numbers: list[int] = []
        self._parts: list[DataProto] = []

    def add(self, numbers: Sequence[int], samples: DataProto) -> None:
        """Add the samples of the rows with these numbers."""
        self._numbers += numbers
        self._parts.append(samples)

    @property
    def num_samples(self) -> int:
        """Number of samples that have arrived."""
        return len(self._numbers)

    @property
    def missing(self) -> list[int]:
        """The numbers of the rows whose samples have not arrived."""
        return np.delete(np.arange(len(self.rows)), self._numbers).tolist()

    def samples(self) -> DataProto:
        """Return all samples in the order of the rows; none may be missing."""
        assert not self.missing, "`collect` returns only complete submissions"
        samples = self._parts[0] if len(self._parts) == 1 else DataProto.concat(self._parts)
        if self._numbers == list(range(len(self.rows))):
            return samples
        return samples.select_idxs(np.argsort(self._numbers))


Replace = Callable[[LostSamplesError, Submission], Any]
"""A function that returns a new group to use instead of the lost one, or raises the error."""


class RolloutClient:
    """The client of one rollout group."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.submissions: dict[int, Submission] = {}
        """The submissions that `collect` has not returned yet, by number."""
        self._last_number = 0
        self._num_open: dict[int, int] = {}
        """By rank: the number of samples that it is generating."""
        self._sent: list[WorkerFuture] = []
        """Futures of the `submit` calls since the last `collect`."""
        self._following: list[WorkerFuture] = []
        """Futures of `follow` calls, on the other ranks of the engines that were called."""

    def generate(self, rows: DataProto, replace: Replace | None = None) -> DataProto:
        """Generate the rows' samples, even if the group loses a process.

        In that case `replace` provides a new group, which generates the missing samples again.
        Without `replace`, an error names the lost samples.
        """
        submission = Submission(rows)
        while missing := submission.missing:
            shares = self._shares(missing, rows)
            calls = {
                rank: self._ask("generate_sequences", rank, _rows(rows, share))
                for rank, share in shares.items()
            }
            grace_s = None if replace else self.group.transport.deadlines.grace_s
            following, self._following = self._following, []
            try:
                gather(*calls.values(), *following, grace_s=grace_s)
            except WorkerDiedError as error:
                lost = [rank for rank, call in calls.items() if call.lost_ranks]
                if replace is None or not lost:
                    missing = [row for rank in lost or calls for row in shares[rank]]
                    raise lost_samples(submission, error, missing) from error
                logger.warning("%s The other ranks finish their samples.", error)
                for rank in calls.keys() - lost:
                    submission.add(shares[rank], calls[rank].get())
                if submission.missing:
                    lost_error = lost_samples(submission, error, submission.missing)
                    self.group = replace(lost_error, submission)
            else:
                for rank, call in calls.items():
                    submission.add(shares[rank], call.get())
        return submission.samples()

    def submit(self, *submissions: Submission) -> None:
        """Start these submissions; earlier ones continue.

        All of them must have the same columns and meta entries.
        """
        rows = []
        for submission in submissions:
            self._last_number += 1
            self.submissions[self._last_number] = submission
            numbers = torch.arange(len(submission.rows)) + (self._last_number << ROW_BITS)
            rows.append(submission.rows.select().union(DataProto.from_dict({REQUEST: numbers})))
        requests = rows[0] if len(rows) == 1 else DataProto.concat(rows)
        for rank, share in self._shares(range(len(requests)), requests).items():
            self._sent.append(self._ask("submit", rank, _rows(requests, share)))
            self._num_open[rank] = self._num_open.get(rank, 0) + len(share)

    def collect(
        self, max_tokens: int | None = None, seconds: float | None = None
    ) -> list[Submission]:
        """Let every rank with unfinished samples generate; return the complete submissions.

        The limits are those of an engine's `collect`. If a rank is lost, raise `WorkerDiedError`;
        all submissions of the group are then lost.
        """
        ranks = [rank for rank, number in self._num_open.items() if number]
        calls = {rank: self._ask("collect", rank, max_tokens, seconds) for rank in ranks}
        sent, self._sent, following, self._following = self._sent, [], self._following, []
        gather(*sent, *calls.values(), *following)
        for rank, call in calls.items():
            samples = call.get()[0]
            if samples is None:
                continue
            self._num_open[rank] -= len(samples)
            requests = samples.pop([REQUEST]).padded(REQUEST)
            of_submission = requests >> ROW_BITS
            for number in of_submission.unique().tolist():
                places = of_submission == number
                rows = (requests[places] & ((1 << ROW_BITS) - 1)).tolist()
                part = samples if bool(places.all()) else samples.select_idxs(places)
                self.submissions[number].add(rows, part)
        complete = [number for number, rows in self.submissions.items() if not rows.missing]
        return [self.submissions.pop(number) for number in complete]

    @cached_property
    def _ranks_of_engine(self) -> int:
        num_engines = len(self.group.generate_sequences.collecting_ranks())
        return int(self.group.world_size) // num_engines

    def _ask(self, method: str, rank: int, *args: Any) -> WorkerFuture:
        """Call the first rank of an engine; the engine's other ranks follow."""
        others = range(rank + 1, rank + self._ranks_of_engine)
        self._following += [self.group.follow.remote_on(other) for other in others]
        call: WorkerFuture = getattr(self.group, method).remote_on(rank, *args)
        return call

    def _shares(self, rows: Sequence[int], batch: DataProto) -> dict[int, Sequence[int]]:
        """Divide the rows evenly over the ranks; the players of an environment share a rank."""
        ranks = self.group.generate_sequences.collecting_ranks()
        size = -(-len(rows) // len(ranks))
        cuts = [min(place * size, len(rows)) for place in range(len(ranks) + 1)]
        if PLAYERS in batch.non_tensor_batch:
            uids, indices = batch.non_tensor_batch["uid"], batch.padded("sample_index").tolist()
            environments = [(split_player_uid(str(uids[row]))[0], indices[row]) for row in rows]
            for number, cut in enumerate(cuts):
                while 0 < cut < len(rows) and environments[cut] == environments[cut - 1]:
                    cut += 1
                cuts[number] = cut
        shares = {rank: rows[cuts[n] : cuts[n + 1]] for n, rank in enumerate(ranks)}
        return {rank: share for rank, share in shares.items() if share}


def _rows(rows: DataProto, numbers: Sequence[int]) -> DataProto:
    first, last = numbers[0], numbers[-1]
    if last - first == len(numbers) - 1:  # consecutive
        return view_rows(rows, first, last + 1)
    return rows.select_idxs(list(numbers))


def lost_samples(
    submission: Submission, error: Exception, missing: Sequence[int]
) -> LostSamplesError:
    """Return an error that names the missing samples."""
    rows = submission.rows.select_idxs(list(missing))
    uids, indices = rows.non_tensor_batch["uid"], rows.padded("sample_index").tolist()
    names = [f"{uid}/{index}" for uid, index in zip(uids, indices, strict=True)]
    return LostSamplesError(
        f"rollout: {error} Of {len(submission.rows)} samples {len(names)} (uid/index) were not "
        f"finished: {', '.join(names)}. Generate them again: the noise is the same, so native and "
        "hf sample the same tokens in float32 on a CPU, except with a mixture of experts."
    )
