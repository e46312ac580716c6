"""`Sample`: a prompt and its response so far, which engines take and return."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

CUT_BY_LENGTH = "length"
"""The `finish_reason` of a sample that reached the limit before an end of sequence."""
UNFINISHED = "abort"
"""The `finish_reason` of a sample that an engine can continue."""
OBSERVED = -1
"""The version of a token that was observed, not sampled."""
LONG_OBSERVATION = 128
"""Maximum number of observed tokens per turn that are read one by one."""


@dataclass(frozen=True, eq=False)
class States:
    """Keys and values of samples whose turns ended in the same step."""

    layers: Sequence[tuple[Tensor, Tensor] | None]
    """[samples, heads, tokens, head size] of keys and of values, as wide as the longest sample."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(part.nbytes for layer in self.layers if layer for part in layer)


@dataclass(eq=False)
class KeptStates:
    """Keys and values of a sample that an engine stores for its next turn."""

    states: States | None = None
    """None once they are in use, and therefore outdated."""
    row: int = 0
    """The sample's row in `states`."""
    read: Sequence[int] = ()
    """The tokens that they belong to: the prompt, and the first tokens of the response."""
    version: int | None = None
    """The version of the weights that computed them."""


@dataclass(frozen=True)
class Sample:
    """One row: prompt ids without padding, the noise key, a name for messages, and the response.

    `tokens` is the response with its stop token. Each token has its log-prob and the version of the
    weights that sampled it (-1 marks a token that was observed, not sampled).

    `finish_reason` is "stop" or "length". "abort" marks an unfinished response, which can be
    submitted again and continues where it ended. A sample that has not started has no reason.
    `truncated_log_probs` are log-probs of the distribution that was sampled from, if the sampling
    requests them.
    """

    prompt: Sequence[int]
    key: int = 0
    name: str = "sample"
    tokens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    log_probs: Tensor = field(default_factory=lambda: torch.empty(0))
    versions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    finish_reason: str = ""
    truncated_log_probs: Tensor | None = None
    end_at: int | None = None
    """Number of tokens at which the response ends for now; None uses the sampling's limit."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end this sample, in addition to those of the sampling."""
    segments: tuple[int, ...] = ()
    """Positions in the response where a segment begins, which the policy reads without the rest."""
    routed_experts: Tensor | None = None
    """[tokens, layers, choices]: the routers' choices for the tokens that are read, prompt first.

    Only if the sampling requests them. A token that is read again because new weights arrived has
    the later choices, which match its keys and values.
    """
    kept: KeptStates | None = None
    """Keys and values for the next turn; an empty object asks the engine to store them."""

    def with_response(
        self,
        tokens: Tensor,
        log_probs: Tensor,
        versions: Tensor,
        finish_reason: str,
        routed_experts: Tensor | None = None,
    ) -> Sample:
        """Return the sample with copies of this response; `log_probs` is [tokens, kinds]."""
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
        """[tokens]: True where the policy sampled the token; this is the loss mask."""
        return self.versions >= 0

    @property
    def visible_ids(self) -> list[int]:
        """All ids that the policy reads for its next token."""
        tokens: list[int] = self.tokens.tolist()
        return tokens[self.segments[-1] :] if self.segments else [*self.prompt, *tokens]

    @property
    def stop_token(self) -> int | None:
        """Token that ended the response; None if the response was cut."""
        return int(self.tokens[-1]) if self.finish_reason == "stop" else None

    def with_observed(self, ids: Sequence[int], begins_segment: bool, end_at: int | None) -> Sample:
        """Return the sample with these observed tokens appended, to be continued up to `end_at`."""
        gaps = torch.full((len(ids),), torch.nan)
        observed = Sample(
            [],
            tokens=torch.tensor(ids, dtype=torch.long),
            log_probs=gaps,
            versions=torch.full((len(ids),), OBSERVED, dtype=torch.int32),
            truncated_log_probs=gaps,
        )
        segments = (*self.segments, len(self.tokens)) if begins_segment else self.segments
        whole = self._followed_by(observed)
        return replace(whole, finish_reason=UNFINISHED, end_at=end_at, segments=segments)

    def last_segment(self, max_tokens: int) -> Sample:
        """Return the part that an engine continues: the last segment as a separate sample."""
        if not self.segments:
            return self
        begin, routed = self.segments[-1], self.routed_experts
        return replace(
            self._between(begin + 1, None),
            prompt=self.tokens[begin : begin + 1].tolist(),
            key=noise_key(self.key, "segment", len(self.segments)),  # positions count from 0 again
            routed_experts=None if routed is None else routed[len(self.prompt) + begin :],
            end_at=self.longest(max_tokens) - begin - 1,
            segments=(),
        )

    def with_last_segment(self, segment: Sample) -> Sample:
        """Return the sample with the engine's result for its `last_segment`."""
        if not self.segments:
            return segment
        whole = self._between(0, self.segments[-1] + 1)._followed_by(segment)
        before, after = self.routed_experts, segment.routed_experts
        routed = None
        if before is not None and after is not None:
            begin = len(self.prompt) + self.segments[-1]
            # the last tokens of earlier segments were not read: they have zeros
            unread = before.new_zeros(max(begin - len(before), 0), *before.shape[1:])
            routed = torch.cat([before[:begin], unread, after])
        reason, states = segment.finish_reason, segment.kept
        return replace(whole, routed_experts=routed, finish_reason=reason, kept=states)

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
        """Return the number of tokens at which the response ends, at most `max_tokens`."""
        return max_tokens if self.end_at is None else min(self.end_at, max_tokens)

    def stacked_log_probs(self, num_kinds: int) -> Tensor:
        """Return [tokens, kinds]: the policy's log-probs, then the truncated ones."""
        kinds = [self.log_probs, self.truncated_log_probs][:num_kinds]
        return torch.stack([kind for kind in kinds if kind is not None], dim=1)


def noise_key(
    seed: int, uid: str, sample_index: int, attempt: int = 0, stream: str = "train"
) -> int:
    """Return the 64-bit key of a sample's noise.

    `attempt` counts refills of the sample; `stream` separates validation from training.
    """
    name = repr((int(seed), str(uid), int(sample_index), int(attempt), stream))
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def num_of_older_weights(versions: Sequence[int], version: int | None) -> int:
    """Count the tokens of a response up to the last one that another version sampled.

    They are read in one pass with the prompt, as they were when `version` arrived. The tokens after
    them are read one by one, as they were sampled. So a response that continues has the bits of an
    uninterrupted one.
    """
    for count in range(len(versions), 0, -1):
        if versions[count - 1] != version:
            return count
    return 0


def num_read_at_once(versions: Sequence[int], version: int | None) -> int:
    """Count the tokens of a response, of one or more turns, that are read in one pass with the
    prompt.

    These are the tokens up to the last one that older weights sampled or that belongs to a long
    observation, and the observed tokens right after it, or before anything was sampled. The others,
    including observed ones, are read one by one, so keys and values have the same bits whether they
    were stored between two turns or are recomputed.
    """
    end = observed = 0
    for count, its in enumerate(versions, start=1):
        observed = observed + 1 if its < 0 else 0
        if observed > LONG_OBSERVATION or (not observed and its != version):
            end = count
    while end < len(versions) and versions[end] < 0:
        end += 1
    return end


def ends_with_stop_string(
    tokens: Sequence[int], stop_strings: Sequence[str], decode: Callable[[Any], str]
) -> bool:
    """Return True if the newest token completes a stop string: the text has it now, but not before.

    Only the last tokens are decoded: every character of a stop string takes at least a byte, and at
    most four tokens.
    """
    window = list(tokens[-(4 * max(map(len, stop_strings)) + 4) :])
    after, before = decode(window), decode(window[:-1])
    return any(after.count(text) > before.count(text) for text in stop_strings)
