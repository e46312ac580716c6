"""Run sample requests on the rollout; requests with the same snapshot and settings are batched.

    loop.add(request)
    while loop.has_work:
        loop.pump(seconds=0.2)          # one slice; finished requests get their results

Requests of any client may join a running batch of their kind. With `rollout.name=native` in
float32, a sample does not depend on the other requests in its batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from trainer.serve.bodies import Array, SampleBody, sample_output
from trainer.serve.checkpoints import SavedPath
from trainer.serve.pending import PendingResult
from trainer.serve.rows import TARGETS, Datum, Limits
from trainer.serve.training_ops import TrainingOps
from verl_like.batch.protocol import DataProto
from verl_like.batch.ragged import RaggedTensor
from verl_like.errors import BatchError
from workers.columns import IMAGES
from workers.rollout.base import SamplingParams
from workers.rollout.client import RolloutClient, Submission

if TYPE_CHECKING:
    from workers.images import ImageRef

OTHER_KIND_WAIT_S = 2.0
"""No more requests join a batch once a request of another kind has waited this long."""
GATHER_S, LONGEST_GATHER_S = 0.01, 0.2
"""Seconds from the last request of a batch to its start, and the most from the first request."""
MIN_TOKEN_LIMIT = 16
"""Smallest token limit of a batch; limits are powers of two, so that more requests run together."""

NO_LOG_PROB = -99999.0
"""The protocol's log-prob of a place without likeliest tokens, whose ids are 0."""
NO_SAMPLE: tuple[ArrayLike, ArrayLike, str] = (), (), "length"


@dataclass
class ServedSampler:
    """A frozen snapshot from which a client samples: a state, and where it can be loaded from."""

    sampler_id: str
    state: str
    role: str = "actor"
    """The role that computes log-probs; only the actor also samples."""
    path: SavedPath | None = None
    shown_path: str | None = None
    """The path in the client's request."""


@dataclass(eq=False)
class SampleRequest:
    """A checked request for samples of a prompt."""

    sampler: ServedSampler
    body: SampleBody
    prompt: list[int]
    images: Sequence[ImageRef]
    max_tokens: int
    params: SamplingParams
    """The sampling settings of the batch, with the token limit of the batch."""
    targets: Array | None
    """Ids whose log-probs are wanted, [prompt - 1, K], with -1 for none."""
    prompt_log_probs: Array
    """NaN until they are computed."""
    target_log_probs: Array | None = None
    top_tokens: tuple[Array, Array] | None = None
    """The ids and log-probs of the likeliest tokens, [prompt, k]."""
    pending: PendingResult = field(init=False)
    sequences: dict[int, tuple[ArrayLike, ArrayLike, str]] = field(default_factory=dict)
    """Maps a sample's number to (tokens, log-probs, finish reason); empty without sampling."""
    since: float = field(default_factory=time.monotonic)

    @classmethod
    def of(
        cls, body: SampleBody, sampler: ServedSampler, limits: Limits, eos: tuple[int, ...]
    ) -> SampleRequest:
        """Check a request against the server's limits; `eos` are the default stop tokens."""
        chunks = [getattr(chunk, "tokens", chunk) for chunk in body.prompt.chunks]
        prompt, images = limits.joined(chunks, "the prompt")
        samples = sampler.role == "actor"
        limits.check_tokens(np.asarray(prompt), "the prompt", limits.prompt if samples else None)
        if not samples and not body.prompt_logprobs:
            raise BatchError(f"the role {sampler.role} does not sample. Use compute_logprobs.")
        settings, last_n = body.sampling_params, body.prompt_logprobs_last_n
        most = settings.max_tokens or limits.response
        if most > limits.response:
            raise BatchError(
                f"max_tokens={most} exceeds the {limits.response} tokens of a response "
                "(data.max_response_length)."
            )
        if last_n is not None and last_n >= len(prompt):
            raise BatchError(
                f"prompt_logprobs_last_n={last_n} must be below the number of prompt tokens, "
                f"{len(prompt)}."
            )
        targets = None
        if body.target_prompt_logprobs is not None:
            rows, width = body.target_prompt_logprobs.shape
            targets = np.asarray(body.target_prompt_logprobs.data, "<i8")
            if rows != len(prompt) - 1 or targets.size != rows * width or not targets.size:
                raise BatchError(
                    f"target_prompt_logprobs has {targets.size} values and the shape [{rows}, "
                    f"{width}], but this prompt needs [{len(prompt) - 1}, K]."
                )
            targets = targets.reshape(rows, width)
            limits.check_tokens(np.maximum(targets, 0), "target_prompt_logprobs")
        stops: Sequence[int | str] = eos if settings.stop is None else settings.stop
        longest = max(MIN_TOKEN_LIMIT, 1 << (most - 1).bit_length())
        params = SamplingParams(
            temperature=settings.temperature or 1.0,
            do_sample=settings.temperature > 0,
            top_k=settings.top_k or -1,
            top_p=settings.top_p,
            max_tokens=min(longest, limits.response),
            stop_token_ids=tuple(stop for stop in stops if isinstance(stop, int)),
            stop_strings=tuple(stop for stop in stops if isinstance(stop, str)),
        )
        unknown = np.full(len(prompt), np.nan)
        return cls(sampler, body, prompt, images, most, params, targets, unknown)

    @property
    def kind(self) -> tuple[Any, ...]:
        """The role, state and settings; requests with equal ones may run together.

        After images, a response also ends at an image token.
        """
        return self.sampler.role, self.sampler.state, self.params, bool(self.images)

    def datum(self, targets: Array) -> Datum:
        """Return the prompt without its last token, with these targets."""
        return Datum(self.prompt[:-1], {TARGETS: targets}, self.images)

    @property
    def noise_name(self) -> str:
        """Name of the random noise, which does not depend on other clients."""
        seed = self.body.sampling_params.seed
        sequence = self.sampler.sampler_id.rpartition(":")[2]
        return f"{sequence}/{self.body.seq_id}" if seed is None else f"seed {seed}"

    def finish(self) -> None:
        """Send the client its samples, in order."""
        samples = [self.sequences.get(n, NO_SAMPLE) for n in range(self.body.num_samples)]
        prompt_log_probs = self.prompt_log_probs if self.body.prompt_logprobs else None
        self.pending.resolve(
            sample_output(samples, prompt_log_probs, self.target_log_probs, self.top_tokens)
        )


class Batch(Submission):
    """Requests that start together; each gets its result when all its samples are done."""

    def __init__(self, requests: Sequence[SampleRequest], width: int, pad: int):
        self.requests = requests
        self._of_row = [(r, place) for r in requests for place in range(r.body.num_samples)]
        prompts = {request: torch.tensor(request.prompt) for request in requests}
        ids = RaggedTensor.from_rows(
            [prompts[request] for request, _ in self._of_row], width, at_end=True, fill=pad
        )
        columns: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": ids.with_values(torch.ones_like(ids.values)),
            "sample_index": torch.tensor([place for _, place in self._of_row]),
            "end_at": torch.tensor([request.max_tokens for request, _ in self._of_row]),
        }
        others: dict[str, Any] = {"uid": [request.noise_name for request, _ in self._of_row]}
        if requests[0].images:
            others[IMAGES] = [request.images for request, _ in self._of_row]
        meta = {"sampling": vars(requests[0].params), "pad_token_id": pad}
        super().__init__(DataProto.from_dict(columns, others, meta))

    def add(self, numbers: Sequence[int], samples: DataProto) -> None:
        """Add the samples of the rows with these numbers, and finish complete requests."""
        super().add(numbers, samples)
        columns: dict[str, Any] = samples.columns
        tokens, log_probs = (columns[n].rows() for n in ("responses", "rollout_log_probs"))
        reasons = samples.non_tensor_batch["finish_reason"]
        rows = zip(numbers, tokens, log_probs, reasons, strict=True)
        for number, ids, values, reason in rows:
            request, place = self._of_row[number]
            request.sequences[place] = ids.numpy(), values.numpy(), str(reason)
            if len(request.sequences) == request.body.num_samples:
                request.finish()


class SamplingLoop:
    """The queue of sample requests, and the batches on the rollout; used by one thread only."""

    def __init__(self, ops: TrainingOps, pad: int) -> None:
        self._ops, self._pad = ops, pad
        self._client = RolloutClient(ops.rollout)
        self._waiting: list[SampleRequest] = []

    def add(self, request: SampleRequest) -> None:
        """Queue a request."""
        self._waiting.append(request)

    @property
    def has_work(self) -> bool:
        """True if a request waits or runs."""
        return bool(self._waiting or self._running)

    @property
    def _running(self) -> list[SampleRequest]:
        """The requests of all batches on the rollout."""
        batches: Any = self._client.submissions.values()
        return [request for batch in batches for request in batch.requests]

    def pump(self, seconds: float) -> None:
        """Start requests, and let the rollout work for this many seconds, or until it is done."""
        if self._waiting and not self._running:
            now, oldest, newest = time.monotonic(), self._waiting[0].since, self._waiting[-1].since
            if now - newest < GATHER_S and now - oldest < LONGEST_GATHER_S:
                time.sleep(GATHER_S / 4)  # further requests are likely to join the batch
                return
        batch = self._next_batch()
        try:
            if batch:
                self._score_prompts(batch)
        except Exception as error:  # noqa: BLE001 - it goes to the clients that wait
            for request in batch:
                request.pending.fail(error)
            return
        try:
            if batch:
                self._start(batch)
            if self._running:
                self._client.collect(seconds=seconds)
        except Exception as error:  # noqa: BLE001 - it goes to the clients that wait
            self._fail_all(batch, error)

    def _next_batch(self) -> list[SampleRequest]:
        """Take the waiting requests that may run now; all are of one kind."""
        if not self._waiting:
            return []
        running, late = self._running, time.monotonic() - OTHER_KIND_WAIT_S
        scoring = [request for request in self._waiting if request.sampler.role != "actor"]
        kind = (scoring or running or self._waiting)[0].kind
        waits_long = any(r.kind != kind and r.since < late for r in self._waiting)
        if running and not scoring and waits_long:
            return []
        batch = [request for request in self._waiting if request.kind == kind]
        self._waiting = [request for request in self._waiting if request.kind != kind]
        return batch

    def _start(self, batch: Sequence[SampleRequest]) -> None:
        """Send requests to the rollout; those to a role that only scores are already complete."""
        if batch[0].sampler.role != "actor":
            for request in batch:
                request.finish()
            return
        if not self._running:
            self._ops.send_to_rollout(batch[0].sampler.state)
        width = self._ops.config.data.max_prompt_length
        self._client.submit(Batch(batch, width, self._pad))

    def _score_prompts(self, batch: Sequence[SampleRequest]) -> None:
        """Compute log-probs, values or scores of prompts for the requests that ask for them."""
        sampler = batch[0].sampler
        if sampler.path is not None:
            self._ops.restore_state(sampler.state, sampler.path)
        score = partial(self._ops.score, sampler.state, sampler.role)
        scoring = [r for r in batch if r.body.prompt_logprobs and len(r.prompt) > 1]
        scores = score([r.datum(np.array(r.prompt[1:])) for r in scoring])
        for request, row in zip(scoring, scores, strict=True):
            count = request.body.prompt_logprobs_last_n or len(row)
            request.prompt_log_probs[-count:] = row[-count:]
        for request in batch:
            if request.targets is not None:
                (log_probs,) = score([request.datum(np.maximum(request.targets, 0))])
                request.target_log_probs = np.where(request.targets < 0, np.nan, log_probs)
            k = request.body.topk_prompt_logprobs
            if k:
                ids = np.zeros((len(request.prompt), k))
                log_probs = np.full(ids.shape, NO_LOG_PROB)
                if len(request.prompt) > 1:
                    tokens = request.datum(np.array(request.prompt[1:]))
                    top = self._ops.top_tokens(sampler.state, sampler.role, tokens, k)
                    count = request.body.prompt_logprobs_last_n or len(request.prompt) - 1
                    ids[-count:], log_probs[-count:] = (part[-count:] for part in top)
                request.top_tokens = ids, log_probs

    def _fail_all(self, batch: Sequence[SampleRequest], error: Exception) -> None:
        """Fail the batch and all running requests, and let the rollout drop those that run."""
        for request in [*batch, *self._running]:
            request.pending.fail(error)
        if self._running:
            self._ops.rollout.abort()
        self._client = RolloutClient(self._ops.rollout)
