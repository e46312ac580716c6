"""What an agent's request has a rollout read, or why it is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workers.agents.chat import Message, TurnRenderer
from workers.agents.gateway import Refused
from workers.rollout.base import SamplingParams
from workers.rollout.sample import Sample

TOO_LONG = "context_length_exceeded"
"""OpenAI's code for more tokens than there is room for."""


def check_sampling(given: Mapping[str, Any], sampling: SamplingParams) -> None:
    """Refuse settings of a request that are not the run's: samples are drawn in one way."""
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
    for name, value in given.items():
        found = sorted([value] if isinstance(value, str) else value) if name == "stop" else value
        if name == "stop_token_ids":  # the model's own end a turn in any case
            found = sorted({*value, *sampling.stop_token_ids})
        if found != expected[name]:
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
    """The ids that a request has beyond what was read and drawn before, or all of them.

    Messages after those of before are rendered alone where older turns stay as they were drawn. A
    request that does not begin with what was read and drawn is read as a whole: a new segment.
    """
    if request["extends"] and as_drawn:
        return chat.between(sample.stop_token, messages), False
    before, ids = sample.visible_ids, request["ids"]
    if ids is None:
        return chat.after(before, request["chat"])
    if ids[: len(before)] == before:
        return ids[len(before) :], False
    return ids, True
