"""Agents: programs that call the policy through OpenAI's or Anthropic's API.

    import openai                                   # my_agent.py

    def run(row):                                   # environment=my_agent.py:run
        policy = openai.OpenAI()                    # OPENAI_BASE_URL and OPENAI_API_KEY are set
        messages = [{"role": "user", "content": "Guess my number, 1 to 10."}]
        reply = policy.chat.completions.create(model="policy", messages=messages)
        return float(reply.choices[0].message.content == row["ground_truth"])

    agent --POST--> AgentEndpoint --Conversation.ask--> AgentEpisode --answers--> turns
      ^                                                                              |
      +------------------------ sampled response <------step------------------------+

The endpoint is in the agent's process, on a port of the loopback interface, which also exists in a
sandbox without network. Each completion of a request is one turn, and the request's new messages
are the observation. The first part of the URL's path is the session's key. After it come
`v1/chat/completions`, `v1/models`, the paths of `workers.agents.dialects`,
`v1/messages/count_tokens` (an estimate), and `inference/v1/generate`, which accepts and returns
token ids. With `environment.endpoint`, agents on other machines reach a second server through
`workers.agents.router`, for which the key is in a header instead of the path.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import queue
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

import numpy as np

from verl_like.errors import ConfigError
from workers.agents.calls import Parser, ToolCall, call_like, parse
from workers.agents.dialects import DIALECTS, Dialect
from workers.agents.environment import Tool, waited
from workers.agents.requests import (
    MODEL,
    Answers,
    RejectedRequest,
    Request,
    chunks,
    completion,
    read_message,
    read_request,
    stop_strings,
)
from workers.chats import has_images, is_image
from workers.thoughts import REASONING, split_thoughts

COUNT_TOKENS, BYTES_PER_TOKEN = "v1/messages/count_tokens", 4
OTHER_PATHS = ("v1/chat/completions", "inference/v1/generate", COUNT_TOKENS)
ARGUMENTS = ("row", "rng", "base_url", "api_key", "model")
"""Arguments that the run passes to an agent. A function with the parameter `row` is an agent."""
LONGEST_BODY = 2**24
"""Maximum bytes of a request."""
LONGEST_LINE = 4096
"""Maximum bytes of a line between the chunks of a request."""


def check_agent(agent: Any, kwargs: Mapping[str, Any], path: str) -> None:
    """Reject a function that cannot be called as an agent with these arguments."""
    parameters = inspect.signature(agent).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    known = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    needed = {p.name for p in parameters if p.default is p.empty} & known
    missing = sorted(needed - {*ARGUMENTS, *kwargs})
    if missing:
        raise ConfigError(
            f"environment={path}: the agent's parameter {missing[0]!r} cannot be filled: agents "
            f"receive {', '.join(ARGUMENTS)} and the names in environment.kwargs. Give the "
            f"parameter a default, or set environment.kwargs.{missing[0]}."
        )
    unknown = sorted({*kwargs} & {*ARGUMENTS} if takes_all else {*kwargs} - known)
    if unknown:
        reason = "which the run sets itself" if takes_all else "but the agent has no such parameter"
        raise ConfigError(f"environment={path}: environment.kwargs sets {unknown[0]!r}, {reason}.")


@dataclass
class AgentEpisode:
    """One trajectory of an agent, whose requests are the policy's observations."""

    agent: Callable[..., Any]
    kwargs: Mapping[str, Any]
    rng: np.random.Generator
    """A generator with the prompt's seed."""
    session: AgentSession
    url: str
    """The address at which agents on other machines reach the policy, or ""."""
    listener: int = -1
    """With `url`: the descriptor of the socket at which their requests arrive."""

    def reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Start the agent; return its first request, or raise if it ends without one."""
        session, server = self.session, endpoint()
        server.session = session
        root = f"http://127.0.0.1:{server.server_port}/{session.name}"
        if self.url:
            root = self.url
            publish_endpoint(session, self.listener)
        url = f"{root}/v1"
        os.environ |= {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": session.name}
        os.environ |= {"ANTHROPIC_BASE_URL": root, "ANTHROPIC_API_KEY": session.name}
        row = {name: _for_clients(row[name]) if name == "prompt" else row[name] for name in row}
        values = {
            **dict(zip(ARGUMENTS, (row, self.rng, url, session.name, MODEL), strict=True)),
            **self.kwargs,
        }
        names = inspect.signature(self.agent).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in names.values())
        arguments = {name: values[name] for name in values if takes_all or name in names}
        threading.Thread(target=self._run, args=(arguments,), daemon=True).start()
        return session.next()

    def _run(self, arguments: Mapping[str, Any]) -> None:
        try:
            self.session.end(waited(self.agent(**arguments)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's agent may raise anything
            self.session.fail(error)

    def step(self, text: str, player: str = "", **details: Any) -> dict[str, Any]:
        """Answer the waiting request; return the next one, or the end."""
        self.session.answer({"text": text, **details}, player)
        return self.session.next()


class AgentSession:
    """The requests of an agent and their responses; each player has its own conversation."""

    def __init__(
        self, parser: Parser = parse, players: Sequence[str] = (), reuses: bool = False
    ) -> None:
        """Create the session; with `reuses`, an equal request gets the first one's response."""
        self.name = secrets.token_hex(16)
        """The session's key, which is secret."""
        self.parser, self.reuses = parser, reuses
        self.is_over = False
        self._events: queue.SimpleQueue[dict[str, Any] | BaseException] = queue.SimpleQueue()
        self._conversations = {
            player: Conversation(self, player, self._events) for player in players or [""]
        }
        self.models = [player or MODEL for player in self._conversations]
        """The model names that `v1/models` lists: the policy's, or those of the players."""

    def next(self) -> dict[str, Any]:
        """Return the agent's next request, or its end; raise the agent's error."""
        event = self._events.get()
        if isinstance(event, SystemExit):
            raise RuntimeError(f"it called sys.exit({event.code!r})") from event
        if isinstance(event, BaseException):
            raise event
        return event

    def answer(self, answer: dict[str, Any], player: str = "") -> None:
        """Complete the waiting request with a sampled turn."""
        self._conversations[player].answers.put(answer)

    def conversation_with(self, model: str) -> Conversation:
        """Return the conversation of the player whose name a request has as its model."""
        if "" in self._conversations:
            return self._conversations[""]
        if model not in self._conversations:
            players = ", ".join(self._conversations)
            raise RejectedRequest(
                f"model={model!r:.80}: use the name of a player: {players}", "model", status=404
            )
        return self._conversations[model]

    def end(self, result: Any) -> None:
        """End the session with the agent's return value.

        It is a reward, or a dict of rewards by player or by id of a completion.
        """
        if not isinstance(result, Mapping) and "" not in self._conversations:
            raise TypeError(
                f"the agent returned {result!r:.80}; an agent with players returns a dict of "
                f"rewards by player: {', '.join(self._conversations)}"
            )
        rest = dict(result) if isinstance(result, Mapping) else {"": result}
        ends = {name: player.take_rewards(rest) for name, player in self._conversations.items()}
        if rest:
            problem = f"the agent gave a reward for {next(iter(rest))!r:.80}, "
            raise ValueError(problem + "which is neither the id of a completion nor a player")
        if not any(c.has_requests for c in self._conversations.values()):
            raise RuntimeError("the agent ended without a request to the policy")
        self._put_end(ends)

    def fail(self, error: BaseException) -> None:
        """End the session with the agent's error, or with reward 0 if tokens or turns ran out."""
        conversations = self._conversations
        if any(c.is_cut for c in conversations.values()):
            self._put_end({player: {"end": True, "reward": 0.0} for player in conversations})
        else:
            self.is_over = True
            self._events.put(error)

    def _put_end(self, ends: dict[str, dict[str, Any]]) -> None:
        self.is_over = True
        self._events.put(ends[""] if "" in ends else {"players": ends})


class Conversation:
    """The requests of one player, in order, and their responses."""

    def __init__(self, session: AgentSession, player: str, events: queue.SimpleQueue[Any]) -> None:
        self._session, self._player, self._events = session, player, events
        self._name = f"{session.name}-{player}" if player else session.name
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self.is_cut = False
        self.answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._history: list[dict[str, Any]] = []
        self._histories: dict[str, list[dict[str, Any]]] = {}
        """By name of a completion: the messages up to it, including it."""
        self._reasoning: dict[str, str] = {}
        """By a completion's content and calls: its reasoning, which clients need not send back."""
        self._tools: list[dict[str, Any]] = []
        self._num_turns = 0
        self._calls: dict[str, Any] = {}
        """Information about tool calls in the last response, which is sent with the next event."""
        self._recent: deque[tuple[Request, Future[Answers]]] = deque(maxlen=64)
        """The latest requests and their completions, in case a client repeats a request."""

    @property
    def has_requests(self) -> bool:
        """True if the player has made a request."""
        return bool(self._num_turns) or self._turn.locked()

    def before(self, name: str) -> list[dict[str, Any]]:
        """Return the messages up to a completion, including it."""
        if name not in self._histories:
            raise RejectedRequest(
                f"there is no response {name!r:.80}", "previous_response_id", status=404
            )
        return self._histories[name]

    def take_rewards(self, rewards: dict[Any, Any]) -> dict[str, Any]:
        """Remove the rewards of this player and its completions; return the event of its end."""
        total = _number(rewards.pop(self._player, 0.0))
        turns = {}
        for name in list(rewards):
            conversation, _, turn = str(name).rpartition("-")
            if conversation == self._name and turn.isdecimal() and int(turn) < self._num_turns:
                turns[int(turn)] = _number(rewards.pop(name))
        end = {"end": True, "reward": total, "rewards": sorted(turns.items())}
        return end | self._take_calls()

    def ask(self, request: Request) -> Answers:
        """Wait for the completions of a request; return their names and contents.

        Each choice is sampled in a turn of its own, once earlier requests are complete. A request
        that a client retries (or, if the session reuses replies, any equal one) gets the
        completions of the earlier request.
        """
        with self._lock:
            known = [future for earlier, future in self._recent if earlier == request]
            is_known = (request.is_retry or self._session.reuses) and bool(known)
            future = known[-1] if is_known else Future[Answers]()
            if not is_known:
                self._recent.append((request, future))
        if not is_known:
            try:
                with self._turn:
                    answers = [self._answer_to(request)]
                    while len(answers) < answers[0][1].get("served", {}).get("n", 1):
                        answers.append(self._answer_to(request))
                future.set_result(answers)
            except Exception as problem:  # noqa: BLE001 - an error of this request only
                future.set_exception(problem)
        return future.result()

    def _answer_to(self, request: Request) -> tuple[str, dict[str, Any]]:
        """Pass a request to the rollout; return the name and the content of its answer."""
        if self._session.is_over:
            raise RejectedRequest("the agent of this session has ended", status=404)
        event = self._event(request)
        self._events.put({"players": {self._player: event}} if self._player else event)
        answer = self.answers.get()
        if "rejected" in answer:
            self.is_cut = answer["is_cut"]
            raise RejectedRequest(**answer["rejected"])
        self.is_cut = False  # it goes on with a new segment
        turn, self._num_turns = self._num_turns, self._num_turns + 1
        self._tools = request.tools
        self._history = []
        name = f"{self._name}-{turn}"
        if request.is_chat:
            message = answer["message"] = self._message(answer, request, turn)
            read = read_message(message, [])
            self._history = [*request.messages, read]
            if REASONING in read:
                self._reasoning[repr(_spoken([read]))] = read[REASONING]
            self._histories[name] = self._history
        return name, answer

    def _event(self, request: Request) -> dict[str, Any]:
        """Return the event that a request is for the rollout.

        If the request extends the conversation of the last one, only the new messages are observed.
        """
        read, messages = len(self._history), request.messages
        extends = (
            request.is_chat
            and 0 < read < len(messages)
            and self._tools == request.tools
            and _spoken(messages[:read]) == _spoken(self._history)
        )
        known = [
            message["role"] == "assistant" and self._reasoning.get(repr(_spoken([message])))
            for message in messages
        ]
        fields = {
            "extends": extends,
            "chat": [
                {**message, REASONING: reasoning} if reasoning else message
                for message, reasoning in zip(messages, known, strict=True)
            ],
            "ids": request.ids,
            "tools": request.tools,
            "max_tokens": request.max_tokens,
            "sampling": request.sampling,
        }
        observed = messages[read:] if extends else messages
        return {"messages": observed, "reward": 0.0, "request": fields, **self._take_calls()}

    def _take_calls(self) -> dict[str, Any]:
        calls, self._calls = self._calls, {}
        return {name: value for name, value in calls.items() if value}

    def _message(self, answer: Mapping[str, Any], request: Request, turn: int) -> dict[str, Any]:
        """Return the sampled text as a message, with its reasoning apart and its calls parsed.

        If a call is faulty, it stays content.
        """
        text: str = answer["text"]
        served, is_open = answer.get("served", {}), bool(answer.get("is_open"))
        for stop in stop_strings(served):
            text = text.partition(stop)[0]
        tools = [] if served.get("tool_choice") == "none" else request.tools
        calls, rest = self._session.parser(text) if tools else ([], text)
        if tools and not calls:
            self._calls = {"call_like": call_like(text)}
        reasoning, content = split_thoughts(text, is_open)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if not calls or any(call.problem for call in calls):
            return message | ({REASONING: reasoning} if reasoning else {})
        if rest:  # an argument may contain any tag
            reasoning, content = split_thoughts(rest)
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
        message |= {"content": content if rest else None, "tool_calls": written}
        message["content"] = message["content"] or None
        return message | ({REASONING: reasoning} if reasoning else {})


def _for_clients(prompt: Any) -> Any:
    """Return a row's prompt with its images as `data:` URLs, as an agent can send them."""
    if not isinstance(prompt, list):
        return prompt
    return [
        {**message, "content": list(map(_part_for_clients, message["content"]))}
        if has_images(message.get("content"))
        else message
        for message in prompt
    ]


def _part_for_clients(part: Any) -> Any:
    if not is_image(part):
        return part
    from workers.images import image_url

    return {"type": "image_url", "image_url": {"url": image_url(part["path"])}}


def _number(reward: Any) -> float:
    if isinstance(reward, bool | int | float | np.number) and math.isfinite(reward):
        return float(reward)
    raise TypeError(
        f"the agent gave the reward {reward!r:.80}, which is not a finite number. Return a number, "
        "or a dict of numbers by player or by id of a completion; return 0.0 if a reward function "
        "scores the trajectory"
    )


def _spoken(messages: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """Return the parts of messages that the policy reads, because clients may change others."""
    return [
        (
            message["role"],
            message["content"],
            [
                (call["function"]["name"], call["function"]["arguments"])
                for call in message.get("tool_calls", [])
            ],
        )
        for message in messages
    ]


def _arguments(call: ToolCall, schemas: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a call's arguments as JSON; the tool's schema, if known, says how to convert texts."""
    schema = schemas.get(call.name, {})
    typed = Tool(call.name, "", schema, print).typed if call.has_texts else dict
    return json.dumps(typed(call.arguments))


def in_chat(dialect: Dialect, body: Any, session: AgentSession) -> dict[str, Any]:
    """Convert the body of another API's request to a body of chat completions."""
    if not isinstance(body, dict):
        raise RejectedRequest("the body is not a JSON object")
    try:
        chat = dialect.to_chat(body)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise RejectedRequest(f"the body cannot be read: {error!r:.200}") from error
    previous = chat.pop("previous_response_id", None)
    if previous:
        before = session.conversation_with(str(body.get("model"))).before(str(previous))
        system = [message for message in chat["messages"] if message["role"] == "system"]
        rest = [message for message in chat["messages"] if message["role"] != "system"]
        if system:
            before = [message for message in before if message["role"] != "system"]
        chat["messages"] = [*system, *before, *rest]
    return chat


def key_in(headers: Iterable[tuple[str, str]]) -> str:
    """Return the key from the header in which OpenAI's or Anthropic's client sends it, or ""."""
    for name, value in headers:
        if name.lower() == "x-api-key":
            return value.strip()
        if name.lower() == "authorization":
            return value.strip().partition(" ")[2].strip()
    return ""


class AgentEndpoint(ThreadingHTTPServer):
    """The HTTP server of an agent's process, which serves one session at a time."""

    daemon_threads = True
    session: AgentSession | None = None
    key_file = ""
    """With the session's key as its name: the link to the listener, if that is a Unix socket."""

    def __init__(self, listener: socket.socket) -> None:
        """Serve in a thread at this listener, which `workers.agents.router` may forward to."""
        is_outer = listener.family == socket.AF_UNIX
        super().__init__(("", 0), _OuterHandler if is_outer else _AgentHandler, False)
        self.socket.close()
        self.socket, self.server_port = listener, 0 if is_outer else listener.getsockname()[1]
        threading.Thread(target=self.serve_forever, daemon=True).start()


@cache
def endpoint(listener: int = -1) -> AgentEndpoint:
    """Return the server of this process, at a free port or at this descriptor's socket."""
    if listener >= 0:
        return AgentEndpoint(socket.socket(fileno=listener))
    return AgentEndpoint(socket.create_server(("127.0.0.1", 0)))


def publish_endpoint(session: AgentSession, listener: int) -> None:
    """Create a link to this process's socket, named by the session's key, for the router."""
    server = endpoint(listener)
    if server.key_file:
        os.remove(server.key_file)
    server.session, server.key_file = session, os.path.abspath(session.name)
    os.symlink(server.socket.getsockname(), server.key_file)


def _size(text: str, base: int, before: int = 0) -> int:
    """Return the size of a body or of a chunk that follows `before` bytes."""
    digits = text.partition(";")[0].strip()
    try:
        size = int(digits, base) if digits.isalnum() else -1
    except ValueError:
        size = -1
    if size < 0:
        raise RejectedRequest(f"{digits!r:.80} is not the size of a body")
    if before + size > LONGEST_BODY:
        raise RejectedRequest(f"a body may have at most {LONGEST_BODY} bytes", status=413)
    return size


class _AgentHandler(BaseHTTPRequestHandler):
    """Serves the requests of agents to their sessions."""

    server: AgentEndpoint
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise a response's body waits 40 ms for an ACK of its head

    def do_POST(self) -> None:  # noqa: N802 - name in the standard library
        """Serve a request; an error of it becomes its response."""
        try:
            self._serve(*self._session_and_path())
        except OSError:  # the client is gone
            self.close_connection = True
        except Exception as problem:  # noqa: BLE001 - an error of this request only
            if not isinstance(problem, RejectedRequest):
                problem = RejectedRequest(f"it cannot be answered: {problem!r:.200}")
            self.close_connection = True  # the body may not have been read
            error: dict[str, Any] = {"type": "invalid_request_error", **problem.fields}
            self._send(error.pop("status"), {"type": "error", "error": error})

    do_GET = do_POST  # noqa: N815

    def log_message(self, *_: Any) -> None:
        """Do nothing: the output of an agent process belongs to the agent."""

    def _session_and_path(self) -> tuple[AgentSession, str]:
        """Return the session whose key the request has, and the path after the key."""
        path, session = self.path.lstrip("/"), self.server.session
        if isinstance(self, _OuterHandler):
            if session is None or key_in(self.headers.items()) != session.name:
                raise RejectedRequest("the API key is not the key of a session", status=401)
        else:
            name, _, path = path.partition("/")
            if session is None or session.name != name:
                raise RejectedRequest(
                    f"there is no session {name!r:.80} at this address. Use the agent's "
                    "base_url, which is valid until its trajectory ends.",
                    status=404,
                )
        return session, path.partition("?")[0]

    def _serve(self, session: AgentSession, path: str) -> None:
        """Answer a request in its dialect, as JSON or as a stream."""
        if self.command == "GET":
            card = {"object": "model", "created": 0, "owned_by": "verl_like"}
            answers: dict[str, dict[str, Any]] = {
                f"v1/models/{name}": card | {"id": name} for name in session.models
            }
            answers["v1/models"] = {"object": "list", "data": [*answers.values()]}
            if unquote(path) not in answers:
                known = ", ".join(answers)
                raise RejectedRequest(f"there is no GET {path:.80}; there is {known}", status=404)
            self._send(200, answers[unquote(path)])
            return
        dialect = DIALECTS.get(path)
        if dialect is None and path not in OTHER_PATHS:
            raise RejectedRequest(f"there is no POST {path}", status=404)
        body = self._body()
        if path == COUNT_TOKENS:
            self._send(200, {"input_tokens": len(json.dumps(body)) // BYTES_PER_TOKEN})
            return
        if dialect is not None:
            body = in_chat(dialect, body, session)
        request = read_request("v1/chat/completions" if dialect else path, body)
        request.is_retry = self.headers.get("x-stainless-retry-count", "0") != "0"
        response = completion(request, session.conversation_with(request.model).ask(request))
        if dialect is not None:
            response = dialect.answer(response)
        if not request.streams:
            self._send(200, response)
            return
        if dialect is None:
            lines = [json.dumps(chunk) for chunk in chunks(request, response)]
            text = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])
        else:
            events = [(event["type"], json.dumps(event)) for event in dialect.events(response)]
            text = "".join(f"event: {kind}\ndata: {line}\n\n" for kind, line in events)
        self._send_text(200, text, "text/event-stream")

    def _body(self) -> Any:
        if self.headers.get("Transfer-Encoding", "").strip().lower() == "chunked":
            content = self._chunks()
        else:
            content = self.rfile.read(_size(self.headers.get("Content-Length", "0"), 10))
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise RejectedRequest(f"the body is not JSON: {error}") from error

    def _chunks(self) -> bytes:
        """Return the body of a request that is sent in chunks, each after a line with its size."""
        body = b""
        while size := _size(self.rfile.readline(LONGEST_LINE).decode("latin-1"), 16, len(body)):
            body += self.rfile.read(size)
            self.rfile.readline(LONGEST_LINE)
        while self.rfile.readline(LONGEST_LINE).strip():
            pass  # headers may follow
        return body

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


class _OuterHandler(_AgentHandler):
    """Serves requests that come through the router's Unix sockets."""

    disable_nagle_algorithm = False  # Unix sockets do not use this algorithm
