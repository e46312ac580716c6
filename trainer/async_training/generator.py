"""A generator: a thread of the driver that keeps one rollout group generating.

    while True:
        take newer weights, if there are any
        submit chunks, if the queue has room for them
        take what is finished; a chunk with all its samples goes to the queue

The rows of a validation form chunks, too. During a validation, generators get no other chunks.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from itertools import groupby
from typing import Any

from trainer.async_training.activity import Activity
from trainer.async_training.buffer import ExperienceBuffer, WeightVersion
from trainer.async_training.samplers import SampleChunk
from trainer.async_training.topology import CRITIC_COPY, generator_role, role_on
from trainer.async_training.weights import WeightFeed
from trainer.rollouts.rollouts import join_results, with_responses
from trainer.run_state import Metrics
from verl_like.batch.protocol import DataProto
from verl_like.calls.future import gather
from verl_like.calls.result import CallResult
from verl_like.errors import WorkerDiedError
from workers.columns import rm_column, select_reads
from workers.config import has_environment
from workers.rollout.client import RolloutClient, Submission

SLICE_S = 0.25
"""Shortest time limit of a take. New weights, or the end of the run, wait until the take ends."""
TAKES_PER_S = 250
"""Maximum takes per second over the ranks of all generators; every take is a call by the driver."""
METHODS = {"ref": "compute_ref_log_prob", CRITIC_COPY: "compute_values"}
"""Maps a role to its scoring method. All other scoring roles are reward models."""
REWARD_METHOD = "compute_rm_score"
MADE_BY_GENERATORS = frozenset(
    ["generate_sequences", "submit", "take", REWARD_METHOD, *METHODS.values()]
)


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

        With `max_tokens_per_call`, a take samples at most that many tokens of each response and
        does not wait for slow environments. New chunks may then start before others are finished,
        and weights arrive between two takes.
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
        slice_s = max(SLICE_S, num_ranks / TAKES_PER_S)
        self._take_s = slice_s if has_environment(config) or not self._max_tokens else None
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
        """Generate until the buffer closes: take weights, submit prompts and take finished samples.

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
                        self._take()
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

    def _take(self) -> None:
        """Generate for one take, and put finished chunks into the queue.

        With `score_on=generator`, score their samples first.
        """
        with self._activity.busy("generate"):
            finished = self._client.take(self._max_tokens, self._take_s)
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
                self._is_lost = not self._places.lose(self._number, error, num_lost)
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
