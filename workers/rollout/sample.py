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
"""Observed tokens in one turn that are read one by one at most."""


def _no_tokens() -> Tensor:
    return torch.empty(0, dtype=torch.long)


def _no_log_probs() -> Tensor:
    return torch.empty(0)


def _no_versions() -> Tensor:
    return torch.empty(0, dtype=torch.int32)


@dataclass(frozen=True, eq=False)
class States:
    """Keys and values of samples whose turns ended in the same step."""

    layers: Sequence[tuple[Tensor, Tensor] | None]
    """[samples, heads, tokens, head size] of keys and of values, as wide as the longest."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(part.nbytes for layer in self.layers if layer for part in layer)


@dataclass(eq=False)
class KeptStates:
    """Keys and values of a sample that an engine keeps for its next turn."""

    states: States | None = None
    """None once they are in use, and so out of date."""
    row: int = 0
    """The sample's row in `states`."""
    read: Sequence[int] = ()
    """The tokens that they belong to: the prompt, and the first tokens of the response."""
    version: int | None = None
    """The version of the weights that computed them."""


@dataclass(frozen=True)
class Sample:
    """One row: prompt ids without padding, the noise key, a name for messages, and the response.

    `tokens` is the response with its stop token; each token has its log-prob and the version of the
    weights that sampled it (-1 marks a token that was observed, not sampled).
    `finish_reason` is "stop" or "length"; "abort" is an unfinished response, which can be submitted
    again and goes on where it ended; a sample that is yet to begin has none.
    `truncated_log_probs` are those of the distribution that was drawn from, where the sampling asks
    for them.
    """

    prompt: Sequence[int]
    key: int = 0
    name: str = "sample"
    tokens: Tensor = field(default_factory=_no_tokens)
    log_probs: Tensor = field(default_factory=_no_log_probs)
    versions: Tensor = field(default_factory=_no_versions)
    finish_reason: str = ""
    truncated_log_probs: Tensor | None = None
    end_at: int | None = None
    """Number of tokens at which the response ends for now; None: as the sampling says."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end this sample, in addition to those of the sampling."""
    segments: tuple[int, ...] = ()
    """Places in the response where a segment begins, which the policy reads without the rest."""
    routed_experts: Tensor | None = None
    """[tokens, layers, choices]: what routers chose for the tokens that are read, prompt first.

    Where the sampling asks for it. A token that is read again, as new weights came, has the later
    choices, which its keys and values are of.
    """
    kept: KeptStates | None = None
    """Keys and values for a next turn; an empty object asks the engine to keep them."""

    def with_response(
        self,
        tokens: Tensor,
        log_probs: Tensor,
        versions: Tensor,
        finish_reason: str,
        routed_experts: Tensor | None = None,
    ) -> Sample:
        """The sample with copies of this response; `log_probs` is [tokens, kinds]."""
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
    def is_drawn(self) -> Tensor:
        """[tokens]: whether the policy sampled each token, which is the loss mask."""
        return self.versions >= 0

    @property
    def visible_ids(self) -> list[int]:
        """All ids that the policy reads for its next token."""
        tokens: list[int] = self.tokens.tolist()
        return tokens[self.segments[-1] :] if self.segments else [*self.prompt, *tokens]

    @property
    def stop_token(self) -> int | None:
        """The token that ended the response; None if it was cut."""
        return int(self.tokens[-1]) if self.finish_reason == "stop" else None

    def with_observed(self, ids: Sequence[int], begins_segment: bool, end_at: int | None) -> Sample:
        """The sample with these observed tokens at its end, to be continued up to `end_at`."""
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
        """The part that an engine continues: the last segment as a sample of its own."""
        if not self.segments:
            return self
        begin, routed = self.segments[-1], self.routed_experts
        return replace(
            self._between(begin + 1, None),
            prompt=self.tokens[begin : begin + 1].tolist(),
            key=noise_key(self.key, "segment", len(self.segments)),  # places count from 0 again
            routed_experts=None if routed is None else routed[len(self.prompt) + begin :],
            end_at=self.longest(max_tokens) - begin - 1,
            segments=(),
        )

    def with_last_segment(self, segment: Sample) -> Sample:
        """The sample with what an engine has made of its `last_segment`."""
        if not self.segments:
            return segment
        whole = self._between(0, self.segments[-1] + 1)._followed_by(segment)
        before, after = self.routed_experts, segment.routed_experts
        routed = None
        if before is not None and after is not None:
            begin = len(self.prompt) + self.segments[-1]
            # nobody has read the last tokens of the segments before: they have zeros
            unread = before.new_zeros(max(begin - len(before), 0), *before.shape[1:])
            routed = torch.cat([before[:begin], unread, after])
        reason, kept = segment.finish_reason, segment.kept
        return replace(whole, routed_experts=routed, finish_reason=reason, kept=kept)

    def _between(self, begin: int, end: int | None) -> Sample:
        """The sample with these tokens of its response only."""
        part, truncated = slice(begin, end), self.truncated_log_probs
        return replace(
            self,
            tokens=self.tokens[part],
            log_probs=self.log_probs[part],
            versions=self.versions[part],
            truncated_log_probs=None if truncated is None else truncated[part],
        )

    def _followed_by(self, rest: Sample) -> Sample:
        """The sample with the tokens of `rest` after its own."""
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
        """Number of tokens at which the response ends, at most `max_tokens`."""
        return max_tokens if self.end_at is None else min(self.end_at, max_tokens)

    def stacked_log_probs(self, num_kinds: int) -> Tensor:
        """[tokens, kinds]: the policy's log-probs, then the truncated ones."""
        kinds = [self.log_probs, self.truncated_log_probs][:num_kinds]
        return torch.stack([kind for kind in kinds if kind is not None], dim=1)


def noise_key(
    seed: int, uid: str, sample_index: int, attempt: int = 0, stream: str = "train"
) -> int:
    """The 64-bit key of a sample's noise.

    `attempt` counts refills of the sample; `stream` separates validation from training.
    """
    name = repr((int(seed), str(uid), int(sample_index), int(attempt), stream))
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def num_of_older_weights(versions: Sequence[int], version: int | None) -> int:
    """How many tokens of a response come before the first that only `version` drew since.

    What these were drawn after is read in one pass with the prompt, as it was when `version` came;
    the tokens behind them are read one by one, as they were drawn. So a response that goes on has
    the bits of one that was never cut off.
    """
    for count in range(len(versions), 0, -1):
        if versions[count - 1] != version:
            return count
    return 0


def num_read_at_once(versions: Sequence[int], version: int | None) -> int:
    """Tokens of a response of one or more turns that are read in one pass with the prompt.

    Those up to the last that older weights drew or that a long observation has, and what was
    observed right after it, or before anything was drawn. The others are read one by one, observed
    ones too: so keys and values have the same bits whether they were kept between two turns or are
    computed again.
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
    """Whether the newest token completes a stop string: it is in the text now, and was not before.

    Only a tail is decoded: every character of a stop string takes at least a byte and at most four
    tokens of it.
    """
    window = list(tokens[-(4 * max(map(len, stop_strings)) + 4) :])
    after, before = decode(window), decode(window[:-1])
    return any(after.count(text) > before.count(text) for text in stop_strings)
