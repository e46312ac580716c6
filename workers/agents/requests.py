"""The ids that an agent's request lets a rollout read, or the reason for its rejection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workers.agents.chat import Message, TurnRenderer
from workers.agents.gateway import Refused
from workers.rollout.base import SamplingParams
from workers.rollout.sample import Sample

TOO_LONG = "context_length_exceeded"
"""OpenAI's code for more tokens than there is room for."""


def check_sampling(settings: Mapping[str, Any], sampling: SamplingParams) -> None:
    """Reject settings of a request that differ from the run's: all samples share them."""
    expected = {
        "temperature": sampling.temperature if sampling.do_sample else 0,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "min_tokens": sampling.min_tokens,
        "stop": sorted(sampling.stop_strings),
        "stop_token_ids": sorted(sampling.stop_token_ids),
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias},
    }
    for name, value in settings.items():
        comparable = value
        if name == "stop":
            comparable = sorted([value] if isinstance(value, str) else value)
        elif name == "stop_token_ids":  # the model's stop tokens end a turn in any case
            comparable = sorted({*value, *sampling.stop_token_ids})
        if comparable != expected[name]:
            raise Refused(
                f"{name}={value!r:.80} is not this run's {expected[name]!r}, by which all of its "
                "samples are drawn: leave it out",
                name,
            )


def ids_to_read(
    sample: Sample,
    request: Mapping[str, Any],
    messages: Sequence[Message],
    chat: TurnRenderer,
    as_drawn: bool,
) -> tuple[list[int], bool]:
    """The ids that a request adds to what was read and sampled, or all of its ids.

    Only the new messages are rendered if older turns stay as they were sampled. A request that does
    not begin with what was read and sampled is read as a whole, which is a new segment.
    """
    if request["extends"] and as_drawn:
        return chat.between(sample.stop_token, messages), False
    before, ids = sample.visible_ids, request["ids"]
    if ids is None:
        return chat.after(before, request["chat"])
    if ids[: len(before)] == before:
        return ids[len(before) :], False
    return ids, True
