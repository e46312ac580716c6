"""`Sample`: a prompt and its response so far, which is what engines are asked for and give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

CUT_BY_LENGTH = "length"
"""The `finish_reason` of a sample that reached the limit before an end of sequence."""
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
    """Keys and values of samples whose turns have ended together."""

    layers: Sequence[tuple[Tensor, Tensor] | None]
    """[samples, heads, tokens, head size] of keys and of values, as wide as the longest."""

    @property
    def num_bytes(self) -> int:
        """Of all of them."""
        return sum(part.nbytes for layer in self.layers if layer for part in layer)


@dataclass(eq=False)
class KeptStates:
    """Keys and values that an engine has computed of a sample, for its next turn."""

    states: States | None = None
    """None once they are in use, and out of date."""
    row: int = 0
    """The sample's, of those states."""
    read: Sequence[int] = ()
    """The tokens that they are of: the prompt, and the first of the response."""
    version: int | None = None
    """Of the weights."""


@dataclass(frozen=True)
class Sample:
    """One row: prompt ids without padding, the noise key, a name for messages, and the response.

    `tokens` are those of the response to the stop token and with it, each with its log-prob and
    the version of the weights that drew it (-1 marks a token that was observed, not drawn).
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
    """Tokens of the response, observed ones too, at which it ends for now; None: the sampling's."""
    segments: tuple[int, ...] = ()
    """Places in the response where what the policy reads begins anew: nothing before is read on."""
    routed_experts: Tensor | None = None
    """[tokens, layers, choices]: what routers chose for those that are read, the prompt's first.

    Where the sampling asks for it. A token that is read again, as new weights came, has the later
    choices, which its keys and values are of.
    """
    kept: KeptStates | None = None
    """What an engine has computed of it; an empty one asks for that to be kept for a next turn."""

    def with_response(
        self,
        tokens: Tensor,
        log_probs: Tensor,
        versions: Tensor,
        finish_reason: str,
        routed_experts: Tensor | None = None,
    ) -> Sample:
        """The sample with copies of what was drawn; `log_probs` is [tokens, kinds]."""
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

    def longest(self, max_tokens: int) -> int:
        """Tokens that the response may have, of those that the sampling allows."""
        return max_tokens if self.end_at is None else min(self.end_at, max_tokens)

    def stacked_log_probs(self, num_kinds: int) -> Tensor:
        """[tokens, kinds]: the policy's, then the truncated ones."""
        kinds = [self.log_probs, self.truncated_log_probs][:num_kinds]
        return torch.stack([kind for kind in kinds if kind is not None], dim=1)


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
