"""Agents that use Anthropic's Messages or OpenAI's Responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.waiting import wait_until
from tests.workers.agents.test_gateway import (
    ADD,
    ASK,
    HERE,
    Exchange,
    exchange,  # noqa: F401 - a fixture
    session,  # noqa: F401
    url,
)
from tests.workers.agents.test_loop import new_loop, sampling_of, starts
from verl_like.process.sandbox import Sandbox
from workers.agents.gateway import AgentSession
from workers.agents.host import EnvironmentHost
from workers.agents.load_environment import EnvironmentSpec

CALL = 'so <tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
SCHEMA = ADD["function"]["parameters"]
USAGE = {"num_read": 7, "num_sampled": 5}


@pytest.fixture
def responses(session: AgentSession) -> Iterator[Any]:  # noqa: F811
    with openai.OpenAI(base_url=url(session), api_key="any") as client:
        yield client.responses


def test_responses_have_texts_calls_and_results(responses: Any, exchange: Exchange) -> None:  # noqa: F811
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA}, {"type": "web_search"}]
    settings: Any = {"model": "any", "instructions": "be brief", "tools": tools}
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "go"}]}]
    create = responses.create
    event, first = exchange(CALL, lambda: create(input=items, **settings), **USAGE)
    assert event["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "go"},
    ]
    assert [tool["function"]["name"] for tool in event["request"]["tools"]] == ["add"]
    text, call = first.output
    assert (text.content[0].text, call.name, json.loads(call.arguments)) == ("so", "add", {"a": 2})
    assert first.status == "completed"
    assert (first.usage.input_tokens, first.usage.output_tokens) == (7, 5)

    result = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    items += [*(item.to_dict() for item in first.output), result]
    event, last = exchange("done", lambda: create(input=items, **settings), finish_reason="length")
    assert event["request"]["extends"]
    (observed,) = event["messages"]
    assert (observed["role"], observed["name"], observed["content"]) == ("tool", "add", "2")
    assert (last.output_text, last.status) == ("done", "incomplete")
    assert last.incomplete_details.reason == "max_output_tokens"

    settings["previous_response_id"] = last.id
    event, _ = exchange("a", lambda: create(input="again", **settings))
    assert event["request"]["extends"]
    assert [message["content"] for message in event["messages"]] == ["again"]
    with pytest.raises(openai.NotFoundError, match="there is no response 'x'"):
        create(input="a", model="any", previous_response_id="x")


def test_responses_are_streamed(responses: Any, exchange: Exchange) -> None:  # noqa: F811
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA}]

    def stream() -> Any:
        with responses.stream(model="any", input="go", tools=tools) as events:
            kinds = [event.type for event in events]
            return kinds, events.get_final_response()

    _, (kinds, response) = exchange(CALL, stream, **USAGE)
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert {"response.output_text.delta", "response.function_call_arguments.delta"} <= {*kinds}
    assert (response.output_text, json.loads(response.output[1].arguments)) == ("so", {"a": 2})


BODY = {"model": "any", "max_tokens": 9, "messages": [{"role": "user", "content": "go"}]}
TOOLS = [{"name": "add", "input_schema": SCHEMA}, {"type": "web_search_20250305", "name": "web"}]
SYSTEM = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]


def test_messages_have_texts_calls_and_results(session: AgentSession, exchange: Exchange) -> None:  # noqa: F811
    body: Any = {**BODY, "system": SYSTEM, "tools": TOOLS, "tool_choice": {"type": "any"}}
    body |= {"stop_sequences": ["x"], "thinking": {"type": "enabled", "budget_tokens": 1024}}

    def post(messages: list[Any]) -> Any:
        path = url(session, "v1/messages?beta=true")
        return httpx.post(path, json={**body, "messages": messages}, timeout=30).json()

    event, first = exchange(CALL, lambda: post(body["messages"]), **USAGE)
    assert event["messages"][0] == {"role": "system", "content": "be brief"}
    assert event["request"]["max_tokens"] == 9
    sampling = event["request"]["sampling"]
    assert (sampling["stop"], sampling["tool_choice"]) == (["x"], "required")
    assert "thinking" in sampling
    text, call = first["content"]
    assert (text["type"], text["text"]) == ("text", "so")
    assert (call["type"], call["input"]) == ("tool_use", {"a": 2})
    assert first["stop_reason"] == "tool_use"
    assert first["usage"] == {"input_tokens": 7, "output_tokens": 5}

    result = {"type": "tool_result", "tool_use_id": call["id"]}
    content = [
        {**result, "content": [{"type": "text", "text": "2"}]},
        {"type": "text", "text": "go on"},
    ]
    messages = [
        *body["messages"],
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": content},
    ]
    event, last = exchange("done", lambda: post(messages))
    assert event["request"]["extends"]
    assert roles_and_texts(event) == [("tool", "2"), ("user", "go on")]
    assert last["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("v1/messages", {**BODY, "thread": {"id": "a"}}),
        ("v1/messages", {**BODY, "thread": "a"}),
        ("v1/responses", {"model": "any", "input": "go", "conversation": "a"}),
        ("v1/responses", {"model": "any", "input": "go", "prompt": {"id": "a"}}),
    ],
)
def test_messages_that_only_another_server_has_are_rejected_by_name(
    session: AgentSession,  # noqa: F811
    path: str,
    body: dict[str, Any],
) -> None:
    reply = httpx.post(url(session, path), json=body, timeout=30)
    name = ({*body} & {"thread", "conversation", "prompt"}).pop()
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, name)
    assert f"{name} refers to messages on another server" in error["message"]
    assert f"leave out {name}" in error["message"]


THOUGHT = "<think>\nhm\n</think>\n\n"


def test_messages_have_thinking_blocks(session: AgentSession, exchange: Exchange) -> None:  # noqa: F811
    def post(messages: list[Any], **more: Any) -> Any:
        body: Any = {**BODY, "tools": TOOLS, "messages": messages, **more}
        return httpx.post(url(session, "v1/messages"), json=body, timeout=30)

    messages: list[Any] = [{"role": "user", "content": "go"}]
    _, first = exchange(THOUGHT + CALL, lambda: post(messages).json())
    assert [block["type"] for block in first["content"]] == ["thinking", "text", "tool_use"]
    assert (first["content"][0]["thinking"], first["content"][1]["text"]) == ("hm", "so")

    call = first["content"][-1]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "2"}
    messages += [
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result]},
    ]
    event, answer = exchange(f"{THOUGHT}two", lambda: post(messages, stream=True).text)
    assert event["request"]["extends"]
    assert event["request"]["chat"][1]["reasoning_content"] == "hm"
    assert '"type": "thinking_delta", "thinking": "hm"' in answer
    assert '"type": "text_delta", "text": "two"' in answer


def test_responses_have_reasoning_items(responses: Any, exchange: Exchange) -> None:  # noqa: F811
    items: list[Any] = [{"role": "user", "content": "go"}]
    create = responses.create
    _, first = exchange(f"{THOUGHT}four", lambda: create(input=items, model="any"))
    reasoning, message = first.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "hm")
    assert (message.type, first.output_text) == ("message", "four")

    items += [*(item.to_dict() for item in first.output), {"role": "user", "content": "and"}]

    def stream() -> Any:
        with responses.stream(model="any", input=items) as events:
            kinds = [event.type for event in events]
            return kinds, events.get_final_response()

    event, (kinds, last) = exchange("hm</think>five", stream, is_open=True)
    assert event["request"]["extends"]
    assert event["request"]["chat"][1]["reasoning_content"] == "hm"
    assert {"response.reasoning_text.delta", "response.output_text.delta"} <= {*kinds}
    assert last.output_text == "five"


def roles_and_texts(event: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in event["messages"]]


URL = "data:image/png;base64,AAAA"


def test_images_of_both_apis_become_parts(
    responses: Any,
    session: AgentSession,  # noqa: F811
    exchange: Exchange,  # noqa: F811
) -> None:
    parts = [{"type": "input_text", "text": "is"}, {"type": "input_image", "image_url": URL}]
    items: list[Any] = [{"role": "user", "content": parts}, {"role": "user", "content": "it?"}]
    event, _ = exchange("no", lambda: responses.create(model="any", input=items))
    expected = [{"type": "text", "text": "is"}, {"type": "image", "url": URL}]
    after = [{"type": "text", "text": "\n\n"}, {"type": "text", "text": "it?"}]
    assert event["messages"] == [{"role": "user", "content": expected + after}]

    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    image = {"type": "image", "source": source}
    use = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [image]}
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "is"}, image]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    body = {**BODY, "messages": chat}
    event, _ = exchange("no", lambda: httpx.post(url(session, "v1/messages"), json=body))
    first, _, last = event["messages"]
    assert first["content"] == expected
    assert (last["role"], last["content"]) == ("tool", expected[1:])


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("v1/messages", {**BODY, "messages": 5}, "the body cannot be read"),
        ("v1/messages", {**BODY, "messages": [{"role": "user", "content": [{}]}]}, "'type'"),
        ("v1/responses", {"input": [{"type": "image"}]}, "input of the type 'image'"),
        ("v1/responses", [], "a JSON object"),
    ],
)
def test_invalid_bodies_are_rejected(
    path: str,
    body: Any,
    words: str,
    session: AgentSession,  # noqa: F811
) -> None:
    reply = httpx.post(url(session, path), json=body, timeout=10)
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]
    assert reply.json()["type"] == "error"


def test_anthropics_client_is_served(
    request: pytest.FixtureRequest,
    session: AgentSession,  # noqa: F811
    exchange: Exchange,  # noqa: F811
) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=url(session, "").rstrip("/"), api_key="any")
    request.addfinalizer(client.close)
    settings: Any = {**BODY, "tools": TOOLS}
    _, reply = exchange(CALL, lambda: client.messages.create(**settings), **USAGE)
    assert [block.type for block in reply.content] == ["text", "tool_use"]
    assert (reply.content[1].input, reply.stop_reason) == ({"a": 2}, "tool_use")

    def stream() -> Any:
        with client.messages.stream(**settings) as events:
            text = "".join(events.text_stream)
            return text, events.get_final_message()

    _, (text, whole) = exchange(CALL, stream, **USAGE)
    assert (text, whole.content[1].input, whole.usage.output_tokens) == ("so", {"a": 2}, 5)
    with pytest.raises(anthropic.BadRequestError, match="cannot be read"):
        client.messages.create(**{**settings, "messages": [{"role": "user", "content": [{}]}]})


def test_other_machines_reach_a_session_by_its_key(
    tmp_path: Path, tokenizer: Any, model: Any, host_of: Callable[..., EnvironmentHost]
) -> None:
    """The agent is in a sandbox without network; the router forwards the connections."""
    spec = EnvironmentSpec(
        f"{HERE}:waits_for_others",
        sandbox=Sandbox(network=False),
        endpoint="127.0.0.1:0",
        reuses_replies=True,
    )

    def send_requests() -> list[Any]:
        wait_until((tmp_path / "key").is_file)
        address, key = (tmp_path / "key").read_text().split()
        body: Any = {"model": "any", "messages": ASK, "max_tokens": 4}
        replies: list[Any] = []
        for headers in ({"x-api-key": key}, {"Authorization": f"Bearer {key}"}):
            body["messages"] = [{"role": "user", "content": str(len(replies))}]
            replies.append(httpx.post(f"{address}/chat/completions", json=body, headers=headers))
        body["messages"] = [{"role": "user", "content": "again"}]
        with openai.OpenAI(base_url=address, api_key=key) as client_of_openai:
            first, repeated = (client_of_openai.chat.completions.create(**body) for _ in range(2))
        assert first.choices[0].message.role == "assistant"
        assert repeated.id == first.id
        for headers in ({}, {"x-api-key": "0" * 32}, {"x-api-key": "../../etc"}):
            replies.append(httpx.post(f"{address}/chat/completions", json=body, headers=headers))
        with httpx.Client() as client:  # one connection, and another key in its second request
            client.get(f"{address}/models", headers={"x-api-key": key})
            replies.append(client.get(f"{address}/models", headers={"x-api-key": "0"}))
        (tmp_path / "done").touch()
        return replies

    loop = new_loop(model, tokenizer, host_of(spec, 30.0))
    with ThreadPoolExecutor(1) as other:
        future = other.submit(send_requests)
        start = starts(0, 1, folder=str(tmp_path))
        (trajectory,) = loop.play(start, sampling_of(tokenizer), 1)
        replies = future.result(10)
    assert (trajectory.ended, trajectory.problem) == ("terminated", "")
    assert trajectory.rewards[-1][1] == 0.0, "it can create Unix sockets"
    assert trajectory.num_turns == 3, "a repeated request is no turn"
    assert [reply.status_code for reply in replies] == [200, 200, 401, 401, 401, 401]


REMINDER = {"role": "system", "content": "Be brief."}
CACHED = {"cache_control": {"type": "ephemeral"}}
ADD_CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
CLAUDE = {
    "model": "policy",
    "max_tokens": 64000,
    "stream": True,
    "system": [
        {"type": "text", "text": "You are a coding agent."},
        {"type": "text", "text": "Today is Monday.", **CACHED},
    ],
    "tools": [{"name": "add", "description": "Adds.", "input_schema": {**SCHEMA, "$schema": "x"}}],
    "metadata": {"user_id": "a"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}
"""A request of Claude Code, shortened."""
CODEX = {
    "model": "policy",
    "stream": True,
    "tools": [
        {"type": "function", "name": "add", "strict": False, "parameters": SCHEMA},
        {"type": "namespace", "name": "agents", "tools": [{"type": "function"}]},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "a",
    "client_metadata": {"turn_id": "b"},
}
"""A request of Codex, shortened."""


def events_of(reply: Any) -> list[dict[str, Any]]:
    """Return the data of a stream's events."""
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "text/event-stream"
    return [json.loads(line[6:]) for line in reply.text.split("\n") if line.startswith("data: ")]


def test_requests_of_claude_code_are_turns_of_one_chat(
    session: AgentSession,  # noqa: F811
    exchange: Exchange,  # noqa: F811
) -> None:
    """Reminders between turns become user messages: templates reject later system messages."""

    def post(messages: list[Any]) -> Any:
        headers = {"Authorization": "Bearer a", "anthropic-beta": "a,b"}
        body = {**CLAUDE, "messages": messages}
        path = url(session, "v1/messages?beta=true")
        return httpx.post(path, json=body, headers=headers, timeout=30)

    texts = [{"type": "text", "text": "Hints."}, {"type": "text", "text": "Add.", **CACHED}]
    messages: list[Any] = [{"role": "user", "content": texts}, REMINDER]
    event, reply = exchange(ADD_CALL, lambda: post(messages))
    assert roles_and_texts(event) == [
        ("system", "You are a coding agent.Today is Monday."),
        ("user", "Hints.Add.\n\nBe brief."),
    ]
    assert {*event["request"]["sampling"]} == {"thinking", "output_config"}
    events = events_of(reply)
    use = next(e["content_block"] for e in events if e["type"] == "content_block_start")
    assert (use["type"], use["name"]) == ("tool_use", "add")
    deltas = [e["delta"] for e in events if e["type"].endswith("_delta")]
    assert json.loads(deltas[0]["partial_json"]) == {"a": 2}
    assert deltas[-1]["stop_reason"] == "tool_use"

    result = {"type": "tool_result", "tool_use_id": use["id"], "is_error": False, **CACHED}
    result["content"] = [{"type": "text", "text": "2"}, {"type": "text", "text": "!"}]
    messages += [
        {"role": "assistant", "content": [{**use, "input": {"a": 2}}]},
        {"role": "user", "content": [result]},
        REMINDER,
    ]
    event, reply = exchange("done", lambda: post(messages))
    assert event["request"]["extends"]
    assert roles_and_texts(event) == [("tool", "2!"), ("user", "Be brief.")]
    assert events_of(reply)[-1] == {"type": "message_stop"}


def test_requests_of_codex_are_turns_of_one_chat(
    session: AgentSession,  # noqa: F811
    exchange: Exchange,  # noqa: F811
) -> None:
    def post(items: list[Any]) -> Any:
        headers = {"Authorization": "Bearer a", "originator": "codex_exec"}
        path = url(session, "v1/responses")
        return httpx.post(path, json={**CODEX, "input": items}, headers=headers, timeout=30)

    def item(role: str, text: str) -> dict[str, Any]:
        content = [{"type": "input_text", "text": text}]
        return {"type": "message", "id": f"msg_{text}", "role": role, "content": content}

    items = [item("developer", "Code."), item("developer", "Skills.")]
    items += [item("user", "Here."), item("user", "Add.")]
    event, reply = exchange(ADD_CALL, lambda: post(items))
    assert roles_and_texts(event) == [("system", "Code.\n\nSkills."), ("user", "Here.\n\nAdd.")]
    assert [tool["function"]["name"] for tool in event["request"]["tools"]] == ["add"]
    last = events_of(reply)[-1]
    assert last["type"] == "response.completed"
    (call,) = last["response"]["output"]

    result = {"type": "function_call_output", "id": "fco_a", "call_id": call["call_id"]}
    items += [call, {**result, "output": "2"}, item("developer", "Be brief.")]
    event, reply = exchange("done", lambda: post(items))
    assert event["request"]["extends"]
    assert roles_and_texts(event) == [("tool", "2"), ("user", "Be brief.")]
    assert events_of(reply)[-1]["response"]["output"][0]["content"][0]["text"] == "done"


def test_a_token_count_is_estimated_without_a_turn(session: AgentSession) -> None:  # noqa: F811
    messages = [{"role": "user", "content": "a" * 4000}]
    reply = httpx.post(url(session, "v1/messages/count_tokens"), json={"messages": messages})
    assert 1000 <= reply.json()["input_tokens"] < 1020
