"""Agents that call the policy by OpenAI's API: turns, rows, rejected requests."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import torch

from tests.workers.agents.test_chat import CHATML, TOOL, tokenizer_with, whole
from tests.workers.agents.test_loop import WIDTH, drawn_of, fresh_engine, same_bits
from trainer.cli.make_tiny import make_tokenizer
from verl_like.errors import ConfigError
from verl_like.process.sandbox import Sandbox
from workers.agents.chat import TurnRenderer
from workers.agents.environment import EnvironmentSpec
from workers.agents.gateway import AgentSession, RejectedRequest, endpoint
from workers.agents.host import EnvironmentHost
from workers.agents.loop import TurnLoop
from workers.agents.trajectory import Trajectory, TrajectoryStart, ids_to_read, overridden
from workers.config import EnvironmentConfig
from workers.models.attention import warn_once
from workers.rollout.base import SamplingParams
from workers.rollout.sample import Sample
from workers.rollout.sampling import noise_key

HERE = "tests.workers.agents.agents"
STEP_S = 30.0
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
ASK: Any = [{"role": "user", "content": "go"}]
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": NUMBERS}}
Play = Callable[..., list[Trajectory]]


@pytest.fixture(scope="module")
def host(host_of: Callable[..., EnvironmentHost]) -> EnvironmentHost:
    """Agents in a sandbox without a network."""
    return host_of(EnvironmentSpec(f"{HERE}:any_of_these", sandbox=Sandbox(network=False)), STEP_S)


@pytest.fixture
def play(tokenizer: Any, model: Any, host: EnvironmentHost) -> Play:
    """Play trajectories of an agent of `agents`."""

    def played(
        name: str,
        num: int = 1,
        on: EnvironmentHost = host,
        retries: int = 0,
        decode: Any = None,
        **more: Any,
    ) -> list[Trajectory]:
        arguments, columns = more.pop("arguments", {}), more.pop("row", {})
        config = EnvironmentConfig(**{"max_tokens_per_turn": 8, "retries": retries, **more})
        stops = (tokenizer.eos_token_id,)
        chat = TurnRenderer(tokenizer, [], stops)
        engine = fresh_engine(model)
        engine.decode = decode
        loop = TurnLoop(engine, on, chat, config)
        starts = []
        for number in range(num):
            row = {"number": number, "agent": name, "arguments": arguments, **columns}
            key = noise_key(0, "uid", number)
            seeds = noise_key(0, "uid", -1), key
            starts.append(TrajectoryStart("a", row, seeds, key, f"sample {number}"))
        return loop.play(starts, SamplingParams(max_tokens=WIDTH, stop_token_ids=stops), 64)

    return played


def test_the_requests_of_an_agent_are_the_turns_of_a_row(play: Play, tokenizer: Any) -> None:
    for one in play("counts", num=4):
        assert (one.ended, one.problem, one.num_turns) == ("terminated", "", 3)
        assert one.turns == sorted(one.turns)
        assert [reward for _, reward in one.rewards] == [3.0]
        assert one.rewards[0][0] == len(one.sample.tokens) - 1
        assert one.sample.log_probs[~drawn_of(one)].isnan().all()
        observed = tokenizer.decode(one.sample.tokens[~drawn_of(one)])
        assert observed == "<user>1<assistant><user>2<assistant>"
        assert tokenizer.decode(one.sample.prompt) == "<bos><user>go<assistant>"
        for turn in range(3):
            assert int((drawn_of(one) & (torch.tensor(one.turns) == turn)).sum()) <= 6


@pytest.mark.parametrize("name", ["counts_async", "streams"])
def test_any_of_the_clients_ways_gives_the_same_bits(play: Play, name: str) -> None:
    same_bits(play(name), play("counts"))


def test_a_row_of_token_ids_is_what_was_sent_and_drawn(play: Play) -> None:
    for one in play("by_ids", num=2):
        assert (one.problem, one.num_turns) == ("", 3)
        assert list(one.sample.prompt) == [1, 4, 30, 5]
        assert one.sample.tokens[~drawn_of(one)].tolist() == [4, 5, 4, 5]


def test_a_repeated_request_is_a_turn_like_any_other(play: Play) -> None:
    (one,) = play("repeats")
    assert (one.num_turns, one.rewards[0][1]) == (4, 3.0)


def test_ids_outside_the_vocabulary_are_refused(play: Play) -> None:
    (one,) = play("by_ids", arguments={"more": 10**6})
    assert one.ended == "environment"
    assert "a token id is" in one.problem


def test_rewards_of_completions_stand_at_their_turns(play: Play) -> None:
    (one,) = play("rewards_turns")
    assert [reward for _, reward in one.rewards] == [0.0, 0.5, 1.5, 2.5]
    for turn, (place, _) in enumerate(one.rewards[1:]):
        assert (one.turns[place], bool(drawn_of(one)[place])) == (turn, True)
        assert place + 1 == len(one.turns) or not drawn_of(one)[place + 1]


@pytest.mark.parametrize(
    ("settings", "ended", "catches"),
    [({"max_turns": 2}, "max_turns", True), ({"max_turns": 99}, "length", False)],
)
def test_an_agent_that_is_cut_may_yet_end_with_a_reward(
    play: Play, settings: dict[str, Any], ended: str, catches: bool
) -> None:
    (one,) = play("never_stops", arguments={"catches": catches}, **settings)
    assert (one.ended, one.problem, one.sample.finish_reason) == (ended, "", "length")
    assert sum(reward for _, reward in one.rewards) == (0.25 if catches else 0.0)
    assert drawn_of(one)[-1]


def test_a_prompt_that_does_not_fit_is_refused_and_a_shorter_one_is_not(play: Play) -> None:
    (one,) = play("says_much")
    assert [answer.get("end", False) for answer in one.answers] == [False, True]
    assert (one.ended, one.problem, one.num_turns) == ("terminated", "", 1)
    assert one.rewards[0][1] == 1.0


def test_a_request_that_rewrites_the_history_opens_a_segment(
    play: Play, tokenizer: Any, model: Any
) -> None:
    for one in play("rewrites", num=2):
        assert (one.ended, one.problem, one.num_turns) == ("terminated", "", 3)
        (begin,) = one.sample.segments
        segment, is_sampled = one.sample.tokens[begin:], drawn_of(one)[begin:]
        assert drawn_of(one)[begin - 1]
        observed = tokenizer.decode(segment[~is_sampled])
        assert observed == "<bos><user>other<assistant><user>more<assistant>"
        with torch.no_grad():
            logits = model(segment[None]).logits[0, :-1].log_softmax(-1)
        expected = logits.gather(1, segment[1:, None])[:, 0]
        found = one.sample.log_probs[begin + 1 :]
        torch.testing.assert_close(
            found[is_sampled[1:]], expected[is_sampled[1:]], atol=1e-5, rtol=0
        )


def test_a_history_by_the_template_is_read_as_it_is_written_now(play: Play, tokenizer: Any) -> None:
    for one in play("counts", num=2, history_tokens="retokenized"):
        assert (one.ended, one.problem, one.num_turns) == ("terminated", "", 3)
        tokens, is_sampled, messages = one.sample.tokens, drawn_of(one), list(ASK)
        for turn in range(3):
            its = is_sampled & (torch.tensor(one.turns) == turn)
            first = int(its.nonzero()[0])
            begins = [begin for begin in one.sample.segments if begin < first]
            before = [*one.sample.prompt, *tokens[:first].tolist()]
            read = tokens[begins[-1] : first].tolist() if begins else before
            assert read == whole(tokenizer, messages)
            said = tokenizer.decode(tokens[its], skip_special_tokens=True)
            messages.append({"role": "assistant", "content": said})
            messages.append({"role": "user", "content": str(turn + 1)})


def test_special_tokens_in_messages_are_text(play: Play, tokenizer: Any) -> None:
    (one,) = play("says_marks")
    assert (one.problem, one.num_turns) == ("", 2)
    observed = [*one.sample.prompt, *one.sample.tokens[~drawn_of(one)].tolist()]
    assert tokenizer.eos_token_id not in observed


@pytest.mark.parametrize(
    ("name", "value", "is_taken"), [("temperature", 1.0, True), ("seed", 3, False)]
)
def test_settings_of_a_request_are_the_runs_overridden_or_an_error(
    play: Play, name: str, value: Any, is_taken: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    arguments = {"name": name, "value": value}
    same_bits(play("sets", arguments=arguments), play("sets", arguments=arguments))
    notices = [one for one in caplog.messages if f"requests set {name}, which the run" in one]
    assert len(notices) == (not is_taken)
    (one,) = play("sets", arguments=arguments, request_settings="reject")
    assert bool(one.problem) is not is_taken
    assert is_taken or f"{name}={value!r} is not " in one.problem


def test_choices_are_turns_and_have_log_probs(play: Play) -> None:
    for one in play("asks_for_two", num=3):
        assert (one.ended, one.problem, one.num_turns) == ("terminated", "", 2)
        assert len(one.sample.segments) == 1
        assert one.rewards[1] == (len(one.turns) - 1, 0.5)
    (one,) = play("asks_for_two", request_settings="override")
    assert "one choice, no log-probs" in one.problem


def test_a_turn_ends_with_the_stop_strings_of_its_request(
    play: Play, tokenizer: Any, model: Any
) -> None:
    letters = "abcdefghijklmnop"
    for one in play("stops", num=4, arguments={"letters": letters}, decode=tokenizer.decode):
        assert (one.problem, one.num_turns) == ("", 2)
        first = one.sample.tokens[drawn_of(one) & (torch.tensor(one.turns) == 0)].tolist()
        *before, last = [tokenizer.decode([token]) for token in first]
        assert not any({*text} & {*letters} for text in before)
        assert {*last} & {*letters} or len(first) == 6 or first[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("raises", {}, "RuntimeError: out of order"),
        ("exits", {}, "it called sys.exit(3)"),
        ("returns", {}, "the agent returned NoneType None, which is not a reward: return a number"),
        ("returns", {"what": "nan"}, "the agent returned float nan, which is not a reward"),
        ("returns", {"what": {"chatcmpl-1": 1.0}}, "neither the id of a completion"),
        ("is_silent", {}, "without a request to the policy"),
    ],
)
def test_what_goes_wrong_in_an_agent_is_a_failure_by_name(
    play: Play, name: str, arguments: dict[str, Any], words: str
) -> None:
    (one,) = play(name, arguments=arguments)
    assert one.ended == "environment"
    assert words in one.problem


def test_an_agent_that_hangs_ends_at_its_deadline(
    play: Play, host: EnvironmentHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_step_timeout_s", 2.0)
    (one,) = play("hangs")
    assert (one.ended, one.problem) == (
        "deadline",
        "no answer within environment.step_timeout_s=2 s",
    )


def test_the_process_of_an_agent_that_is_still_asking_is_no_other_trajectorys(
    host: EnvironmentHost,
) -> None:
    """A late or aborted agent would continue there, next to the next one."""

    def asked_by(*numbers: int) -> dict[int, str]:
        for number in numbers:
            host.open(number, (0, number), {"agent": "tells_its_process", "arguments": {}})
        asked: dict[int, str] = {}
        while len(asked) < len(numbers):
            for number, answer in host.answers(1.0):
                asked[number] = answer["messages"][0]["content"]
        return asked

    def end(number: int) -> None:
        host.say(number, "a")
        while not (answers := list(host.answers(1.0))):
            pass
        assert answers[0][1]["end"]
        host.end(number)

    answers = asked_by(0, 1)
    host.end(0)
    end(1)
    again = asked_by(2, 3)
    assert again[2] == answers[1]
    assert again[3] not in answers.values()
    end(2)
    end(3)


def test_chance_is_the_prompts_in_rng_and_the_samples_elsewhere(play: Play) -> None:
    first, second = play("draws", num=2), play("draws", num=2)
    same_bits(first, second)
    assert len({tuple(one.sample.prompt) for one in first}) == 1
    assert len({one.rewards[0][1] for one in first}) == 2


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
def test_what_is_no_agent_is_refused_before_a_trajectory(
    name: str, kwargs: dict[str, Any], tools: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        EnvironmentSpec(f"{HERE}:{name}", kwargs, tools).load()


@pytest.fixture
def session() -> Iterator[AgentSession]:
    """The session of this process."""
    endpoint().session = session = AgentSession()
    yield session
    endpoint().session = None


Answered = Callable[..., Any]


@pytest.fixture
def answered(session: AgentSession) -> Iterator[Answered]:
    """Run a function as an agent whose request is answered by a text.

    Gives the request, as the rollout sees it, and what came of it.
    """
    with ThreadPoolExecutor(1) as agent:

        def act(text: str, action: Callable[[], Any], **facts: Any) -> tuple[Any, Any]:
            done = agent.submit(action)
            event = session.next()
            session.answer({"text": text, **facts})
            return event, done.result(10)

        yield act


def url(session: AgentSession, path: str = "v1") -> str:
    return f"http://127.0.0.1:{endpoint().server_port}/{session.name}/{path}"


def create_of(session: AgentSession) -> Any:
    return openai.OpenAI(base_url=url(session), api_key="any").chat.completions.create


def test_calls_of_tools_are_parsed_and_their_results_go_on(
    session: AgentSession, answered: Answered
) -> None:
    create = create_of(session)
    messages: list[Any] = [{"role": "user", "content": "what is 1 + 2?"}]
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    call += "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>"
    event, found = answered(
        f"I add.{call} Then I wait.", lambda: create(model="any", messages=messages, tools=[ADD])
    )
    assert event["request"]["tools"] == [ADD]
    (choice,) = found.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I add. Then I wait.")
    arguments = [json.loads(one.function.arguments) for one in choice.message.tool_calls]
    assert arguments == [{"a": 1, "b": 2}, {"a": 1}]

    messages.append(choice.message)
    for one in choice.message.tool_calls:
        messages.append({"role": "tool", "tool_call_id": one.id, "content": "3"})
    event, found = answered("3", lambda: create(model="any", messages=messages, tools=[ADD]))
    assert event["request"]["extends"]
    assert event["calls"] == 2
    heard = [(one["role"], one["name"], one["content"]) for one in event["messages"]]
    assert heard == [("tool", "add", "3")] * 2
    assert (found.choices[0].finish_reason, found.choices[0].message.content) == ("stop", "3")
    messages += [found.choices[0].message, *ASK]
    event, _ = answered("3", lambda: create(model="any", messages=messages))
    assert not event["request"]["extends"]  # without its tools it is another prompt


@pytest.mark.parametrize("text", ["<tool_call>{</tool_call>", '{"name": 3}'])
def test_what_is_no_whole_call_stays_text(
    text: str, session: AgentSession, answered: Answered
) -> None:
    create = create_of(session)
    _, found = answered(text, lambda: create(model="any", messages=ASK, tools=[ADD]))
    assert (found.choices[0].message.content, found.choices[0].message.tool_calls) == (text, None)


def test_a_stream_has_calls_the_reason_and_the_usage(
    session: AgentSession, answered: Answered
) -> None:
    def stream() -> list[Any]:
        options = {"stream_options": {"include_usage": True}, "stream": True}
        return list(create_of(session)(model="any", messages=ASK, tools=[ADD], **options))

    text = '{"name": "add", "arguments": {}}'
    _, found = answered(text, stream, finish_reason="length", num_read=7, num_sampled=5)
    first, last, usage = found
    assert first.choices[0].delta.role == "assistant"
    assert first.choices[0].delta.tool_calls[0].function.name == "add"
    assert last.choices[0].finish_reason == "length"
    assert (usage.usage.prompt_tokens, usage.usage.total_tokens) == (7, 12)


def test_an_agent_that_returns_while_it_asks_ends_after_the_answer(session: AgentSession) -> None:
    with ThreadPoolExecutor(1) as agent:
        done = agent.submit(lambda: create_of(session)(model="any", messages=ASK))
        assert "request" in session.next()
        session.end(1.0)
        session.answer({"text": "late"})
        assert session.next() == {"end": True, "reward": 1.0, "rewards": []}
        assert done.result(10).choices[0].message.content == "late"


def test_requests_at_the_same_time_are_answered_one_after_the_other(session: AgentSession) -> None:
    with ThreadPoolExecutor(3) as agent:
        asks = [[{"role": "user", "content": str(number)}] for number in range(3)]
        create = create_of(session)
        done = [agent.submit(create, model="any", messages=messages) for messages in asks]
        for _ in asks:
            event = session.next()
            session.answer({"text": f"to {event['messages'][0]['content']}"})
        said = [one.result(10).choices[0].message.content for one in done]
    assert said == ["to 0", "to 1", "to 2"]


def test_a_request_that_waits_when_its_agent_ends_is_not_found(session: AgentSession) -> None:
    with ThreadPoolExecutor(2) as agent:
        create = create_of(session)
        done = [agent.submit(create, model="any", messages=ASK) for _ in range(2)]
        assert "request" in session.next()
        session.end(1.0)
        session.answer({"text": "late"})
        assert session.next()["end"]
        problems = [one.exception(10) for one in done]
    assert sorted(map(type, problems), key=str) == [type(None), openai.NotFoundError]


def test_with_the_tool_choice_none_nothing_is_called(
    session: AgentSession, answered: Answered
) -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    settings: Any = {"model": "any", "messages": ASK, "tools": [ADD], "tool_choice": "none"}
    served = {"tool_choice": "none"}
    _, found = answered(text, lambda: create_of(session)(**settings), served=served)
    assert (found.choices[0].message.content, found.choices[0].message.tool_calls) == (text, None)


def test_the_model_is_listed(session: AgentSession) -> None:
    models = openai.OpenAI(base_url=url(session), api_key="any").models.list()
    assert [one.id for one in models] == ["policy"]


def test_a_session_that_is_not_there_or_has_ended_is_not_found(
    session: AgentSession, answered: Answered
) -> None:
    create = create_of(session)
    answered("a", lambda: create(model="any", messages=ASK))
    session.end(1.0)
    with pytest.raises(openai.NotFoundError, match="the agent of this session has ended"):
        create(model="any", messages=ASK)
    endpoint().session = AgentSession()
    with pytest.raises(openai.NotFoundError, match=f"there is no session '{session.name}'"):
        create(model="any", messages=ASK)


CHAT, IDS = "v1/chat/completions", "inference/v1/generate"


def message(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a", **more}]}


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("v1/completions", {}, 404, "there is no POST v1/completions"),
        (CHAT, "{", 400, "the body is not"),
        (CHAT, {}, 400, "messages are missing"),
        (CHAT, message(role="judge"), 400, "is not a message of"),
        (CHAT, message(tool_calls=[5]), 400, "tool_calls=[5] is not a list of calls"),
        (CHAT, {**message(), "temperature": "hot"}, 400, "temperature='hot' must be number"),
        (CHAT, "[" * 100_000, 400, "the body is not"),
        (CHAT, message(content=[{"type": "image_url"}]), 400, "content is not a text"),
        (CHAT, message(tool_calls=[{"function": {"name": "a"}}]), 400, "is not a call of a tool"),
        (CHAT, {**message(), "n": 0}, 400, "n=0 is less than 1"),
        (CHAT, {**message(), "tools": [{"name": "add"}]}, 400, "tools are functions"),
        (IDS, {"token_ids": ["a"]}, 400, "token_ids=['a'] must be array of integer"),
        (IDS, {"token_ids": [1], "sampling_params": 1}, 400, "sampling_params=1 must be object"),
    ],
)
def test_what_is_not_there_is_refused_in_openais_words(
    path: str, body: Any, status: int, words: str, session: AgentSession
) -> None:
    content = body if isinstance(body, str) else json.dumps(body)
    found = httpx.post(url(session, path), content=content, timeout=10)
    error = found.json()["error"]
    assert (found.status_code, error["type"]) == (status, "invalid_request_error")
    assert words in error["message"]


def test_whatever_a_request_raises_is_its_own_error(play: Play, session: AgentSession) -> None:
    """In the rollout's worker and in the agent's process; the next request is answered."""
    (one,) = play("asks_oddly")
    assert (one.ended, one.problem, one.num_turns) == ("terminated", "", 2)
    tools = [{"type": "function", "function": {"name": "add", "parameters": 5}}]
    call = "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>"
    with ThreadPoolExecutor(1) as agent:
        done = agent.submit(httpx.post, url(session, CHAT), json={**message(), "tools": tools})
        session.next()
        session.answer({"text": call})
        found = done.result(10)
        assert (found.status_code, found.json()["error"]["type"]) == (400, "invalid_request_error")
        done = agent.submit(httpx.post, url(session, CHAT), json=message())
        session.next()
        session.answer({"text": "hi"})
        assert done.result(10).status_code == 200


def test_a_body_that_is_too_long_is_not_read(
    session: AgentSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.agents.gateway.LONGEST_BODY", 8)
    found = httpx.post(url(session, CHAT), content="x" * 9, timeout=10)
    assert found.status_code == 413


def test_a_history_written_otherwise_goes_on_where_its_text_does() -> None:
    """A request is rendered completely if its messages differ from the earlier ones."""
    tokenizer = tokenizer_with(CHATML)
    chat = TurnRenderer(tokenizer, [], [tokenizer.eos_token_id])
    drawn = [*tokenizer("a guess", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    sample = Sample(chat.prompt(ASK), tokens=torch.tensor(drawn), finish_reason="stop")
    observed = {"role": "user", "content": "no"}
    messages = [*ASK, {"role": "assistant", "content": "a guess"}, observed]
    request: dict[str, Any] = {"extends": False, "ids": None, "chat": messages}
    expected = chat.between(drawn[-1], [observed])
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


def test_settings_are_compared_with_how_a_run_draws() -> None:
    drawn = SamplingParams(
        max_tokens=9, stop_token_ids=(2, 3), top_p=0.9, stop_strings=("b", "a"), do_sample=False
    )
    same = {"temperature": 0, "top_p": 0.9, "stop": ["a", "b"], "stop_token_ids": [3], "top_k": -1}
    for overrides in ("serve", "override", "reject"):
        assert overridden(same, drawn, overrides) == []
    for name, value in {"temperature": 1, "top_k": 5, "stop": "a", "stop_token_ids": [4]}.items():
        with pytest.raises(RejectedRequest, match=f"{name}=.* differs from this run's"):
            overridden({name: value}, drawn, "reject")
        assert overridden({name: value}, drawn, "override") == [name]
        assert overridden({name: value}, drawn, "serve") == [name] * (name != "stop")
    with pytest.raises(RejectedRequest, match="seed=1 is not supported in an agent's"):
        overridden({"seed": 1}, drawn, "reject")
    served = {"n": 2, "logprobs": True, "tool_choice": "none", "stop": "x"}
    others = {"seed": 1, "tool_choice": "required", "response_format": {"type": "json_object"}}
    assert overridden(served, drawn, "serve") == []
    assert overridden(served, drawn, "serve", can_stop=False) == ["stop"]
    assert overridden(others, drawn, "serve") == [*others]
    neutral = {
        "n": 1,
        "logprobs": False,
        "tool_choice": "auto",
        "response_format": {"type": "text"},
    }
    assert overridden(neutral, drawn, "reject") == []


def test_a_request_that_the_client_sends_once_more_gets_the_answer_of_the_first_time() -> None:
    session, server = AgentSession(), endpoint()
    server.session = session
    url = f"http://127.0.0.1:{server.server_port}/{session.name}/v1"
    client = openai.OpenAI(base_url=url, api_key="x", timeout=0.3, max_retries=4)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(client.chat.completions.create, model="policy", messages=ASK)
        assert session.next()["request"]["chat"] == [{"role": "user", "content": "go"}]
        time.sleep(0.6)  # by then it has been sent once more
        session.answer({"text": "hi", "finish_reason": "stop", "num_read": 1, "num_sampled": 1})
        found = asked.result()
    assert (found.choices[0].message.content, found.id) == ("hi", f"{session.name}-0")
    session.end(1.0)
    assert session.next()["end"], "no second request has come"
