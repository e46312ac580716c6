"""`Sample`, a prompt with its response so far, and its conversion from and to rows of a batch.

Engines accept samples, and return them. Each row has a hash of the tokens that the engine read and
sampled (`sample_hash`). The trainer checks it before the update (`check_sample_hashes`), so a
tokenizer, stage or hook cannot change these tokens unnoticed, unless it drops the column. The hash
covers the prompt, the response, the weight version of each token (which also marks observed
tokens), where segments start, and the bytes of the images. It does not cover other columns, such as
log-probs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from verl_like.batch.protocol import DataProto
from verl_like.batch.ragged import ColumnValues, RaggedTensor
from verl_like.errors import BatchError, RolloutError
from workers.columns import IMAGES, ROUTED, read_columns, require, token_counts

if TYPE_CHECKING:
    from workers.images import ImageRef


LENGTH_LIMIT = "length"
"""The `finish_reason` of a sample that reached its length limit before a stop token."""
UNFINISHED = "abort"
"""The `finish_reason` of a sample that an engine can continue."""
OBSERVED = -1
"""The version of a token that was observed, not sampled."""
LONG_OBSERVATION = 128
"""The native engine reads longer runs of observed tokens in one pass.

It reads shorter runs token by token, unless `num_read_at_once` includes them.
"""


@dataclass(frozen=True, eq=False)
class States:
    """Stored keys and values of samples whose turns ended in the same decode step."""

    layers: Sequence[tuple[Tensor, Tensor] | None]
    """By layer: keys and values, each [samples, heads, tokens, head size]."""

    @property
    def num_bytes(self) -> int:
        """Size of all layers in bytes."""
        return sum(part.nbytes for layer in self.layers if layer for part in layer)


@dataclass(eq=False)
class CachedStates:
    """Keys and values of one sample, which an engine stores for the sample's next turn."""

    states: States | None = None
    """None before they are stored, and once the next turn uses them."""
    row: int = 0
    """The sample's row in `states`."""
    read: Sequence[int] = ()
    """The tokens whose keys and values are stored: the prompt, and the start of the response."""
    version: int | None = None
    """The version of the weights that computed them."""
    shift: int = 0
    """Shift of later positions by the images among the tokens (Qwen-VL)."""


@dataclass(frozen=True)
class Sample:
    """A prompt and its response so far.

    Example:

        Sample(prompt=[5, 6, 7], seed=sample_seed(0, "12-0", 3), name="12-0/3")

    Args:
        prompt: token ids of the prompt, without padding.
        seed: seed of its sampling noise (`sample_seed`).
        name: the sample's name in messages.
        tokens: token ids of the response so far, including the stop token if there is one.
        log_probs: one log-prob per token of the response.
        versions: version of the weights that sampled each token; -1 for a token that was observed.
        finish_reason: why the response ended: "stop" or "length"; "" before generation has started.
            "abort" marks an unfinished response, which continues if you submit it again.
        truncated_log_probs: if requested, log-probs under the truncated distribution that was
            sampled from.
        end_at: maximum response tokens of this sample; None uses the limit of `SamplingParams`.
        stop_strings: texts that end this response, in addition to those of `SamplingParams`.
        segments: positions in the response at which new segments begin. The policy reads each
            segment without the tokens before it.
        routed_experts: if requested, the routers' choices for the tokens read so far, [tokens,
            layers, choices]. If new weights have read a token again, it has their choices, which
            match its keys and values.
        cached: keys and values for the next turn; the engine fills an empty `CachedStates`.
        images: references to the images, in order.
        first_image: the number of the last segment's first image.
    """

    prompt: Sequence[int]
    seed: int = 0
    name: str = "sample"
    tokens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    log_probs: Tensor = field(default_factory=lambda: torch.empty(0))
    versions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    finish_reason: str = ""
    truncated_log_probs: Tensor | None = None
    end_at: int | None = None
    stop_strings: tuple[str, ...] = ()
    segments: tuple[int, ...] = ()
    routed_experts: Tensor | None = None
    cached: CachedStates | None = None
    images: tuple[ImageRef, ...] = ()
    first_image: int = 0

    def with_response(
        self,
        tokens: Tensor,
        log_probs: Tensor,
        versions: Tensor,
        finish_reason: str,
        routed_experts: Tensor | None = None,
    ) -> Sample:
        """Return the sample with this response.

        Args:
            tokens: the response; it is copied, like the next two.
            log_probs: [tokens, 1 or 2]: the policy's, then those of the truncated distribution.
            versions: the version of the weights that generated each token.
            finish_reason: why the response ended, as in the class.
            routed_experts: the experts of each token, if the engine records them.
        """
        policy, *truncated = (column.clone() for column in log_probs.unbind(dim=1))
        return replace(
            self,
            tokens=tokens.clone(),
            log_probs=policy,
            versions=versions.clone(),
            finish_reason=finish_reason,
            truncated_log_probs=truncated[0] if truncated else None,
            routed_experts=routed_experts,
        )

    @property
    def is_sampled(self) -> Tensor:
        """The loss mask, [tokens]: True for tokens that the policy sampled."""
        return self.versions >= 0

    @property
    def visible_ids(self) -> list[int]:
        """The token ids that the policy reads before it samples the next token."""
        tokens: list[int] = self.tokens.tolist()
        return tokens[self.segments[-1] :] if self.segments else [*self.prompt, *tokens]

    @property
    def stop_token(self) -> int | None:
        """The last token of a response that stopped, even at a stop string; otherwise None."""
        return int(self.tokens[-1]) if self.finish_reason == "stop" else None

    def with_observed(
        self,
        ids: Sequence[int],
        begins_segment: bool,
        end_at: int | None,
        images: Sequence[ImageRef] = (),
    ) -> Sample:
        """Return the sample with observed tokens appended, so that an engine can continue it.

        Args:
            ids: the observed tokens.
            begins_segment: the tokens begin a new segment.
            end_at: the response can grow to this many tokens.
            images: the images among the tokens.
        """
        gaps = torch.full((len(ids),), torch.nan)
        observed = Sample(
            [],
            tokens=torch.tensor(ids, dtype=torch.long),
            log_probs=gaps,
            versions=torch.full((len(ids),), OBSERVED, dtype=torch.int32),
            truncated_log_probs=gaps,
        )
        extended = replace(
            self._followed_by(observed),
            finish_reason=UNFINISHED,
            end_at=end_at,
            images=(*self.images, *images),
        )
        if not begins_segment:
            return extended
        segments = (*self.segments, len(self.tokens))
        return replace(extended, segments=segments, first_image=len(self.images))

    def last_segment(self, max_tokens: int) -> Sample:
        """Return the last segment as a separate sample, which an engine can continue."""
        if not self.segments:
            return self
        begin, routed = self.segments[-1], self.routed_experts
        return replace(
            self._between(begin + 1, None),
            prompt=self.tokens[begin : begin + 1].tolist(),
            seed=sample_seed(self.seed, "segment", len(self.segments)),  # positions restart at 0
            routed_experts=None if routed is None else routed[len(self.prompt) + begin :],
            end_at=self.longest(max_tokens) - begin - 1,
            segments=(),
            images=self.images[self.first_image :],
            first_image=0,
        )

    def with_last_segment(self, segment: Sample) -> Sample:
        """Return the sample with its last segment replaced by the engine's result."""
        if not self.segments:
            return segment
        merged = self._between(0, self.segments[-1] + 1)._followed_by(segment)
        before, after = self.routed_experts, segment.routed_experts
        routed = None
        if before is not None and after is not None:
            begin = len(self.prompt) + self.segments[-1]
            # the last tokens of the previous segment were not read, so their choices are zeros
            unread = before.new_zeros(max(begin - len(before), 0), *before.shape[1:])
            routed = torch.cat([before[:begin], unread, after])
        reason, states = segment.finish_reason, segment.cached
        return replace(merged, routed_experts=routed, finish_reason=reason, cached=states)

    def _between(self, begin: int, end: int | None) -> Sample:
        """Return the sample with only these tokens of its response."""
        part, truncated = slice(begin, end), self.truncated_log_probs
        return replace(
            self,
            tokens=self.tokens[part],
            log_probs=self.log_probs[part],
            versions=self.versions[part],
            truncated_log_probs=None if truncated is None else truncated[part],
        )

    def _followed_by(self, rest: Sample) -> Sample:
        """Return the sample with the tokens of `rest` appended."""
        first, second = self.truncated_log_probs, rest.truncated_log_probs
        both = None if first is None or second is None else torch.cat([first, second])
        return replace(
            self,
            tokens=torch.cat([self.tokens, rest.tokens]),
            log_probs=torch.cat([self.log_probs, rest.log_probs]),
            versions=torch.cat([self.versions, rest.versions]),
            truncated_log_probs=both,
        )

    def longest(self, max_tokens: int) -> int:
        """Return the maximum response tokens: `end_at`, but at most `max_tokens`."""
        return max_tokens if self.end_at is None else min(self.end_at, max_tokens)

    def stacked_log_probs(self, num_kinds: int) -> Tensor:
        """Return log-probs [tokens, kinds]: the policy's, and with two kinds the truncated ones."""
        kinds = [self.log_probs, self.truncated_log_probs][:num_kinds]
        return torch.stack([kind for kind in kinds if kind is not None], dim=1)


def sample_seed(
    seed: int, uid: str, sample_index: int, attempt: int = 0, stream: str = "train"
) -> int:
    """Return the 64-bit seed of a sample's noise: equal arguments give equal noise.

    Example:

        sample_seed(0, uid="12-0", sample_index=3)

    Args:
        seed: the run's seed.
        uid: the prompt's uid.
        sample_index: the number of the sample among those of its prompt, from 0.
        attempt: how often the sample was drawn before.
        stream: "train"; another name, as for validation, gives other noise.
    """
    name = repr((int(seed), str(uid), int(sample_index), int(attempt), stream))
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def num_of_older_weights(versions: Sequence[int], version: int | None) -> int:
    """Count the tokens up to the last one that was observed or that another version sampled.

    The hf engine reads them in one pass with the prompt, as when `version` arrived or the turn
    began. It reads the later tokens one by one, as when they were sampled. So a continued response
    has the same bits as an uninterrupted one.
    """
    for count in range(len(versions), 0, -1):
        if versions[count - 1] != version:
            return count
    return 0


def num_read_at_once(versions: Sequence[int], version: int | None, end_of_images: int = 0) -> int:
    """Count the response tokens that the native engine reads in one pass with the prompt.

    They are the tokens up to the last one that older weights sampled, or that belongs to a long
    observation or to an image (all images are before `end_of_images`), and the observed tokens
    right after it. Observed tokens at the start of the response also count. Later tokens, including
    observed ones, are read one by one. So keys and values have the same bits whether they were
    stored between two turns or are computed again.
    """
    end, observed = end_of_images, 0
    for count, token_version in enumerate(versions, start=1):
        observed = observed + 1 if token_version < 0 else 0
        if observed > LONG_OBSERVATION or (not observed and token_version != version):
            end = max(end, count)
    while end < len(versions) and versions[end] < 0:
        end += 1
    return end


REQUEST = "request"
"""Column with the request numbers of submitted rows, by which the client finds their samples."""
TRUNCATED = "rollout_truncated_log_probs"
SeedOf = Callable[[str, int], int]
"""A function that maps uid and sample index to the seed of the sample (`sample_seed`)."""


def read_samples(data: DataProto, prompt_width: int, seed_of: SeedOf) -> list[Sample]:
    """Return one sample, still without a response, per row that is not padding.

    The optional column `end_at` limits the response tokens of each sample.
    """
    require(data, "input_ids", "attention_mask", "sample_index", "uid")
    ids = data.column("input_ids")
    if ids.shape[1] != prompt_width:
        raise RolloutError(
            f"rollout: prompts are {ids.shape[1]} columns wide, but data.max_prompt_length is "
            f"{prompt_width}. Pad them to this width on the left, and do not pass a batch that "
            "already has responses."
        )
    prompts: Sequence[Tensor]
    if isinstance(ids, RaggedTensor):
        prompts = ids.rows()
    else:
        masks = data.padded("attention_mask") != 0
        prompts = [row[mask] for row, mask in zip(ids, masks, strict=True)]
    indices, uids = data.padded("sample_index").tolist(), data.non_tensor_batch["uid"]
    images = data.non_tensor_batch.get(IMAGES, [()] * len(data))
    ends = data.padded("end_at").tolist() if "end_at" in data.columns else [None] * len(data)
    samples = []
    for row, prompt in enumerate(prompts[: data.num_real_rows]):
        uid, index = str(uids[row]), indices[row]
        name = f"uid {uid} sample {index}"
        refs: tuple[Any, ...] = tuple(tuple(ref) for ref in images[row])
        seed = seed_of(uid, index)
        samples.append(Sample(prompt.tolist(), seed, name, end_at=ends[row], images=refs))
    return samples


def to_batch(
    samples: Sequence[Sample],
    widths: tuple[int, int],
    pad: int,
    version: int,
    truncated: bool = False,
    no_choices: Tensor | None = None,
) -> DataProto:
    """Return a batch with one row per sample; `widths` has the widths of prompts and responses.

    `version` is the engine's version, which is recorded for responses without sampled tokens. If
    `no_choices` (an empty tensor of expert choices) is given, the batch has a column with the
    expert choices of every token.
    """
    prompts = [torch.tensor(sample.prompt, dtype=torch.long) for sample in samples]
    responses = RaggedTensor.from_rows([sample.tokens for sample in samples], widths[1], fill=pad)
    tokens = [
        torch.cat([prompt, sample.tokens]) for prompt, sample in zip(prompts, samples, strict=True)
    ]
    starts = widths[0] - torch.tensor([len(prompt) for prompt in prompts])
    lengths, values = torch.tensor([len(row) for row in tokens]), torch.cat(tokens)
    ids = RaggedTensor(values, lengths, sum(widths), starts, pad)
    positions: list[Tensor] = []
    oldest: list[int] = []
    """By sample: the weight version of its oldest sampled token, or the engine's version."""
    for sample in samples:
        # each segment begins at position 0
        begins = [0, *(len(sample.prompt) + begin for begin in sample.segments)]
        ends = [*begins[1:], len(sample.prompt) + len(sample.tokens)]
        positions += [torch.arange(end - begin) for begin, end in zip(begins, ends, strict=True)]
        sampled = sample.versions[sample.is_sampled]
        oldest.append(int(sampled.min()) if len(sampled) else version)
    columns: dict[str, ColumnValues] = {
        "prompts": RaggedTensor.from_rows(prompts, widths[0], at_end=True, fill=pad),
        "responses": responses,
        "input_ids": ids,
        "attention_mask": ids.with_values(torch.ones_like(values)),
        "position_ids": ids.with_values(torch.cat(positions)),
        "response_mask": responses.with_values(torch.cat([s.is_sampled for s in samples]).long()),
        "rollout_log_probs": responses.with_values(torch.cat([s.log_probs for s in samples])),
        "token_versions": responses.with_values(torch.cat([s.versions for s in samples])),
        "policy_version": torch.tensor(oldest),
        "sample_hash": torch.tensor([sample_hash(sample) for sample in samples]),
    }
    if truncated:
        log_probs = [s.truncated_log_probs for s in samples if s.truncated_log_probs is not None]
        columns[TRUNCATED] = responses.with_values(torch.cat([torch.empty(0), *log_probs]))
    if no_choices is not None:
        chosen = [_choices(sample, no_choices) for sample in samples]
        columns[ROUTED] = ids.with_values(torch.cat([no_choices, *chosen]))
    return DataProto.from_dict(columns, {"finish_reason": [s.finish_reason for s in samples]})


def _choices(sample: Sample, no_choices: Tensor) -> Tensor:
    """Return the expert choices [tokens, layers, choices] for the prompt and the response.

    They are zero for tokens that the engine did not read, such as the last one.
    """
    chosen = no_choices if sample.routed_experts is None else sample.routed_experts
    sampled = sample.is_sampled.nonzero().flatten()
    needed = len(sample.prompt) + int(sampled[-1]) if len(sampled) else 0
    if len(chosen) < needed:
        raise RolloutError(
            f"rollout: {sample.name} has the experts of {len(chosen)} tokens, but its "
            f"last token was sampled after {needed} tokens. The engine must return the experts of "
            "all of them."
        )
    length = len(sample.prompt) + len(sample.tokens)
    return torch.cat([chosen, chosen.new_zeros(length - len(chosen), *chosen.shape[1:])])


COLUMN = "sample_hash"
MAX_NAMED = 3
"""Maximum number of samples that an error names."""


def sample_hash(sample: Sample) -> int:
    """Return the hash of a sample's prompt, response, weight versions, segments and images."""
    prompt, versions = np.asarray(sample.prompt), sample.versions.numpy()
    return _hash(prompt, sample.tokens.numpy(), versions, sample.segments, sample.images)


def check_sample_hashes(batch: DataProto) -> dict[str, float]:
    """Reject rows that changed since sampling, or have observed tokens in the loss; return metrics.

    A batch without the hash column, such as one from a rollout of your own, is not checked.
    """
    if COLUMN not in batch.columns:
        return {}
    require(batch, "prompts", "responses", "token_versions", "position_ids")
    mask = read_columns(batch, "response_mask")["response_mask"]
    is_observed = batch.padded("token_versions") < 0
    named: Sequence[Sequence[Any]] = (
        _rows(batch, "prompts", of_response=False),
        _rows(batch, "responses"),
        _rows(batch, "token_versions"),
        _segments(batch),
        list(batch.non_tensor_batch.get(IMAGES, [()] * len(batch))),
    )
    expected = read_columns(batch, COLUMN)[COLUMN].tolist()
    wrong = [
        row
        for row, (*parts, number) in enumerate(zip(*named, expected, strict=True))
        if _hash(*parts) != number
    ]
    observed = (mask.bool() & is_observed).any(dim=-1).nonzero().flatten().tolist()
    wrong = sorted({*wrong, *observed})
    if wrong:
        uids, indices = batch.non_tensor_batch["uid"], batch.padded("sample_index").tolist()
        names = ", ".join(f"{uids[row]}/{indices[row]}" for row in wrong[:MAX_NAMED])
        raise BatchError(
            f"{len(wrong)} of {len(batch)} samples differ from what the rollout sampled (hash "
            f"mismatch; uid/index: {names}{', …' if len(wrong) > MAX_NAMED else ''}): prompts, "
            "responses, token_versions, position_ids or response_mask were changed after "
            f"sampling. If a stage or hook changes tokens on purpose, let it also drop the "
            f"column {COLUMN!r}."
        )
    return {"training/num_hash_matched_samples": float(len(batch))}


def _rows(batch: DataProto, name: str, of_response: bool = True) -> Sequence[np.ndarray]:
    """Return the rows of a column without padding."""
    column = batch.column(name)
    if isinstance(column, RaggedTensor):
        return [row.numpy() for row in column.rows()]
    prompt_counts, response_counts = token_counts(batch)
    counts = (response_counts if of_response else prompt_counts).tolist()
    width = column.shape[1]
    spans = [slice(0, n) if of_response else slice(width - n, width) for n in counts]
    return [row[span].numpy() for row, span in zip(column, spans, strict=True)]


def _segments(batch: DataProto) -> list[list[int]]:
    """Return the positions in every response at which position ids restart at 0."""
    begins = batch.padded("position_ids")[:, -batch.column("responses").shape[-1] :] == 0
    begins &= torch.arange(begins.shape[1]) < token_counts(batch)[1][:, None]
    segments: list[list[int]] = [[] for _ in range(len(batch))]
    for row, place in begins.nonzero().tolist():
        segments[row].append(place)
    return segments


def _hash(
    prompt: np.ndarray,
    tokens: np.ndarray,
    versions: np.ndarray,
    segments: Sequence[int],
    images: Sequence[Sequence[Any]],
) -> int:
    digest = hashlib.blake2b(len(prompt).to_bytes(8, "little"), digest_size=8)
    for part in (prompt, tokens, versions, segments):
        digest.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
    for _, sha, *_ in images:
        digest.update(bytes.fromhex(sha))
    return int.from_bytes(digest.digest(), "little", signed=True)
