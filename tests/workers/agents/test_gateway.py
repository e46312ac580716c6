"""Agents that call the policy by OpenAI's API: turns, rows, rejected requests."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest
import torch

from tests.workers.agents.test_chat import CHATML, TOOL, tokenizer_with, whole
from tests.workers.agents.test_loop import (
    assert_same_bits,
    new_loop,
    replies_of,
    sampled_mask,
    sampling_of,
    starts,
)
from tests.workers.agents.test_players import starts_of
from trainer.cli.make_tiny import make_tokenizer
from verl_like.errors import ConfigError
from verl_like.process.sandbox import Sandbox
from workers.agents.chat import TurnRenderer
from workers.agents.gateway import AgentSession, endpoint
from workers.agents.host import EnvironmentHost
from workers.agents.load_environment import EnvironmentSpec
from workers.agents.requests import RejectedRequest, overridden_settings
from workers.agents.trajectory import Trajectory, ids_to_read
from workers.models.attention import warn_once
from workers.rollout.base import SamplingParams
from workers.rollout.sample import Sample

HERE = "tests.workers.agents.agents"
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
ASK: Any = [{"role": "user", "content": "go"}]
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": NUMBERS}}
Play = Callable[..., list[Trajectory]]


@pytest.fixture
def host(host_of: Callable[..., EnvironmentHost]) -> EnvironmentHost:
    """Agents in a sandbox without network: one with a player, and one with two."""
    paths = {"one": f"{HERE}:any_of_these", "two": f"{HERE}:negotiates"}
    return host_of(EnvironmentSpec(paths, sandbox=Sandbox(network=False)), 30.0)


@pytest.fixture
def play(tokenizer: Any, model: Any, host: EnvironmentHost) -> Play:
    """Return a function that plays trajectories of an agent of `agents`."""

    def play_agent(
        name: str, num: int = 1, decode: Any = None, arguments: Any = None, **settings: Any
    ) -> list[Trajectory]:
        loop = new_loop(model, tokenizer, host, **{"max_tokens_per_turn": 8, **settings})
        loop._engine.decode = decode
        row = {"environment": "one", "agent": name, "arguments": arguments or {}}
        return loop.play(starts(0, num, **row), sampling_of(tokenizer), 64)

    return play_agent


def test_the_requests_of_an_agent_are_the_turns_of_a_row(play: Play, tokenizer: Any) -> None:
    for trajectory in play("counts", num=4):
        is_sampled, turns = sampled_mask(trajectory), torch.tensor(trajectory.turns)
        assert (trajectory.ended, trajectory.problem) == ("terminated", "")
        assert trajectory.num_turns == 3
        assert trajectory.turns == sorted(trajectory.turns)
        assert trajectory.rewards == [(len(turns) - 1, 3.0)]
        assert trajectory.sample.log_probs[~is_sampled].isnan().all()
        observed = tokenizer.decode(trajectory.sample.tokens[~is_sampled])
        turns_end = "<eos>"  # the template ends a turn that was cut
        assert observed.replace(turns_end, "") == "<user>1<assistant><user>2<assistant>"
        assert tokenizer.decode(trajectory.sample.prompt) == "<bos><user>go<assistant>"
        for turn in range(3):
            assert int((is_sampled & (turns == turn)).sum()) <= 6


@pytest.mark.parametrize("name", ["counts_async", "streams"])
def test_asynchronous_and_streamed_requests_give_the_same_bits(play: Play, name: str) -> None:
    assert_same_bits(play(name), play("counts"))


@pytest.mark.parametrize("package", ["litellm", "langchain", "smolagents", "dspy"])
def test_the_agent_that_a_page_prints_for_a_package_plays_a_turn(play: Play, package: str) -> None:
    pytest.importorskip({"langchain": "langchain_openai"}.get(package, package))
    arguments = {"row": {"function": f"with_{package}"}}
    [played] = play("with_package", arguments=arguments)
    assert not played.problem
    assert sampled_mask(played).any()


def test_a_row_of_token_ids_has_the_sent_and_sampled_ids(play: Play) -> None:
    for trajectory in play("by_ids", num=2):
        assert (trajectory.problem, trajectory.num_turns) == ("", 3)
        assert list(trajectory.sample.prompt) == [1, 4, 30, 5]
        assert trajectory.sample.tokens[~sampled_mask(trajectory)].tolist() == [4, 5, 4, 5]


def test_a_repeated_request_is_a_separate_turn(play: Play) -> None:
    (trajectory,) = play("repeats")
    assert (trajectory.num_turns, trajectory.rewards[0][1]) == (4, 3.0)


def test_rewards_of_completions_are_at_their_turns(play: Play) -> None:
    (trajectory,) = play("rewards_turns")
    assert [reward for _, reward in trajectory.rewards] == [0.0, 0.5, 1.5, 2.5]
    is_sampled = sampled_mask(trajectory)
    for turn, (place, _) in enumerate(trajectory.rewards[1:]):
        assert (trajectory.turns[place], bool(is_sampled[place])) == (turn, True)
        assert place + 1 == len(trajectory.turns) or not is_sampled[place + 1]


def test_an_agent_with_players_returns_a_dict_of_rewards() -> None:
    with pytest.raises(TypeError, match="returned 1.0; .* a dict of rewards by player: a, b"):
        AgentSession(players=("a", "b")).end(1.0)


def test_an_agent_names_its_players_as_models(
    tokenizer: Any, model: Any, host: EnvironmentHost
) -> None:
    loop = new_loop(model, tokenizer, host)
    pair = starts_of(1, ("buyer", "seller"), environment="two")
    buyer, seller = loop.play(pair, sampling_of(tokenizer), 64)
    assert (buyer.problem, buyer.num_turns, seller.num_turns) == ("", 2, 1)
    assert [reward for _, reward in buyer.rewards] == [1.0, 0.25]
    assert [reward for _, reward in seller.rewards] == [-1.0]
    place, _ = buyer.rewards[-1]
    assert (buyer.turns[place], bool(sampled_mask(buyer)[place])) == (0, True)


@pytest.mark.parametrize(
    ("settings", "ended", "catches"),
    [({"max_turns": 2}, "max_turns", True), ({"max_turns": 99}, "length", False)],
)
def test_an_agent_may_give_a_reward_after_truncation(
    play: Play, settings: dict[str, Any], ended: str, catches: bool
) -> None:
    (trajectory,) = play("never_stops", arguments={"catches": catches}, **settings)
    assert (trajectory.ended, trajectory.problem) == (ended, "")
    assert trajectory.sample.finish_reason == "length"
    assert sum(reward for _, reward in trajectory.rewards) == (0.25 if catches else 0.0)
    assert sampled_mask(trajectory)[-1]


def test_each_branch_of_an_agent_has_its_own_limit(play: Play) -> None:
    """Without a limit per segment, the first branch leaves no tokens for the second one."""
    settings = {"max_tokens_per_turn": None, "max_turns": 99}
    for most, num_segments in ((None, 1), (29, 2)):
        (trajectory,) = play("fills_branches", max_tokens_per_segment=most, **settings)
        sample = trajectory.sample
        assert (trajectory.ended, trajectory.problem) == ("length", "")
        borders = [-len(sample.prompt), *sample.segments, len(sample.tokens)]
        lengths = [end - begin for begin, end in pairwise(borders)]
        assert len(lengths) == num_segments
        assert all(most is None or length <= most for length in lengths)
        assert (trajectory.rewards[-1][1] > 0) == (num_segments == 2), "the second branch's turns"
        assert sample.finish_reason == "length"


@pytest.mark.parametrize("last", ["terminated", "length"])
def test_an_agent_that_summarizes_a_full_conversation_is_not_truncated(
    play: Play, last: str
) -> None:
    arguments = {"fills_last": last == "length"}
    (trajectory,) = play("compacts", arguments=arguments, max_turns=99, max_tokens_per_segment=29)
    assert (trajectory.ended, trajectory.problem) == (last, "")
    assert len(trajectory.sample.segments) == 1
    assert trajectory.rewards[-1][1] == 1.0
    (trajectory,) = play(
        "compacts", arguments=arguments | {"fails": True}, max_turns=99, max_tokens_per_segment=29
    )
    assert ("ZeroDivisionError" in trajectory.problem) == (last == "terminated")


def test_only_a_prompt_that_is_too_long_is_rejected(play: Play) -> None:
    (trajectory,) = play("sends_a_long_prompt")
    assert [answer.get("end", False) for answer in trajectory.answers] == [False, True]
    assert (trajectory.ended, trajectory.problem) == ("terminated", "")
    assert (trajectory.num_turns, trajectory.rewards[0][1]) == (1, 1.0)


def test_a_request_with_another_history_starts_a_segment(
    play: Play, tokenizer: Any, model: Any
) -> None:
    for trajectory in play("rewrites", num=2):
        assert (trajectory.ended, trajectory.problem) == ("terminated", "")
        assert trajectory.num_turns == 3
        (begin,) = trajectory.sample.segments
        assert sampled_mask(trajectory)[begin - 1]
        segment, is_sampled = trajectory.sample.tokens[begin:], sampled_mask(trajectory)[begin:]
        observed = tokenizer.decode(segment[~is_sampled])
        assert observed.replace("<eos>", "") == "<bos><user>other<assistant><user>more<assistant>"
        with torch.no_grad():
            logits = model(segment[None]).logits[0, :-1].log_softmax(-1)
        expected = logits.gather(1, segment[1:, None])[:, 0][is_sampled[1:]]
        log_probs = trajectory.sample.log_probs[begin + 1 :][is_sampled[1:]]
        torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=0)


def test_a_retokenized_history_is_read_as_the_template_writes_it(
    play: Play, tokenizer: Any
) -> None:
    for trajectory in play("counts", num=2, history_tokens="retokenized"):
        assert (trajectory.ended, trajectory.problem) == ("terminated", "")
        assert trajectory.num_turns == 3
        sample, messages = trajectory.sample, list(ASK)
        for turn in range(3):
            of_turn = sampled_mask(trajectory) & (torch.tensor(trajectory.turns) == turn)
            first = int(of_turn.nonzero()[0])
            begins = [begin for begin in sample.segments if begin < first]
            context = sample.tokens[begins[-1] if begins else 0 : first].tolist()
            if not begins:
                context = [*sample.prompt, *context]
            assert context == whole(tokenizer, messages)
            text = tokenizer.decode(sample.tokens[of_turn], skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "user", "content": str(turn + 1)})


def test_special_tokens_in_messages_are_text(play: Play, tokenizer: Any) -> None:
    (trajectory,) = play("sends_special_tokens")
    assert (trajectory.problem, trajectory.num_turns) == ("", 2)
    sample = trajectory.sample
    observed = [*sample.prompt, *sample.tokens[~sampled_mask(trajectory)].tolist()]
    assert observed.count(tokenizer.eos_token_id) == 1, "the end of the first turn"


def test_an_unsupported_setting_is_overridden_or_rejected(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    arguments = {"name": "seed", "value": 3}
    assert_same_bits(play("sets", arguments=arguments), play("sets", arguments=arguments))
    (notice,) = [text for text in caplog.messages if "requests set" in text]
    assert "requests set seed, which the run" in notice
    (trajectory,) = play("sets", arguments=arguments, request_settings="reject")
    assert "seed=3 is not " in trajectory.problem


def test_choices_are_turns_and_have_log_probs(play: Play) -> None:
    for trajectory in play("requests_two_choices", num=3):
        assert (trajectory.ended, trajectory.problem) == ("terminated", "")
        assert (trajectory.num_turns, len(trajectory.sample.segments)) == (2, 1)
        (first, second), last = trajectory.rewards[1:], len(trajectory.turns) - 1
        assert (first[1], second) == (0.25, (last, 0.5))
        assert trajectory.turns[first[0]] == 0
    (trajectory,) = play("requests_two_choices", request_settings="override")
    assert "one choice, no log-probs" in trajectory.problem


def test_a_turn_ends_at_the_stop_strings_of_its_request(play: Play, tokenizer: Any) -> None:
    letters = {*"abcdefghijklmnop"}
    arguments = {"letters": sorted(letters)}
    for trajectory in play("stops", num=4, arguments=arguments, decode=tokenizer.decode):
        assert (trajectory.problem, trajectory.num_turns) == ("", 2)
        of_turn = sampled_mask(trajectory) & (torch.tensor(trajectory.turns) == 0)
        tokens = trajectory.sample.tokens[of_turn].tolist()
        *before, last = [tokenizer.decode([token]) for token in tokens]
        assert not any({*text} & letters for text in before)
        assert {*last} & letters or len(tokens) == 6 or tokens[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("raises", {}, "RuntimeError: out of order"),
        ("exits", {}, "it called sys.exit(3)"),
        ("returns", {}, "the agent gave the reward None, which is not a finite number. Return"),
        ("returns", {"value": "nan"}, "the agent gave the reward nan, which is not"),
        ("returns", {"value": {"chatcmpl-1": 1.0}}, "neither the id of a completion"),
        ("is_silent", {}, "without a request to the policy"),
        ("by_ids", {"added": 10**6}, "a token id is"),
    ],
)
def test_an_error_of_an_agent_is_a_failure_with_the_reason(
    play: Play, name: str, arguments: dict[str, Any], words: str
) -> None:
    (trajectory,) = play(name, arguments=arguments)
    assert trajectory.ended == "environment"
    assert words in trajectory.problem


def test_an_agent_that_hangs_ends_at_its_deadline(
    play: Play, host: EnvironmentHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_step_timeout_s", 2.0)
    (trajectory,) = play("hangs")
    assert trajectory.ended == "deadline"
    assert trajectory.problem == "no answer within environment.step_timeout_s=2 s"


def test_a_process_with_an_unanswered_agent_is_not_reused(host: EnvironmentHost) -> None:
    """A late or aborted agent would continue in it next to the next one."""
    row = {"environment": "one", "agent": "sends_its_pid", "arguments": {}}

    def pids_of(*numbers: int) -> list[str]:
        for number in numbers:
            host.open(number, (0, number), row)
        replies = replies_of(host, len(numbers))
        return [replies[number]["messages"][0]["content"] for number in numbers]

    def end(number: int) -> None:
        host.say(number, "a")
        assert replies_of(host, 1)[number]["end"]
        host.end(number)

    pids = pids_of(0, 1)
    host.end(0)
    end(1)
    later_pids = pids_of(2, 3)
    assert later_pids[0] == pids[1]
    assert later_pids[1] not in pids
    end(2)
    end(3)


def test_rng_is_seeded_by_the_prompt_and_other_chance_by_the_sample(play: Play) -> None:
    trajectories = play("draws", num=2)
    assert_same_bits(trajectories, play("draws", num=2))
    assert len({tuple(trajectory.sample.prompt) for trajectory in trajectories}) == 1
    assert len({trajectory.rewards[0][1] for trajectory in trajectories}) == 2


@pytest.mark.parametrize(
    ("name", "kwargs", "tools", "words"),
    [
        ("needs", {}, [], "the agent's parameter 'something' cannot be filled"),
        (
            "plain",
            {"size": 3},
            [],
            "environment.kwargs sets 'size', but the agent has no such parameter",
        ),
        ("plain", {}, ["tests.workers.agents.games:add"], "names its tools in its requests"),
    ],
)
def test_a_function_that_is_no_agent_is_rejected(
    name: str, kwargs: dict[str, Any], tools: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        EnvironmentSpec(f"{HERE}:{name}", kwargs, tools).load()


@pytest.fixture
def session() -> Iterator[AgentSession]:
    """The session of the endpoint in this process."""
    endpoint().session = session = AgentSession()
    yield session
    endpoint().session = None


Exchange = Callable[..., tuple[Any, Any]]


@pytest.fixture
def exchange(session: AgentSession) -> Iterator[Exchange]:
    """Return a function that sends a request as an agent, and answers it with a text.

    It returns the request as the rollout sees it, and the agent's result.
    """
    with ThreadPoolExecutor(1) as agent:

        def send_and_answer(text: str, send: Callable[[], Any], **details: Any) -> tuple[Any, Any]:
            future = agent.submit(send)
            event = session.next()
            session.answer({"text": text, **details})
            return event, future.result(10)

        yield send_and_answer


def url(session: AgentSession, path: str = "v1") -> str:
    return f"http://127.0.0.1:{endpoint().server_port}/{session.name}/{path}"


def create_of(session: AgentSession) -> Any:
    return openai.OpenAI(base_url=url(session), api_key="any").chat.completions.create


def test_tool_calls_are_parsed_and_their_results_are_observed(
    session: AgentSession, exchange: Exchange
) -> None:
    create = create_of(session)
    messages: list[Any] = [{"role": "user", "content": "what is 1 + 2?"}]
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    call += "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>"
    text = f"I add.{call} Then I wait."
    event, reply = exchange(text, lambda: create(model="any", messages=messages, tools=[ADD]))
    assert event["request"]["tools"] == [ADD]
    (choice,) = reply.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I add. Then I wait.")
    calls = choice.message.tool_calls
    arguments = [json.loads(call.function.arguments) for call in calls]
    assert arguments == [{"a": 1, "b": 2}, {"a": 1}]

    messages.append(choice.message)
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in calls]
    event, reply = exchange("3", lambda: create(model="any", messages=messages, tools=[ADD]))
    assert event["request"]["extends"]
    assert event["calls"] == 2
    results = [(result["role"], result["name"], result["content"]) for result in event["messages"]]
    assert results == [("tool", "add", "3")] * 2
    assert (reply.choices[0].finish_reason, reply.choices[0].message.content) == ("stop", "3")
    messages += [reply.choices[0].message, *ASK]
    event, _ = exchange("3", lambda: create(model="any", messages=messages))
    assert not event["request"]["extends"]  # without its tools, it has another prompt


def test_reasoning_is_told_apart_and_stays_in_the_history(
    session: AgentSession, exchange: Exchange
) -> None:
    create = create_of(session)
    harmony = (
        "<|channel|>analysis<|message|>two plus two is four<|end|><|start|>assistant"
        "<|channel|>final<|message|>4"
    )
    _, reply = exchange(harmony, lambda: create(model="any", messages=ASK))
    message = reply.choices[0].message
    assert (message.content, message.reasoning_content) == ("4", "two plus two is four")

    # most clients send back only the content
    messages = [*ASK, {"role": "assistant", "content": "4"}, *ASK]
    event, _ = exchange("5", lambda: create(model="any", messages=messages))
    assert event["request"]["extends"]
    assert event["request"]["chat"][1]["reasoning_content"] == "two plus two is four"
    call = (
        "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant to=functions.add"
        '<|channel|>commentary json<|message|>{"a": 2}'
    )
    _, reply = exchange(call, lambda: create(model="any", messages=ASK, tools=[ADD]))
    message = reply.choices[0].message
    assert (message.content, message.reasoning_content) == (None, "I add.")
    assert message.tool_calls[0].function.name == "add"


ADD_CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "tool_choice"),
    [("<tool_call>{</tool_call>", "auto"), ('{"name": 3}', "auto"), (ADD_CALL, "none")],
)
def test_incomplete_and_excluded_calls_stay_text(
    text: str, tool_choice: Any, session: AgentSession, exchange: Exchange
) -> None:
    settings: Any = {"messages": ASK, "tools": [ADD], "tool_choice": tool_choice}
    served = {"tool_choice": tool_choice}
    create = create_of(session)
    _, reply = exchange(text, lambda: create(model="any", **settings), served=served)
    assert (reply.choices[0].message.content, reply.choices[0].message.tool_calls) == (text, None)


def test_a_stream_has_calls_the_finish_reason_and_the_usage(
    session: AgentSession, exchange: Exchange
) -> None:
    def stream() -> list[Any]:
        options = {"stream_options": {"include_usage": True}, "stream": True}
        return list(create_of(session)(model="any", messages=ASK, tools=[ADD], **options))

    text = '{"name": "add", "arguments": {}}'
    _, chunks = exchange(text, stream, finish_reason="length", num_read=7, num_sampled=5)
    first, last, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert first.choices[0].delta.tool_calls[0].function.name == "add"
    assert last.choices[0].finish_reason == "length"
    assert (usage.usage.prompt_tokens, usage.usage.total_tokens) == (7, 12)


def test_concurrent_requests_are_answered_one_by_one(session: AgentSession) -> None:
    with ThreadPoolExecutor(3) as agent:
        create = create_of(session)
        chats = [[{"role": "user", "content": str(number)}] for number in range(3)]
        futures = [agent.submit(create, model="any", messages=messages) for messages in chats]
        for _ in chats:
            event = session.next()
            session.answer({"text": f"to {event['messages'][0]['content']}"})
        replies = [future.result(10).choices[0].message.content for future in futures]
    assert replies == ["to 0", "to 1", "to 2"]


def test_after_an_agent_returns_only_its_current_request_is_answered(
    session: AgentSession,
) -> None:
    with ThreadPoolExecutor(2) as agent:
        create = create_of(session)
        futures = [agent.submit(create, model="any", messages=ASK) for _ in range(2)]
        assert "request" in session.next()
        session.end(1.0)
        session.answer({"text": "late"})
        assert session.next() == {"end": True, "reward": 1.0, "rewards": []}
        problems = {future.exception(10): future for future in futures}
    (not_found,) = [problem for problem in problems if problem is not None]
    assert isinstance(not_found, openai.NotFoundError)
    assert problems[None].result().choices[0].message.content == "late"


def test_the_model_is_listed(session: AgentSession) -> None:
    models = openai.OpenAI(base_url=url(session), api_key="any").models.list()
    assert [model.id for model in models] == ["policy"]


def test_a_listed_model_can_be_retrieved() -> None:
    session = AgentSession(players=("the buyer", "a/b"))
    endpoint().session = session
    models = openai.OpenAI(base_url=url(session), api_key="any").models
    assert [models.retrieve(model.id) for model in models.list()] == [*models.list()]
    assert {model.id for model in models.list()} == {"the buyer", "a/b"}
    with pytest.raises(openai.NotFoundError, match="there is no GET v1/models/gpt"):
        models.retrieve("gpt")


def test_a_body_may_be_sent_in_chunks(session: AgentSession, exchange: Exchange) -> None:
    content = json.dumps({"messages": ASK, "model": "policy"}).encode()
    parts = [content[:1], content[1:20], content[20:]]
    with httpx.Client(timeout=10) as client:
        for _ in range(2):  # the connection stays usable
            _, reply = exchange("hi", lambda: client.post(url(session, CHAT), content=iter(parts)))
            assert reply.json()["choices"][0]["message"]["content"] == "hi"
        too_long = (b" " * 2**20 for _ in range(17))
        assert client.post(url(session, CHAT), content=too_long).status_code == 413
    for chunk in (b"-5\r\n", b"zz\r\n", b"\r\n", b"1_0\r\n"):
        head = f"POST /{session.name}/{CHAT} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        with socket.create_connection(("127.0.0.1", endpoint().server_port), 10) as connection:
            connection.sendall(head.encode() + chunk)
            assert connection.recv(4096).startswith(b"HTTP/1.1 400")


def test_an_unknown_or_ended_session_is_not_found(
    session: AgentSession, exchange: Exchange
) -> None:
    create = create_of(session)
    exchange("a", lambda: create(model="any", messages=ASK))
    session.end(1.0)
    with pytest.raises(openai.NotFoundError, match="the agent of this session has ended"):
        create(model="any", messages=ASK)
    endpoint().session = AgentSession()
    with pytest.raises(openai.NotFoundError, match=f"there is no session '{session.name}'"):
        create(model="any", messages=ASK)


CHAT, IDS = "v1/chat/completions", "inference/v1/generate"


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a", **fields}]}


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("v1/completions", {}, 404, "there is no POST v1/completions"),
        (CHAT, "{", 400, "the body is not"),
        (CHAT, {}, 400, "messages are missing"),
        (CHAT, message(role="judge"), 400, "is not a message with"),
        (CHAT, message(tool_calls=[5]), 400, "tool_calls=[5] is not a list of calls"),
        (CHAT, {**message(), "temperature": "hot"}, 400, "temperature='hot' must be number"),
        (CHAT, "[" * 100_000, 400, "the body is not"),
        (CHAT, message(content=[{"type": "image_url"}]), 400, "the image None, but an"),
        (CHAT, message(content=[{"type": "image", "sha": "a"}]), 400, "an image must be a data:"),
        (CHAT, message(content=[{"type": "input_audio"}]), 400, "'input_audio'; only text is"),
        (CHAT, message(tool_calls=[{"function": {"name": "a"}}]), 400, "is not a call of a tool"),
        (CHAT, {**message(), "n": 0}, 400, "n=0 is less than 1"),
        (CHAT, {**message(), "tools": [{"name": "add"}]}, 400, "tools are functions"),
        (IDS, {"token_ids": ["a"]}, 400, "token_ids=['a'] must be array of integer"),
        (IDS, {"token_ids": [1], "sampling_params": 1}, 400, "sampling_params=1 must be object"),
    ],
)
def test_invalid_requests_get_errors_in_openais_format(
    path: str, body: Any, status: int, words: str, session: AgentSession
) -> None:
    content = body if isinstance(body, str) else json.dumps(body)
    reply = httpx.post(url(session, path), content=content, timeout=10)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (status, "invalid_request_error")
    assert words in error["message"]


def test_an_invalid_request_raises_only_its_own_error(
    play: Play, session: AgentSession, exchange: Exchange
) -> None:
    """In the rollout's worker and in the agent's process; the next request is answered."""
    (trajectory,) = play("sends_invalid_requests")
    assert (trajectory.ended, trajectory.problem) == ("terminated", "")
    assert trajectory.num_turns == 2
    tools = [{"type": "function", "function": {"name": "add", "parameters": 5}}]
    call = "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>"
    _, reply = exchange(
        call, lambda: httpx.post(url(session, CHAT), json={**message(), "tools": tools})
    )
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    _, reply = exchange("hi", lambda: httpx.post(url(session, CHAT), json=message()))
    assert reply.status_code == 200


def test_a_body_that_is_too_long_is_rejected(
    session: AgentSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.agents.gateway.LONGEST_BODY", 8)
    reply = httpx.post(url(session, CHAT), content="x" * 9, timeout=10)
    assert reply.status_code == 413


def test_a_request_continues_a_row_only_if_it_has_the_rows_text() -> None:
    """Otherwise the whole chat is rendered."""
    tokenizer = tokenizer_with(CHATML)
    chat = TurnRenderer(tokenizer, [], [tokenizer.eos_token_id])
    sampled = [*tokenizer("a guess", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    sample = Sample(chat.prompt(ASK), tokens=torch.tensor(sampled), finish_reason="stop")
    observed = {"role": "user", "content": "no"}
    messages = [*ASK, {"role": "assistant", "content": "a guess"}, observed]
    request: dict[str, Any] = {"extends": False, "ids": None, "chat": messages}
    expected = chat.between(sampled[-1], [observed])
    assert ids_to_read(sample, request, [], chat, True) == (expected, False)
    extends = {**request, "extends": True}
    assert ids_to_read(sample, extends, [observed], chat, True) == (expected, False)
    assert ids_to_read(sample, extends, [observed], chat, False) == (expected, False)

    messages[1] = {"role": "assistant", "content": "another"}
    whole_chat = whole(tokenizer, messages)
    assert ids_to_read(sample, request, [], chat, True) == (whole_chat, True)
    split = Sample([1], tokens=torch.tensor([5, *whole_chat, 7]), segments=(1,))
    by_ids = {**request, "ids": [*whole_chat, 7, 8]}
    assert ids_to_read(split, by_ids, [], chat, True) == ([8], False)
    assert ids_to_read(split, {**by_ids, "ids": [1, 5, 9]}, [], chat, True) == ([1, 5, 9], True)


def test_tools_of_a_request_are_in_its_prompt() -> None:
    tokenizer = tokenizer_with(CHATML)
    chat = TurnRenderer(tokenizer, [], [tokenizer.eos_token_id])
    assert chat.with_tools([TOOL]).prompt(ASK) == whole(tokenizer, ASK, [TOOL])
    assert chat.with_tools([TOOL]) is chat.with_tools([dict(TOOL)])
    with pytest.raises(ConfigError, match="does not write tools"):
        TurnRenderer(make_tokenizer(), [], [2]).with_tools([TOOL])


def test_settings_are_compared_with_the_runs_sampling() -> None:
    run = SamplingParams(
        max_tokens=9, stop_token_ids=(2, 3), top_p=0.9, stop_strings=("b", "a"), do_sample=False
    )
    same = {"temperature": 0, "top_p": 0.9, "stop": ["a", "b"], "stop_token_ids": [3], "top_k": -1}
    for overrides in ("serve", "override", "reject"):
        assert overridden_settings(same, run, overrides) == []
    for name, value in {"temperature": 1, "top_k": 5, "stop": "a", "stop_token_ids": [4]}.items():
        with pytest.raises(RejectedRequest, match=f"{name}=.* differs from this run's"):
            overridden_settings({name: value}, run, "reject")
        assert overridden_settings({name: value}, run, "override") == [name]
        assert overridden_settings({name: value}, run, "serve") == [name] * (name != "stop")
    with pytest.raises(RejectedRequest, match="seed=1 is not supported in an agent's"):
        overridden_settings({"seed": 1}, run, "reject")
    served = {"n": 2, "logprobs": True, "tool_choice": "none", "stop": "x"}
    others = {"seed": 1, "tool_choice": "required", "response_format": {"type": "json_object"}}
    assert overridden_settings(served, run, "serve") == []
    assert overridden_settings(served, run, "serve", can_stop=False) == ["stop"]
    assert overridden_settings(others, run, "serve") == [*others]
    schema = {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}
    assert overridden_settings(schema, run, "override") == ["response_format"]
    for mode in ("serve", "reject"):
        with pytest.raises(RejectedRequest, match="response_format"):
            overridden_settings(schema, run, mode)
    neutral = {"n": 1, "logprobs": False, "tool_choice": "auto"}
    assert (
        overridden_settings({**neutral, "response_format": {"type": "text"}}, run, "reject") == []
    )


def test_a_request_that_the_client_repeats_gets_the_first_response(
    session: AgentSession,
) -> None:
    client = openai.OpenAI(base_url=url(session), api_key="x", timeout=0.3, max_retries=4)
    with ThreadPoolExecutor() as pool:
        future = pool.submit(client.chat.completions.create, model="policy", messages=ASK)
        assert session.next()["request"]["chat"] == [{"role": "user", "content": "go"}]
        time.sleep(0.6)  # the client repeats the request meanwhile
        session.answer({"text": "hi", "finish_reason": "stop", "num_read": 1, "num_sampled": 1})
        reply = future.result()
    assert (reply.choices[0].message.content, reply.id) == ("hi", f"{session.name}-0")
    session.end(1.0)
    assert session.next()["end"], "no second request has come"
