"""What the decode loops of all engines do with a response: end it, go on with it, hand it over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from workers.rollout.base import Output


def output_of(tokens: Tensor, log_probs: Tensor, versions: Tensor, finish_reason: str) -> Output:
    """An `Output` that shares no memory with these; `log_probs` is [tokens, kinds]."""
    policy, *truncated = (column.clone() for column in log_probs.unbind(dim=1))
    return Output(tokens.clone(), policy, finish_reason, versions.clone(), *truncated)


def num_of_older_weights(versions: Sequence[int], version: int) -> int:
    """How many tokens of a response come before the first that only `version` drew since.

    What these were drawn after is read in one pass with the prompt, as it was when `version` came;
    the tokens behind them are read one by one, as they were drawn. So a response that goes on has
    the bits of one that was never cut off.
    """
    for count in range(len(versions), 0, -1):
        if versions[count - 1] != version:
            return count
    return 0


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
