"""Agents that use Anthropic's Messages or OpenAI's Responses."""

from __future__ import annotations

import json
import time
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
from workers.agents.gateway import Session
from workers.agents.host import EnvironmentHost

CALL = 'so <tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
SCHEMA = ADD["function"]["parameters"]
SAID = {"num_read": 7, "num_drawn": 5}


def responses(session: Session) -> Any:  # noqa: F811
    return openai.OpenAI(base_url=url(session), api_key="any").responses


def test_responses_carry_texts_calls_and_results(session: Session, answered: Answered) -> None:  # noqa: F811
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA}, {"type": "web_search"}]
    settings: Any = {"model": "any", "instructions": "be brief", "tools": tools}
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "go"}]}]
    create = responses(session).create
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


def test_responses_are_streamed(session: Session, answered: Answered) -> None:  # noqa: F811
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA}]

    def stream() -> Any:
        with responses(session).stream(model="any", input="go", tools=tools) as events:
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


def post(session: Session, body: Any) -> Any:  # noqa: F811
    return httpx.post(url(session, "v1/messages?beta=true"), json=body, timeout=30)


def test_messages_carry_texts_calls_and_results(session: Session, answered: Answered) -> None:  # noqa: F811
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


def test_messages_are_streamed(session: Session, answered: Answered) -> None:  # noqa: F811
    body = {**ASKED, "tools": TOOLS, "stream": True}
    _, found = answered(CALL, lambda: post(session, body), **SAID)
    events = [
        dict(line.split(": ", 1) for line in one.split("\n"))
        for one in found.text.split("\n\n")[:-1]
    ]
    assert [event["event"] for event in events] == [
        "message_start",
        *["content_block_start", "content_block_delta", "content_block_stop"] * 2,
        "message_delta",
        "message_stop",
    ]
    data = [json.loads(event["data"]) for event in events]
    assert data[2]["delta"] == {"type": "text_delta", "text": "so"}
    assert json.loads(data[5]["delta"]["partial_json"]) == {"a": 2}
    assert data[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("v1/messages", {**ASKED, "messages": 5}, "the body is not understood"),
        ("v1/messages", {**ASKED, "messages": [{"role": "user", "content": [{}]}]}, "'type'"),
        ("v1/responses", {"input": [{"type": "image"}]}, "input of the type 'image'"),
        ("v1/responses", {"input": []}, "messages are missing"),
        ("v1/responses", [], "no JSON object"),
    ],
)
def test_bodies_that_are_not_understood_are_rejected(
    path: str,
    body: Any,
    words: str,
    session: Session,  # noqa: F811
) -> None:
    found = httpx.post(url(session, path), json=body, timeout=10)
    assert found.status_code == 400
    assert words in found.json()["error"]["message"]
    assert found.json()["type"] == "error"


def test_anthropics_client_is_served(session: Session, answered: Answered) -> None:  # noqa: F811
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=url(session, "").rstrip("/"), api_key="any")
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
    with pytest.raises(anthropic.BadRequestError, match="not understood"):
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
        asks = openai.OpenAI(base_url=address, api_key=key).chat.completions
        found.append(asks.create(**{**body, "messages": [{"role": "user", "content": "again"}]}))
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


@pytest.mark.parametrize(("reuses", "num_turns"), [(False, 4), (True, 2)])
def test_a_repeated_request_is_a_turn_or_not_by_a_key(
    reuses: bool,
    num_turns: int,
    play: Play,  # noqa: F811
) -> None:
    spec = EnvironmentSpec(f"{HERE}:any_of_these", reuses_replies=reuses)
    with closing(EnvironmentHost(spec, 30.0)) as own:
        (one,) = play("repeats", on=own)
    assert (one.num_turns, one.rewards[0][1]) == (num_turns, 1.0 if reuses else 3.0)
