"""Read the requests of agents in the form of chat completions, and write the responses.

    request = read_request("v1/chat/completions", body)     # raises a RejectedRequest
    response = completion(request, answers)                 # or its `chunks`, for a stream

A request with token ids (`inference/v1/generate`) has its fields in `sampling_params`, too.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workers.agents.environment import describe_type, fits
from workers.chats import has_images, is_image, text_of
from workers.thoughts import REASONING

if TYPE_CHECKING:
    from workers.rollout.base import SamplingParams

MODEL = "policy"
"""The policy's name in `v1/models`; a request may use any name unless there are several players."""
ROLES = {"developer": "system", **{role: role for role in ("system", "user", "assistant", "tool")}}
NUMBER, INTEGER, TEXT = ({"type": kind} for kind in ("number", "integer", "string"))
OBJECTS = {"type": "array", "items": {"type": "object"}}
KINDS: dict[str, Mapping[str, Any]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), NUMBER),
    **dict.fromkeys(("top_k", "min_tokens"), INTEGER),
    "stop": {"anyOf": [TEXT, {"type": "array", "items": TEXT}]},
    "stop_token_ids": {"type": "array", "items": INTEGER},
    "logit_bias": {"type": "object"},
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "n", "seed", "top_logprobs"), INTEGER),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), NUMBER),
    "logprobs": {"anyOf": [{"type": "boolean"}, INTEGER]},
    "tool_choice": {"anyOf": [TEXT, {"type": "object"}]},
    "parallel_tool_calls": {"type": "boolean"},
    "response_format": {"type": "object"},
    **dict.fromkeys(("messages", "tools"), OBJECTS),
    "token_ids": {"type": "array", "items": INTEGER},
    "sampling_params": {"type": "object"},
}
"""JSON schemas of the fields of a request body that are checked."""
NO_MATTER = {
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "cache_salt", "priority"),
}
"""Request fields that have no effect on sampling."""
COUNTS = ("max_tokens", "max_completion_tokens", "n")
"""Request fields that must be at least 1."""
CHAT_FIELDS = {
    "messages",
    "tools",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "stream_options",
}
TOKEN_ID_FIELDS = {
    "token_ids",
    "max_tokens",
    "skip_special_tokens",
    "logprobs",
    "routed_experts_prompt_start",
}
"""Fields of a request with token ids, without sampling settings.

The last three have no effect: the reply has all sampled ids, with log-probs and without experts.
"""
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
"""Values of request settings that no configuration changes."""
SERVED = {"n", "logprobs", "stop"}
"""Settings that `request_settings=serve` lets a request set, as well as `tool_choice="none"`."""


class RejectedRequest(Exception):
    """Raised for a request whose HTTP response is an error in OpenAI's format."""

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.fields = {"message": message, "param": param, "code": code, "status": status}


@dataclass
class Request:
    """An agent's request, parsed from a body."""

    is_chat: bool
    messages: list[dict[str, Any]] = field(default_factory=list)
    ids: list[int] | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    max_tokens: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    streams: bool = False
    with_usage: bool = False
    model: str = MODEL
    is_retry: bool = field(default=False, compare=False)
    """True if OpenAI's or Anthropic's client sends the request again, such as after a timeout."""


Answers = list[tuple[str, dict[str, Any]]]
"""The completions of a request: the name and the sampled content of each."""


def stop_strings(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the stop strings of a request."""
    stop = settings.get("stop", ())
    return tuple(filter(None, [stop] if isinstance(stop, str) else stop))


def overridden_settings(
    settings: Mapping[str, Any],
    sampling: SamplingParams,
    request_settings: str,
    can_stop: bool = True,
) -> list[str]:
    """Return the settings of a request that the run overrides, because all samples share them.

    If `request_settings` is "serve", settings that a request may set itself are not overridden. If
    it is "reject", raise for the first setting that differs from the run's. `can_stop` is True if
    the engine supports stop strings.
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
        if request_settings == "reject":
            reason = "is not supported in an agent's requests"
            if name in expected:
                reason = f"differs from this run's {expected[name]!r}"
            raise RejectedRequest(f"{name}={value!r:.80} {reason}. Leave out {name}.", name)
        has_schema = name == "response_format" and value.get("type") == "json_schema"
        if has_schema and request_settings == "serve":
            raise RejectedRequest(
                "response_format asks for JSON of a schema, but nothing makes the policy keep to "
                "it. Write the schema into a message, check the reply, and leave out "
                "response_format.",
                name,
            )
        if request_settings == "override" or not is_served:
            names.append(name)
    return names


def read_request(path: str, body: Any) -> Request:
    """Parse a request body, and reject invalid fields by name.

    Fields that are not known become sampling settings, which `overridden` checks later.
    """
    if not isinstance(body, dict):
        raise RejectedRequest("the body is not a JSON object")
    is_chat = path.endswith("/chat/completions")
    fields = {name: value for name, value in body.items() if value is not None}
    _check_kinds(fields)
    if not is_chat:
        settings = fields.pop("sampling_params", {})
        fields |= {name: value for name, value in settings.items() if value is not None}
        _check_kinds(fields)
    needed = "messages" if is_chat else "token_ids"
    if not fields.get(needed):
        raise RejectedRequest(f"{needed} are missing or empty", needed)
    counts = {name: fields[name] for name in COUNTS if name in fields}
    for name, count in counts.items():
        if count < 1:
            raise RejectedRequest(f"{name}={count} is less than 1", name)
    longest = [count for name, count in counts.items() if name != "n"]
    known = NO_MATTER | (CHAT_FIELDS if is_chat else TOKEN_ID_FIELDS)
    request = Request(
        is_chat,
        max_tokens=min(longest, default=None),
        sampling={name: value for name, value in fields.items() if name not in known},
        model=str(fields.get("model", MODEL)),
    )
    if not is_chat:
        request.ids = fields["token_ids"]
        return request
    for message in fields["messages"]:
        request.messages.append(read_message(message, request.messages))
    request.tools = fields.get("tools", [])
    for tool in request.tools:
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RejectedRequest(
                "tools are functions: {type: function, function: {name: ...}}", "tools"
            )
    request.streams = bool(fields.get("stream"))
    options = fields.get("stream_options")
    request.with_usage = isinstance(options, dict) and bool(options.get("include_usage"))
    return request


def _check_kinds(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if not fits(value, KINDS.get(name, {})):
            raise RejectedRequest(
                f"{name}={value!r:.80} must be {describe_type(KINDS[name])}", name
            )


def read_message(raw: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Convert a message for chat templates: texts joined, arguments of calls as objects."""
    role, calls = raw.get("role"), raw.get("tool_calls") or []
    if not isinstance(role, str) or role not in ROLES:
        raise RejectedRequest(
            f"{raw!r:.80} is not a message with one of the roles {', '.join(ROLES)}", "messages"
        )
    if not fits(calls, OBJECTS):
        raise RejectedRequest(f"tool_calls={calls!r:.80} is not a list of calls", "messages")
    try:
        content = _read_content(raw.get("content"))
    except ValueError as error:
        raise RejectedRequest(str(error), "messages") from error
    message: dict[str, Any] = {"role": ROLES[role], "content": content}
    reasoning = raw.get(REASONING) or raw.get("reasoning")
    if message["role"] == "assistant" and isinstance(reasoning, str):
        message[REASONING] = reasoning
    if calls:
        message["tool_calls"] = [_read_call(call) for call in calls]
    if message["role"] == "tool":
        number = raw.get("tool_call_id")
        named = [call for past in before for call in past.get("tool_calls", [])]
        names = [call["function"]["name"] for call in named if call["id"] == number]
        name = raw.get("name") or (names[-1] if names else None)
        message |= {"tool_call_id": str(number)} | ({"name": str(name)} if name else {})
    return message


def _read_content(content: Any) -> str | list[dict[str, str]]:
    """Return a content as text, or as parts if it has images.

    Images are `data:` URLs, so that an agent cannot name files of the run.
    """
    if not has_images(content):
        return text_of(content)
    parts: list[dict[str, str]] = []
    for number, part in enumerate(content):
        if not is_image(part):
            parts.append({"type": "text", "text": text_of([part])})
            continue
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, Mapping) else url
        if not isinstance(url, str) or not url.startswith("data:"):
            raise ValueError(
                f"part {number} of the message is the image {url!r:.80}, but an image must be a "
                "data: URL. Send its bytes, as in data:image/png;base64,..."
            )
        # a chat is sent again with each request
        parts.append({"type": "image", "url": sys.intern(url)})
    return parts


def _read_call(call: Mapping[str, Any]) -> dict[str, Any]:
    try:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        if not isinstance(arguments, dict):
            raise TypeError("not an object")
        named = {"name": str(function["name"]), "arguments": arguments}
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise RejectedRequest(
            f"{call!r:.80} is not a call of a tool with JSON arguments", "messages"
        ) from error
    return {"id": str(call.get("id")), "type": "function", "function": named}


def completion(request: Request, answers: Answers) -> dict[str, Any]:
    """Return the body of an HTTP response; its id is the name of the last choice.

    Each choice has its own name as `id`, so that an agent can give it a reward.
    """
    num_read = sum(answer.get("num_read", 0) for _, answer in answers)
    num_sampled = sum(answer.get("num_sampled", 0) for _, answer in answers)
    usage = {
        "prompt_tokens": num_read,
        "completion_tokens": num_sampled,
        "total_tokens": num_read + num_sampled,
    }
    choices = [
        _choice(request, answer) | {"index": n, "id": choice}
        for n, (choice, answer) in enumerate(answers)
    ]
    body = {"choices": choices, "usage": usage}
    name = answers[-1][0]
    if not request.is_chat:
        return {"request_id": name, **body}
    header = {"id": name, "object": "chat.completion", "created": int(time.time())}
    return {**header, "model": request.model, **body}


def _choice(request: Request, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer as the choice of a completion, with its log-probs if it has any."""
    finish, log_probs = answer.get("finish_reason", "stop"), None
    if "log_probs" in answer:
        words = answer["texts"] if request.is_chat else map("token_id:{}".format, answer["ids"])
        log_probs = {
            "content": [
                {"token": word, "logprob": value, "bytes": [*word.encode()], "top_logprobs": []}
                for word, value in zip(words, answer["log_probs"], strict=True)
            ]
        }
    if not request.is_chat:
        return {"token_ids": answer["ids"], "logprobs": log_probs, "finish_reason": finish}
    message = answer["message"]
    if "tool_calls" in message and finish == "stop":
        finish = "tool_calls"
    return {"message": message, "finish_reason": finish, "logprobs": log_probs}


def chunks(request: Request, response: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a complete HTTP response as the chunks of a stream."""
    header = {**response, "object": "chat.completion.chunk"}
    del header["usage"]
    parts = []
    for choice in response["choices"]:
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [
                {"index": number, **call} for number, call in enumerate(delta["tool_calls"])
            ]
        end = {**choice, "delta": {}}
        begin = {**end, "delta": delta, "finish_reason": None}
        for part in (begin, {**end, "logprobs": None}):
            del part["message"]
            parts.append({**header, "choices": [part]})
    if request.with_usage:
        parts.append({**header, "choices": [], "usage": response["usage"]})
    return parts
