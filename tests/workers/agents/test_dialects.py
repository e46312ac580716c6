"""Agents that use Anthropic's Messages or OpenAI's Responses."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.workers.agents.test_gateway import (
    ADD,
    ASK,
    HERE,
    Answered,
    Play,
    answered,  # noqa: F401 - a fixture
    host,  # noqa: F401
    play,  # noqa: F401
    session,  # noqa: F401
    url,
)
from verl_like.process.sandbox import Sandbox
from workers.agents.environment import EnvironmentSpec
from workers.agents.gateway import AgentSession
from workers.agents.host import EnvironmentHost

CALL = 'so <tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
SCHEMA = ADD["function"]["parameters"]
SAID = {"num_read": 7, "num_sampled": 5}


@pytest.fixture
def responses(session: AgentSession) -> Iterator[Any]:  # noqa: F811
    with openai.OpenAI(base_url=url(session), api_key="any") as client:
        yield client.responses


def test_responses_carry_texts_calls_and_results(responses: Any, answered: Answered) -> None:  # noqa: F811
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA}, {"type": "web_search"}]
    settings: Any = {"model": "any", "instructions": "be brief", "tools": tools}
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "go"}]}]
    create = responses.create
    event, first = answered(CALL, lambda: create(input=items, **settings), **SAID)
    assert event["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "go"},
    ]
    assert [tool["function"]["name"] for tool in event["request"]["tools"]] == ["add"]
    text, call = first.output
    assert (text.content[0].text, call.name, json.loads(call.arguments)) == ("so", "add", {"a": 2})
    assert (first.status, first.usage.input_tokens, first.usage.output_tokens) == (
        "completed",
        7,
        5,
    )

    result = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    echoed = [*items, *(item.to_dict() for item in first.output), result]
    event, last = answered("done", lambda: create(input=echoed, **settings), finish_reason="length")
    assert event["request"]["extends"]
    (told,) = event["messages"]
    assert (told["role"], told["name"], told["content"]) == ("tool", "add", "2")
    assert (last.output_text, last.status) == ("done", "incomplete")
    assert last.incomplete_details.reason == "max_output_tokens"

    more: Any = {**settings, "previous_response_id": last.id}
    event, _ = answered("a", lambda: create(input="again", **more))
    assert event["request"]["extends"]
    assert [one["content"] for one in event["messages"]] == ["again"]
    with pytest.raises(openai.NotFoundError, match="there is no response 'x'"):
        create(input="a", model="any", previous_response_id="x")


def test_responses_are_streamed(responses: Any, answered: Answered) -> None:  # noqa: F811
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA}]

    def stream() -> Any:
        with responses.stream(model="any", input="go", tools=tools) as events:
            kinds = [event.type for event in events]
            return kinds, events.get_final_response()

    _, (kinds, found) = answered(CALL, stream, **SAID)
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert {"response.output_text.delta", "response.function_call_arguments.delta"} <= {*kinds}
    assert (found.output_text, json.loads(found.output[1].arguments)) == ("so", {"a": 2})


ASKED = {"model": "any", "max_tokens": 9, "messages": [{"role": "user", "content": "go"}]}
TOOLS = [{"name": "add", "input_schema": SCHEMA}, {"type": "web_search_20250305", "name": "web"}]
SYSTEM = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]


def post(session: AgentSession, body: Any) -> Any:  # noqa: F811
    return httpx.post(url(session, "v1/messages?beta=true"), json=body, timeout=30)


def test_messages_carry_texts_calls_and_results(session: AgentSession, answered: Answered) -> None:  # noqa: F811
    body: Any = {**ASKED, "system": SYSTEM, "tools": TOOLS, "tool_choice": {"type": "any"}}
    body |= {"stop_sequences": ["x"], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    event, found = answered(CALL, lambda: post(session, body), **SAID)
    first = found.json()
    assert event["messages"][0] == {"role": "system", "content": "be brief"}
    assert event["request"]["max_tokens"] == 9
    settings = event["request"]["sampling"]
    assert (settings["stop"], settings["tool_choice"]) == (["x"], "required")
    assert "thinking" in settings
    assert [block["type"] for block in first["content"]] == ["text", "tool_use"]
    assert (first["content"][0]["text"], first["content"][1]["input"]) == ("so", {"a": 2})
    assert (first["stop_reason"], first["usage"]) == (
        "tool_use",
        {"input_tokens": 7, "output_tokens": 5},
    )
    result = {"type": "tool_result", "tool_use_id": first["content"][1]["id"]}
    told = [
        {**result, "content": [{"type": "text", "text": "2"}]},
        {"type": "text", "text": "go on"},
    ]
    messages = [
        *body["messages"],
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": told},
    ]
    event, found = answered("done", lambda: post(session, {**body, "messages": messages}))
    assert event["request"]["extends"]
    assert [(one["role"], one["content"]) for one in event["messages"]] == [
        ("tool", "2"),
        ("user", "go on"),
    ]
    assert found.json()["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("v1/messages", {**ASKED, "messages": 5}, "the body cannot be read"),
        ("v1/messages", {**ASKED, "messages": [{"role": "user", "content": [{}]}]}, "'type'"),
        ("v1/responses", {"input": [{"type": "image"}]}, "input of the type 'image'"),
        ("v1/responses", [], "a JSON object"),
    ],
)
def test_bodies_that_are_not_understood_are_rejected(
    path: str,
    body: Any,
    words: str,
    session: AgentSession,  # noqa: F811
) -> None:
    found = httpx.post(url(session, path), json=body, timeout=10)
    assert found.status_code == 400
    assert words in found.json()["error"]["message"]
    assert found.json()["type"] == "error"


def test_anthropics_client_is_served(
    request: pytest.FixtureRequest,
    session: AgentSession,  # noqa: F811
    answered: Answered,  # noqa: F811
) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=url(session, "").rstrip("/"), api_key="any")
    request.addfinalizer(client.close)
    settings: Any = {**ASKED, "tools": TOOLS}
    _, found = answered(CALL, lambda: client.messages.create(**settings), **SAID)
    assert [block.type for block in found.content] == ["text", "tool_use"]
    assert (found.content[1].input, found.stop_reason) == ({"a": 2}, "tool_use")

    def stream() -> Any:
        with client.messages.stream(**settings) as events:
            text = "".join(events.text_stream)
            return text, events.get_final_message()

    _, (text, whole) = answered(CALL, stream, **SAID)
    assert (text, whole.content[1].input, whole.usage.output_tokens) == ("so", {"a": 2}, 5)
    with pytest.raises(anthropic.BadRequestError, match="cannot be read"):
        client.messages.create(**{**settings, "messages": [{"role": "user", "content": [{}]}]})


def test_a_session_is_reached_from_elsewhere_by_its_key(tmp_path: Path, play: Play) -> None:  # noqa: F811
    """The agent is in a sandbox without network; the router forwards the connections."""
    sandbox = Sandbox(network=False)
    spec = EnvironmentSpec(f"{HERE}:any_of_these", sandbox=sandbox, endpoint="127.0.0.1:0")

    def act() -> list[Any]:
        while not (tmp_path / "there").is_file():
            time.sleep(0.02)
        address, key = (tmp_path / "there").read_text().split()
        body = {"model": "any", "messages": ASK, "max_tokens": 4}
        found: list[Any] = []
        for headers in ({"x-api-key": key}, {"Authorization": f"Bearer {key}"}):
            asked = {**body, "messages": [{"role": "user", "content": str(len(found))}]}
            found.append(httpx.post(f"{address}/chat/completions", json=asked, headers=headers))
        again = {**body, "messages": [{"role": "user", "content": "again"}]}
        with openai.OpenAI(base_url=address, api_key=key) as client_of_openai:
            found.append(client_of_openai.chat.completions.create(**again))
        for headers in ({}, {"x-api-key": "0" * 32}, {"x-api-key": "../../etc"}):
            found.append(httpx.post(f"{address}/chat/completions", json=body, headers=headers))
        with httpx.Client() as client:  # one connection, and another key in its second request
            client.get(f"{address}/models", headers={"x-api-key": key})
            found.append(client.get(f"{address}/models", headers={"x-api-key": "0"}))
        (tmp_path / "done").touch()
        return found

    with closing(EnvironmentHost(spec, 30.0)) as outer, ThreadPoolExecutor(1) as other:
        done = other.submit(act)
        row = {"folder": str(tmp_path)}
        (one,) = play("lets_others_ask", on=outer, arguments={}, row=row)
        found = done.result(10)
    assert (one.ended, one.num_turns, one.problem) == ("terminated", 3, "")
    assert [answer.status_code for answer in (*found[:2], *found[3:])] == [
        200,
        200,
        401,
        401,
        401,
        401,
    ]
    assert found[2].choices[0].message.role == "assistant"


def test_a_repeated_request_is_no_turn_by_a_key(play: Play) -> None:  # noqa: F811
    sandbox = Sandbox(network=False)
    spec = EnvironmentSpec(f"{HERE}:any_of_these", reuses_replies=True, sandbox=sandbox)
    with closing(EnvironmentHost(spec, 30.0)) as outer:
        (one,) = play("repeats", on=outer)
    assert (one.num_turns, one.rewards[0][1]) == (2, 1.0)


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
        {
            "type": "function",
            "name": "add",
            "description": "A.",
            "strict": False,
            **{"parameters": SCHEMA},
        },
        {
            "type": "namespace",
            "name": "agents",
            "description": "B.",
            "tools": [{"type": "function"}],
        },
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


def events_of(answer: Any) -> list[dict[str, Any]]:
    """The data of a stream's events."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream"
    return [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: ")]


def test_requests_of_claude_code_are_turns_of_one_chat(
    session: AgentSession,  # noqa: F811
    answered: Answered,  # noqa: F811
) -> None:
    """Reminders between turns are the user's: chat templates reject a later system message."""

    def ask(messages: list[Any]) -> Any:
        body = {**CLAUDE, "messages": messages}
        headers = {
            "Authorization": "Bearer a",
            "anthropic-beta": "a,b",
            "X-Stainless-Retry-Count": "0",
        }
        path = url(session, "v1/messages?beta=true")
        return httpx.post(path, json=body, headers=headers, timeout=30)

    texts = [{"type": "text", "text": "Hints."}, {"type": "text", "text": "Add.", **CACHED}]
    messages: list[Any] = [{"role": "user", "content": texts}, REMINDER]
    event, answer = answered(ADD_CALL, lambda: ask(messages))
    assert event["messages"] == [
        {"role": "system", "content": "You are a coding agent.Today is Monday."},
        {"role": "user", "content": "Hints.Add.\n\nBe brief."},
    ]
    assert {*event["request"]["sampling"]} == {"thinking", "output_config"}
    use = next(e["content_block"] for e in events_of(answer) if e["type"] == "content_block_start")
    assert (use["type"], use["name"]) == ("tool_use", "add")
    deltas = [e["delta"] for e in events_of(answer) if e["type"].endswith("_delta")]
    assert json.loads(deltas[0]["partial_json"]) == {"a": 2}
    assert deltas[-1]["stop_reason"] == "tool_use"

    result = {"type": "tool_result", "tool_use_id": use["id"], "is_error": False, **CACHED}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    messages += [
        {"role": "assistant", "content": [{**use, "input": {"a": 2}}]},
        {
            "role": "user",
            "content": [{**result, "content": [{"type": "text", "text": "2"}, image]}],
        },
        REMINDER,
    ]
    event, answer = answered("done", lambda: ask(messages))
    assert event["request"]["extends"]
    assert [(message["role"], message["content"]) for message in event["messages"]] == [
        ("tool", "2[image]"),
        ("user", "Be brief."),
    ]
    assert events_of(answer)[-1] == {"type": "message_stop"}


def test_requests_of_codex_are_turns_of_one_chat(
    session: AgentSession,  # noqa: F811
    answered: Answered,  # noqa: F811
) -> None:
    def ask(items: list[Any]) -> Any:
        headers = {"Authorization": "Bearer a", "originator": "codex_exec"}
        path = url(session, "v1/responses")
        return httpx.post(path, json={**CODEX, "input": items}, headers=headers, timeout=30)

    def item(role: str, text: str) -> dict[str, Any]:
        content = [{"type": "input_text", "text": text}]
        return {"type": "message", "id": f"msg_{text}", "role": role, "content": content}

    items = [item("developer", "Code."), item("developer", "Skills."), item("user", "Here.")]
    items.append(item("user", "Add."))
    event, answer = answered(ADD_CALL, lambda: ask(items))
    assert event["messages"] == [
        {"role": "system", "content": "Code.\n\nSkills."},
        {"role": "user", "content": "Here.\n\nAdd."},
    ]
    assert [tool["function"]["name"] for tool in event["request"]["tools"]] == ["add"]
    last = events_of(answer)[-1]
    assert last["type"] == "response.completed"
    (call,) = last["response"]["output"]

    output = {"type": "function_call_output", "id": "fco_a", "call_id": call["call_id"]}
    items += [call, {**output, "output": "2"}, item("developer", "Be brief.")]
    event, answer = answered("done", lambda: ask(items))
    assert event["request"]["extends"]
    assert [(message["role"], message["content"]) for message in event["messages"]] == [
        ("tool", "2"),
        ("user", "Be brief."),
    ]
    assert events_of(answer)[-1]["response"]["output"][0]["content"][0]["text"] == "done"


def test_a_count_of_tokens_is_estimated_without_a_turn(session: AgentSession) -> None:  # noqa: F811
    messages = [{"role": "user", "content": "a" * 4000}]
    answer = httpx.post(url(session, "v1/messages/count_tokens"), json={"messages": messages})
    assert 1000 <= answer.json()["input_tokens"] < 1020
