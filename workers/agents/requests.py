"""Token ids that an agent's request adds for the rollout to read, or why it is rejected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workers.agents.chat import Message, TurnRenderer
from workers.agents.gateway import RejectedRequest, stop_strings
from workers.rollout.base import SamplingParams
from workers.rollout.sample import Sample

TOO_LONG = "context_length_exceeded"
"""OpenAI's error code for a request with too many tokens."""


ALWAYS = {
    "n": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
}
"""Fixed values of settings that no run can change."""
SERVED = {"n", "logprobs", "stop"}
"""Settings that a request may set itself, in addition to tool_choice="none"."""


def overridden(
    settings: Mapping[str, Any], sampling: SamplingParams, overrides: str, can_stop: bool = True
) -> list[str]:
    """Return the settings of a request that the run overrides, because all samples share them.

    With overrides="serve", these exclude the settings that a request may set itself; with "reject",
    the first overridden setting is an error. `can_stop` is True if the engine supports stop
    strings.
    """
    expected = {
        **ALWAYS,
        "temperature": sampling.temperature if sampling.do_sample else 0,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "min_tokens": sampling.min_tokens,
        "stop": sorted(sampling.stop_strings),
        "stop_token_ids": sorted(sampling.stop_token_ids),
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias},
    }
    names = []
    for name, value in settings.items():
        comparable = value
        if name == "stop":
            comparable = sorted(stop_strings(settings))
        elif name == "stop_token_ids":  # the model's stop tokens end a turn in any case
            comparable = sorted({*value, *sampling.stop_token_ids})
        is_served = name in SERVED and (name != "stop" or can_stop)
        is_served |= name == "tool_choice" and value == "none"
        if name in expected and comparable == expected[name]:
            continue
        if overrides == "reject":
            has = f"this run's {expected[name]!r}" if name in expected else "there for agents"
            raise RejectedRequest(f"{name}={value!r:.80} is not {has}: leave it out", name)
        if overrides == "override" or not is_served:
            names.append(name)
    return names


def ids_to_read(
    sample: Sample,
    request: Mapping[str, Any],
    messages: Sequence[Message],
    chat: TurnRenderer,
    as_drawn: bool,
) -> tuple[list[int], bool]:
    """Return the ids that a request adds to the earlier ones, or all of its ids.

    If older turns stay as they were sampled, only the new messages are rendered. A request that
    does not begin with the earlier ids is read as a whole, which is a new segment.
    """
    if request["extends"] and as_drawn:
        return chat.between(sample.stop_token, messages), False
    before, ids = sample.visible_ids, request["ids"]
    if ids is None:
        return chat.after(before, request["chat"])
    if ids[: len(before)] == before:
        return ids[len(before) :], False
    return ids, True
