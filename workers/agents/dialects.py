"""Convert two other APIs to and from chat completions.

    POST v1/messages                  Anthropic's Messages
    POST v1/responses                 OpenAI's Responses

A request body is converted to a body of chat completions, which the endpoint serves. The completion
is then converted to a response of the API. A stream sends all of its events at once, when the turn
is complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.agents.requests import RejectedRequest
from workers.chats import has_images, is_image, text_of
from workers.thoughts import REASONING

Body = dict[str, Any]


@dataclass(frozen=True)
class Dialect:
    """Converts requests of an API to chat completions, and completions to its responses."""

    to_chat: Callable[[Body], Body]
    answer: Callable[[Body], Body]
    events: Callable[[Body], list[Body]]
    """Returns the events of a stream with this response."""


def _for_templates(messages: Sequence[Body]) -> list[Body]:
    """Return messages with at most one system message, at the start, as most templates require.

    Later system messages become user messages. Consecutive system
    messages are joined, and so are user messages. (Coding agents send several system messages, and
    reminders between turns.)
    """
    joined: list[Body] = []
    for message in messages:
        role, last = message["role"], joined[-1] if joined else {}
        if role in ("system", "developer"):
            role = "system" if not joined or last["role"] == "system" else "user"
        if role == last.get("role") and role in ("system", "user"):
            last["content"] = _joined(last["content"], message["content"])
        else:
            joined.append({**message, "role": role})
    return joined


def _joined(first: Any, second: Any) -> Any:
    """Return two contents as one, with an empty line between them."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    parts: list[Body] = []
    for content in (first, "\n\n", second):
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def _content(content: Any) -> Any:
    """Return a content as text, or as parts of chat completions if it has images."""
    if not has_images(content):
        return text_of(content)
    return [
        {"type": "image_url", "image_url": {"url": _url(part)}}
        if is_image(part)
        else {"type": "text", "text": text_of([part])}
        for part in content
    ]


def _url(part: Body) -> Any:
    """Return the URL of an image in OpenAI's Responses or Anthropic's Messages."""
    source = part.get("source") or {"url": part.get("image_url")}
    if source.get("type") == "base64":
        return f"data:{source['media_type']};base64,{source['data']}"
    return source.get("url")


def _call(number: Any, name: Any, arguments: Any) -> Body:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def _function(tool: Mapping[str, Any], parameters: Any) -> Body:
    function = {"name": tool["name"], "description": tool.get("description") or ""}
    return {"type": "function", "function": {**function, "parameters": parameters or {}}}


def _choice(choice: Any, any_call: str) -> Any:
    """Return the equivalent `tool_choice` of chat completions.

    `any_call` is the value by which this API requires a call of any tool.
    """
    kind = choice if isinstance(choice, str) else choice["type"]
    if kind in ("tool", "function"):
        return {"type": "function", "function": {"name": choice["name"]}}
    return "required" if kind == any_call else kind


def _reject_stored_messages(body: Body, names: Sequence[str], sent: str) -> None:
    """Reject a request that names messages which it does not send: the turn would lack them."""
    for name in names:
        if body.get(name) is not None:
            raise RejectedRequest(
                f"{name} refers to messages on another server, which the policy cannot read. "
                f"Send all messages in {sent}, and leave out {name}.",
                name,
            )


# ------------------------------------------------------------------------------------ Anthropic's

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


def _from_messages(body: Body) -> Body:
    """Return a request of Anthropic's Messages API as a chat request."""
    _reject_stored_messages(body, ("thread",), "messages")
    translated = ("system", "messages", "tools", "tool_choice", "stop_sequences")
    chat = {name: value for name, value in body.items() if name not in translated}
    chat.pop("context_management", None)
    system = text_of(body.get("system"))
    messages: list[Body] = [{"role": "system", "content": system}] if system else []
    for message in body.get("messages") or ():
        messages += _from_message(message)
    chat["messages"] = _for_templates(messages)
    # tools without a schema are left out: Anthropic's servers run them
    tools = [tool for tool in body.get("tools") or () if "input_schema" in tool]
    chat["tools"] = [_function(tool, tool["input_schema"]) for tool in tools]
    if body.get("tool_choice"):
        chat["tool_choice"] = _choice(body["tool_choice"], "any")
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    return chat


def _from_message(message: Mapping[str, Any]) -> list[Body]:
    """Return the chat messages of one message: results of tools, and then its text and calls."""
    content = message["content"]
    if isinstance(content, str):
        return [{"role": message["role"], "content": content}]
    results, texts, calls = [], [], []
    thoughts = [block["thinking"] for block in content if block["type"] == "thinking"]
    for block in content:
        if block["type"] == "tool_result":
            answer = {"role": "tool", "tool_call_id": block["tool_use_id"]}
            results.append({**answer, "content": _content(block.get("content"))})
        elif block["type"] == "tool_use":
            calls.append(_call(block["id"], block["name"], block["input"]))
        elif not block["type"].endswith("thinking"):
            texts.append(block)
    if results and not texts:
        return results
    turn = {"role": message["role"], "content": _content(texts), "tool_calls": calls}
    return [*results, turn | ({REASONING: "\n\n".join(thoughts)} if thoughts else {})]


def _message(completion: Body) -> Body:
    """Return a chat completion as a message of Anthropic's API."""
    (choice, *_), usage = completion["choices"], completion["usage"]
    message = choice["message"]
    content: list[Body] = []
    reasoning = message.get(REASONING)
    if reasoning:
        content.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if message["content"]:
        content.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = json.loads(function["arguments"])
        block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
        content.append({**block, "input": arguments})
    return {
        "id": completion["id"],
        "type": "message",
        "role": "assistant",
        "model": completion["model"],
        "content": content,
        "stop_reason": STOP_REASONS.get(choice["finish_reason"], "end_turn"),
        "stop_sequence": None,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
        },
    }


def _message_events(answer: Body) -> list[Body]:
    """Return a message as the events of Anthropic's stream, with one delta per block."""
    start = {**answer, "content": [], "stop_reason": None}
    events: list[Body] = [{"type": "message_start", "message": start}]
    for index, block in enumerate(answer["content"]):
        if block["type"] == "text":
            empty: Body = {"text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        elif block["type"] == "thinking":
            empty = {"thinking": ""}
            delta = {"type": "thinking_delta", "thinking": block["thinking"]}
        else:
            arguments = json.dumps(block["input"])
            empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": arguments}
        events += [
            {"type": "content_block_start", "index": index, "content_block": {**block, **empty}},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    end = {name: answer[name] for name in ("stop_reason", "stop_sequence")}
    events.append({"type": "message_delta", "delta": end, "usage": answer["usage"]})
    return [*events, {"type": "message_stop"}]


# --------------------------------------------------------------------------------------- OpenAI's

SERVER_ONLY = ("include", "truncation", "background", "client_metadata")
"""Request fields that are ignored, because they concern OpenAI's servers."""


def _from_responses(body: Body) -> Body:
    """Return a request of OpenAI's Responses API as a chat request."""
    _reject_stored_messages(body, ("conversation", "prompt"), "input")
    translated = ("instructions", "input", "tools", "tool_choice", "max_output_tokens", "text")
    chat = {name: value for name, value in body.items() if name not in (*translated, *SERVER_ONLY)}
    system, items = body.get("instructions"), body.get("input") or ()
    messages: list[Body] = [{"role": "system", "content": system}] if system else []
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    thoughts: list[str] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item["role"], "content": _content(item["content"])})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append(_call(item["call_id"], item["name"], item["arguments"]))
        elif kind == "function_call_output":
            answer = {"role": "tool", "tool_call_id": item["call_id"]}
            messages.append({**answer, "content": _content(item["output"])})
        elif kind == "reasoning":
            thoughts += [part["text"] for part in item.get("content") or ()]
            continue
        else:
            raise ValueError(f"input of the type {kind!r} is not supported")
        if thoughts and messages[-1]["role"] == "assistant":
            messages[-1][REASONING] = "\n\n".join(thoughts)
        thoughts = []
    chat["messages"] = _for_templates(messages)
    # tools of other types are left out: OpenAI's servers run them
    tools = [tool for tool in body.get("tools") or () if tool["type"] == "function"]
    chat["tools"] = [_function(tool, tool.get("parameters")) for tool in tools]
    if body.get("tool_choice"):
        chat["tool_choice"] = _choice(body["tool_choice"], "required")
    chat["max_tokens"] = body.get("max_output_tokens")
    form = (body.get("text") or {}).get("format") or {}
    if form.get("type", "text") != "text":
        chat["response_format"] = form
    return chat


def _response(completion: Body) -> Body:
    """Return a chat completion as a response of OpenAI's Responses API."""
    (choice, *_), usage = completion["choices"], completion["usage"]
    message, is_cut = choice["message"], choice["finish_reason"] == "length"
    calls = message.get("tool_calls", ())
    output: list[Body] = []
    reasoning = message.get(REASONING)
    if reasoning:
        content = [{"type": "reasoning_text", "text": reasoning}]
        item = {"type": "reasoning", "id": f"rs_{completion['id']}", "summary": []}
        output.append({**item, "status": "completed", "content": content})
    if message["content"] or not calls:
        part: Body = {"type": "output_text", "text": message["content"] or "", "annotations": []}
        item = {"type": "message", "id": f"msg_{completion['id']}", "role": "assistant"}
        output.append({**item, "status": "completed", "content": [{**part, "logprobs": []}]})
    for call in calls:
        item = {"type": "function_call", "id": f"fc_{completion['id']}_{call['id']}"}
        output.append({**item, "call_id": call["id"], "status": "completed", **call["function"]})
    return {
        "id": completion["id"],
        "object": "response",
        "created_at": completion["created"],
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "model": completion["model"],
        "output": output,
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _response_events(answer: Body) -> list[Body]:
    """Return a response as the events of OpenAI's stream, with one delta per item."""
    start = {**answer, "status": "in_progress", "output": [], "usage": None}
    events: list[Body] = [
        {"type": "response.created", "response": start},
        {"type": "response.in_progress", "response": start},
    ]
    for index, item in enumerate(answer["output"]):
        is_text = item["type"] == "message"
        empty: Body = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        of_item = {"output_index": index}
        added = {**item, **empty, "status": "in_progress"}
        events.append({"type": "response.output_item.added", **of_item, "item": added})
        place = {**of_item, "item_id": item["id"]}
        if is_text:
            (part,) = item["content"]
            place["content_index"] = 0
            text = {"text": part["text"], "logprobs": []}
            events += [
                {"type": "response.content_part.added", **place, "part": {**part, "text": ""}},
                {
                    "type": "response.output_text.delta",
                    **place,
                    "delta": part["text"],
                    "logprobs": [],
                },
                {"type": "response.output_text.done", **place, **text},
                {"type": "response.content_part.done", **place, "part": part},
            ]
        elif item["type"] == "reasoning":
            kind, (part,) = "response.reasoning_text", item["content"]
            place["content_index"] = 0
            events += [
                {"type": f"{kind}.delta", **place, "delta": part["text"]},
                {"type": f"{kind}.done", **place, "text": part["text"]},
            ]
        else:
            kind = "response.function_call_arguments"
            done = {"arguments": item["arguments"], "name": item["name"]}
            events += [
                {"type": f"{kind}.delta", **place, "delta": item["arguments"]},
                {"type": f"{kind}.done", **place, **done},
            ]
        events.append({"type": "response.output_item.done", **of_item, "item": item})
    events.append({"type": f"response.{answer['status']}", "response": answer})
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]


DIALECTS = {
    "v1/messages": Dialect(_from_messages, _message, _message_events),
    "v1/responses": Dialect(_from_responses, _response, _response_events),
}
"""By path: the API that is served there."""
