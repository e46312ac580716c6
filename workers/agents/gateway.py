"""An agent: a program that asks the policy by OpenAI's API, in the process that runs it.

    import openai                                   # my_agent.py

    def run(row):                                   # environment=my_agent.py:run
        policy = openai.OpenAI()                    # OPENAI_BASE_URL and OPENAI_API_KEY are set
        asked = [{"role": "user", "content": "Guess my number, 1 to 10."}]
        said = policy.chat.completions.create(model="policy", messages=asked)
        return float(said.choices[0].message.content == row["ground_truth"])

    agent --POST--> Endpoint --Session.ask--> AgentEpisode --answers--> turns of the rollout
      ^                                                                        |
      +----------------------- what was drawn <---------step------------------+

The endpoint is in the agent's own process, on a port of the loopback interface, which a sandbox
without network has, too. A request is a turn: its messages beyond those that were read and said
before are what is observed. The session is in the URL: below it are `v1/chat/completions`,
`v1/models`, and `inference/v1/generate`, which takes and gives token ids.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from verl_like.errors import ConfigError
from workers.agents.calls import Call, Parser, call_like, parse
from workers.agents.seeds import seed_globals
from workers.agents.tools import Tool, fits, waited, words_of

MODEL = "policy"
"""The name under which `v1/models` lists the policy; a request may ask for it by any name."""
GIVEN = ("row", "rng", "base_url", "api_key", "model")
"""Arguments that an agent may have; the first is the mark of one."""
ROLES = {"developer": "system", **{role: role for role in ("system", "user", "assistant", "tool")}}
LONGEST_BODY = 2**22
"""Bytes of a request."""

NUMBER, INTEGER, TEXT = ({"type": kind} for kind in ("number", "integer", "string"))
OBJECTS = {"type": "array", "items": {"type": "object"}}
KINDS = {
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
"""The types that a body must have, by name, as JSON schemas."""
NO_MATTER = {
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "cache_salt", "priority"),
}
"""Settings that change nothing of what is drawn."""
COUNTS = ("max_tokens", "max_completion_tokens", "n")
OF_CHAT = {"messages", "tools", "max_tokens", "max_completion_tokens", "stream", "stream_options"}
OF_IDS = {
    "token_ids",
    "max_tokens",
    "skip_special_tokens",
    "logprobs",
    "routed_experts_prompt_start",
}
"""Token ids are never skipped, always have their log-probs, and experts are not asked for."""


class Refused(Exception):
    """A request that is answered by an error, in the words of OpenAI's."""

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.facts = {"message": message, "param": param, "code": code, "status": status}


def check_agent(agent: Any, kwargs: Mapping[str, Any], path: str) -> None:
    """Refuse a function that cannot be called as an agent with these arguments."""
    parameters = inspect.signature(agent).parameters.values()
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    known = {one.name for one in parameters if one.kind is not one.VAR_KEYWORD}
    needed = {one.name for one in parameters if one.default is one.empty} & known
    if missing := sorted(needed - {*GIVEN, *kwargs}):
        raise ConfigError(
            f"environment={path}: an agent gets {', '.join(GIVEN)} by these names, and "
            f"environment.kwargs, but no {missing[0]!r}."
        )
    if more := sorted({*kwargs} - known) if not takes_all else sorted({*kwargs} & {*GIVEN}):
        raise ConfigError(f"environment={path}: it takes no {more[0]!r} of environment.kwargs.")


class AgentEpisode:
    """One trajectory of an agent: what it asks is what the policy observes."""

    def __init__(
        self,
        agent: Callable[..., Any],
        kwargs: Mapping[str, Any],
        seeds: tuple[int, int],
        parser: Parser = parse,
    ) -> None:
        """`seeds`: one for the samples of a prompt, one of this sample alone."""
        self._agent, self._kwargs, self._parser = agent, kwargs, parser
        self._rng = np.random.default_rng(seeds[0])
        seed_globals(seeds[1])

    def reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Start the agent; its first request, or its end."""
        self._session = session = Session(self._parser)
        server = endpoint()
        server.session = session
        url = f"http://127.0.0.1:{server.server_port}/{session.name}/v1"
        os.environ |= {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": session.name}
        given = {
            **dict(zip(GIVEN, (dict(row), self._rng, url, session.name, MODEL), strict=True)),
            **self._kwargs,
        }
        names = inspect.signature(self._agent).parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in names.values())
        arguments = {name: given[name] for name in given if takes_all or name in names}
        threading.Thread(target=self._run, args=(arguments,), daemon=True).start()
        return session.next()

    def _run(self, arguments: Mapping[str, Any]) -> None:
        try:
            self._session.end(waited(self._agent(**arguments)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's agent may raise anything
            self._session.fail(error)

    def step(self, text: str, **facts: Any) -> dict[str, Any]:
        """Answer the request that waits; the next one, or the end."""
        self._session.answer({"text": text, **facts})
        return self._session.next()


@dataclass
class Request:
    """What an agent asks for, read from a body."""

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
    """OpenAI's client sends it once more, which has waited too long for an answer."""


Answers = list[tuple[str, dict[str, Any]]]
"""The name of each completion that answers a request, and what was sampled."""


class Session:
    """The requests of one trajectory, one after the other, and their answers."""

    def __init__(self, parser: Parser = parse) -> None:
        self.name = secrets.token_hex(8)
        self._parser = parser
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._is_over = self._is_cut = False
        self._events: queue.SimpleQueue[dict[str, Any] | BaseException] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._history: list[dict[str, Any]] = []
        self._tools: list[dict[str, Any]] = []
        self._num_turns = 0
        self._calls: dict[str, Any] = {}
        """What the next event says of the calls in the last answer."""
        self._asked: deque[tuple[Request, Future[Answers]]] = deque(maxlen=64)
        """The last requests, of which a client may send one once more."""

    def next(self) -> dict[str, Any]:
        """What the agent does next: it asks, or ends; what it has raised is raised."""
        event = self._events.get()
        if isinstance(event, SystemExit):
            raise RuntimeError(f"it called sys.exit({event.code!r})") from event
        if isinstance(event, BaseException):
            raise event
        return event

    def answer(self, answer: dict[str, Any]) -> None:
        """Let the request that waits have this."""
        self._answers.put(answer)

    def ask(self, asked: Request) -> Answers:
        """Wait for the answers to a request: the names of the completions, and what was sampled.

        A request that a client sends once more gets the answers of the first time.
        """
        with self._lock:
            known = [future for request, future in self._asked if request == asked]
            is_known = asked.is_retry and bool(known)
            future = known[-1] if is_known else Future[Answers]()
            if not is_known:
                self._asked.append((asked, future))
        if not is_known:
            try:
                future.set_result(self._answers_to(asked))
            except Exception as problem:  # noqa: BLE001 - it is this request's error
                future.set_exception(problem)
        return future.result()

    def _answers_to(self, asked: Request) -> Answers:
        """Ask the policy for each choice in a turn, once the requests before are answered."""
        with self._turn:
            answers = [self._answer_to(asked)]
            while len(answers) < answers[0][1].get("served", {}).get("n", 1):
                answers.append(self._answer_to(asked))
        return answers

    def _answer_to(self, asked: Request) -> tuple[str, dict[str, Any]]:
        if self._is_over:
            raise Refused("the agent of this session has ended", status=404)
        self._events.put(self._event(asked))
        answer = self._answers.get()
        if "refused" in answer:
            self._is_cut = answer["is_cut"]
            raise Refused(**answer["refused"])
        turn, self._num_turns = self._num_turns, self._num_turns + 1
        self._tools = asked.tools
        self._history = []
        if asked.is_chat:
            message = answer["message"] = self._message(answer, asked, turn)
            self._history = [*asked.messages, _read_message(message, [])]
        return f"{self.name}-{turn}", answer

    def _event(self, asked: Request) -> dict[str, Any]:
        read = len(self._history)
        extends = asked.is_chat and 0 < read < len(asked.messages) and self._tools == asked.tools
        extends = extends and _spoken(asked.messages[:read]) == _spoken(self._history)
        request = {
            "extends": extends,
            "chat": asked.messages,
            "ids": asked.ids,
            "tools": asked.tools,
            "max_tokens": asked.max_tokens,
            "sampling": asked.sampling,
        }
        messages = asked.messages[read:] if extends else asked.messages
        return {"messages": messages, "reward": 0.0, "request": request, **self._told_calls()}

    def end(self, found: Any) -> None:
        """The agent has returned this."""
        rewards = found if isinstance(found, Mapping) else {}
        turns = {}
        for name, reward in rewards.items():
            session, _, turn = str(name).rpartition("-")
            if session != self.name or not turn.isdecimal() or int(turn) >= self._num_turns:
                raise ValueError(f"the agent gave a reward for {name!r:.80}, no completion's id")
            turns[int(turn)] = _number(reward)
        total = 0.0 if isinstance(found, Mapping) else _number(found)
        if not self._num_turns and not self._turn.locked():
            raise RuntimeError("the agent ended, and had asked the policy for nothing")
        self._is_over = True
        end = {"end": True, "reward": total, "rewards": sorted(turns.items())}
        self._events.put(end | self._told_calls())

    def _told_calls(self) -> dict[str, Any]:
        calls, self._calls = self._calls, {}
        return {name: value for name, value in calls.items() if value}

    def _message(self, answer: Mapping[str, Any], asked: Request, turn: int) -> dict[str, Any]:
        """The sampled text as a message; text with a call that has a problem stays text."""
        text: str = answer["text"]
        served = answer.get("served", {})
        for stop in stop_strings(served):
            text = text.partition(stop)[0]
        tools = [] if served.get("tool_choice") == "none" else asked.tools
        calls, rest = self._parser(text) if tools else ([], text)
        if tools and not calls:
            self._calls = {"call_like": call_like(text)}
        if not calls or any(call.problem for call in calls):
            return {"role": "assistant", "content": text}
        schemas = {
            tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools
        }
        written = [
            {
                "id": f"call_{turn}_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call, schemas)},
            }
            for number, call in enumerate(calls)
        ]
        self._calls = {"calls": len(calls)}
        return {"role": "assistant", "content": rest or None, "tool_calls": written}

    def fail(self, error: BaseException) -> None:
        """The agent has raised this; one that gets no more turns may do so, without a reward."""
        self._is_over = True
        self._events.put({"end": True, "reward": 0.0} if self._is_cut else error)


def _number(reward: Any) -> float:
    if isinstance(reward, bool | int | float | np.number) and math.isfinite(reward):
        return float(reward)
    raise TypeError(
        f"the agent returned {type(reward).__name__} {reward!r:.80}, no reward: return a number "
        "(0.0 where a reward function scores it), or numbers by the ids of completions"
    )


def _spoken(messages: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """What of messages a policy reads; clients add and leave out other things."""
    return [
        (
            one["role"],
            one["content"],
            [
                (call["function"]["name"], call["function"]["arguments"])
                for call in one.get("tool_calls", [])
            ],
        )
        for one in messages
    ]


def stop_strings(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The texts that a request ends a turn with."""
    stop = settings.get("stop", ())
    return tuple(filter(None, [stop] if isinstance(stop, str) else stop))


def _arguments(call: Call, schemas: Mapping[str, Mapping[str, Any]]) -> str:
    """As JSON; texts by the schema of the tool, where there is such a tool."""
    schema = schemas.get(call.name, {})
    typed = Tool(call.name, "", schema, print).typed if call.has_texts else dict
    return json.dumps(typed(call.arguments))


def read_request(path: str, body: Any) -> Request:
    """A body as a request; what it asks for and does not get is refused by name."""
    if not isinstance(body, dict):
        raise Refused("the body is no JSON object")
    is_chat = path.endswith("/chat/completions")
    given = {name: value for name, value in body.items() if value is not None}
    _check_kinds(given)
    if not is_chat:
        settings = given.pop("sampling_params", {})
        given |= {name: value for name, value in settings.items() if value is not None}
        _check_kinds(given)
    needed = "messages" if is_chat else "token_ids"
    if not given.get(needed):
        raise Refused(f"{needed} are missing, or there is none of them", needed)
    counts = {name: given[name] for name in COUNTS if name in given}
    for name, count in counts.items():
        if count < 1:
            raise Refused(f"{name}={count} is less than 1", name)
    longest = [count for name, count in counts.items() if name != "n"]
    own = NO_MATTER | (OF_CHAT if is_chat else OF_IDS)
    asked = Request(
        is_chat,
        max_tokens=min(longest, default=None),
        sampling={name: value for name, value in given.items() if name not in own},
        model=str(given.get("model", MODEL)),
    )
    if not is_chat:
        asked.ids = given["token_ids"]
        return asked
    for one in given["messages"]:
        asked.messages.append(_read_message(one, asked.messages))
    asked.tools = given.get("tools", [])
    if not all(map(_is_tool, asked.tools)):
        raise Refused("tools are functions: {type: function, function: {name: ...}}", "tools")
    asked.streams = bool(given.get("stream"))
    options = given.get("stream_options")
    asked.with_usage = isinstance(options, dict) and bool(options.get("include_usage"))
    return asked


def _check_kinds(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if not fits(value, KINDS.get(name, {})):
            raise Refused(f"{name}={value!r:.80} is no {words_of(KINDS[name])}", name)


def _is_tool(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function")
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _read_message(one: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A message as chat templates take it: a text, calls with arguments as an object."""
    role, calls = one.get("role"), one.get("tool_calls") or []
    if not isinstance(role, str) or role not in ROLES:
        raise Refused(f"{one!r:.80} is no message of {', '.join(ROLES)}", "messages")
    if not fits(calls, OBJECTS):
        raise Refused(f"tool_calls={calls!r:.80} is no list of calls", "messages")
    message: dict[str, Any] = {"role": ROLES[role], "content": _text_of(one.get("content"))}
    if calls:
        message["tool_calls"] = [_read_call(call) for call in calls]
    if message["role"] == "tool":
        number = one.get("tool_call_id")
        named = [call for past in before for call in past.get("tool_calls", [])]
        found = [call["function"]["name"] for call in named if call["id"] == number]
        name = one.get("name") or (found[-1] if found else None)
        message |= {"tool_call_id": str(number)} | ({"name": str(name)} if name else {})
    return message


def _text_of(content: Any) -> str:
    parts = [{"type": "text", "text": content or ""}] if not isinstance(content, list) else content
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise Refused(f"content is no text: {content!r:.80}", "messages")
    return "".join(texts)


def _read_call(call: Mapping[str, Any]) -> dict[str, Any]:
    try:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        if not isinstance(arguments, dict):
            raise TypeError("no object")
        named = {"name": str(function["name"]), "arguments": arguments}
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise Refused(
            f"{call!r:.80} is no call of a tool with JSON arguments", "messages"
        ) from error
    return {"id": str(call.get("id")), "type": "function", "function": named}


def completion(asked: Request, answers: Answers) -> dict[str, Any]:
    """The body of an answer; its name is that of the last choice."""
    num_read = sum(answer.get("num_read", 0) for _, answer in answers)
    num_drawn = sum(answer.get("num_drawn", 0) for _, answer in answers)
    usage = {
        "prompt_tokens": num_read,
        "completion_tokens": num_drawn,
        "total_tokens": num_read + num_drawn,
    }
    choices = [_choice(asked, answer) | {"index": n} for n, (_, answer) in enumerate(answers)]
    body = {"choices": choices, "usage": usage}
    name = answers[-1][0]
    if not asked.is_chat:
        return {"request_id": name, **body}
    about = {"id": name, "object": "chat.completion", "created": int(time.time())}
    return {**about, "model": asked.model, **body}


def _choice(asked: Request, answer: Mapping[str, Any]) -> dict[str, Any]:
    finish, log_probs = answer.get("finish_reason", "stop"), None
    if "log_probs" in answer:
        words = answer["texts"] if asked.is_chat else map("token_id:{}".format, answer["ids"])
        log_probs = {
            "content": [
                {"token": word, "logprob": value, "bytes": [*word.encode()], "top_logprobs": []}
                for word, value in zip(words, answer["log_probs"], strict=True)
            ]
        }
    if not asked.is_chat:
        return {"token_ids": answer["ids"], "logprobs": log_probs, "finish_reason": finish}
    message = answer["message"]
    if "tool_calls" in message and finish == "stop":
        finish = "tool_calls"
    return {"message": message, "finish_reason": finish, "logprobs": log_probs}


def chunks(asked: Request, whole: Mapping[str, Any]) -> list[dict[str, Any]]:
    """An answer as the chunks of a stream: it is drawn by then."""
    about = {**whole, "object": "chat.completion.chunk"}
    del about["usage"]
    found = []
    for choice in whole["choices"]:
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [
                {"index": number, **call} for number, call in enumerate(delta["tool_calls"])
            ]
        end = {**choice, "delta": {}}
        begin = {**end, "delta": delta, "finish_reason": None}
        for part in (begin, {**end, "logprobs": None}):
            del part["message"]
            found.append({**about, "choices": [part]})
    if asked.with_usage:
        found.append({**about, "choices": [], "usage": whole["usage"]})
    return found


class Endpoint(ThreadingHTTPServer):
    """The HTTP server of a process; it has one session at a time."""

    daemon_threads = True
    session: Session | None = None


@cache
def endpoint() -> Endpoint:
    """The server of this process, on a port of its own."""
    server = Endpoint(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or an answer waits 40 ms for the acknowledgement of its head

    def do_GET(self) -> None:  # noqa: N802 - its name is the standard library's
        self._serve(self._models)

    def do_POST(self) -> None:  # noqa: N802
        self._serve(self._complete)

    def log_message(self, *_: Any) -> None:
        """Nothing: an agent's output is its own."""

    def _serve(self, answer: Callable[[Session, str], None]) -> None:
        try:
            name, _, path = self.path.lstrip("/").partition("/")
            session = self.server.session
            if session is None or session.name != name:
                raise Refused(f"there is no session {name!r:.80} here", status=404)
            answer(session, path.partition("?")[0])
        except OSError:  # the client is gone
            self.close_connection = True
        except Exception as problem:  # noqa: BLE001 - it is this request's error
            if not isinstance(problem, Refused):
                problem = Refused(f"it cannot be answered: {problem!r:.200}")
            self.close_connection = True  # the body may not have been read
            error = {"type": "invalid_request_error", **problem.facts}
            self._send(error.pop("status"), {"error": error})

    def _models(self, session: Session, path: str) -> None:
        if path != "v1/models":
            raise Refused(f"there is no GET {path}", status=404)
        card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "verl_like"}
        self._send(200, {"object": "list", "data": [card]})

    def _complete(self, session: Session, path: str) -> None:
        if path not in ("v1/chat/completions", "inference/v1/generate"):
            raise Refused(f"there is no POST {path}", status=404)
        asked = read_request(path, self._body())
        asked.is_retry = self.headers.get("x-stainless-retry-count", "0") != "0"
        whole = completion(asked, session.ask(asked))
        if not asked.streams:
            self._send(200, whole)
            return
        lines = [json.dumps(one) for one in chunks(asked, whole)]
        text = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])
        self._send_text(200, text, "text/event-stream")

    def _body(self) -> Any:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > LONGEST_BODY:
            raise Refused(f"a body has a length, of {LONGEST_BODY} bytes at most", status=413)
        try:
            return json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise Refused(f"the body is no JSON: {error}") from error

    def _send(self, status: int, body: Mapping[str, Any]) -> None:
        self._send_text(status, json.dumps(body), "application/json")

    def _send_text(self, status: int, text: str, kind: str) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if status != 200:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)
