"""The server of the Tinker protocol: its HTTP routes, and the threads that run it.

Longer work goes into the `WorkQueue`. Its POST is answered at once, with a pending result's id. The
client gets the result with `retrieve_future`, the only route that waits. The routes run in a thread
of their own, and the `WorkQueue` in the main thread.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import logging
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn
from pydantic import TypeAdapter, ValidationError, create_model
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from trainer.serve import bodies as b
from trainer.serve.bodies import PROTOBUF, JsonObject, parse
from trainer.serve.checkpoints import CheckpointHandlers
from trainer.serve.clients import ClientSession, Sessions
from trainer.serve.handlers import SamplingHandlers, TrainingHandlers
from trainer.serve.pending import PendingResults, RequestError
from trainer.serve.rows import loss_of, read_datums
from trainer.serve.work_queue import WorkQueue, started
from verl_like.errors import VerlLikeError
from verl_like.process.machine import foreign_header, http_url

logger = logging.getLogger(__name__)
LONGEST_POLL_S = 30.0
"""Maximum seconds that a poll waits for a result; the SDK's own timeout is 45 s."""
SEQ_ID_TIMEOUT_S = 120.0
"""Maximum seconds that requests of a model wait for a lower `seq_id` that has not arrived."""
SESSION_TIMEOUT_S = 1800.0
"""A session that sends no request for this long ends; the SDK sends a heartbeat every 10 s."""
CLEANUP_S = 5.0
"""Pause between two runs of the janitor."""
MAX_BODY_BYTES = 64 * 2**20
"""Maximum size of a request body in bytes."""
MAX_DROPPED_BYTES = 2**30
"""Maximum bytes of a rejected body that are read, so that the client gets the answer."""
THREAD_SWITCH_S = 0.001
"""Python's thread switch interval while the server runs; the default is 5 ms."""
KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open; clients pause less between requests."""
NO_CANCEL = {"sample_cancel_enabled": False, "sample_cancel_max_batch_size": 1}
JSON_OBJECT = TypeAdapter(JsonObject)
Handler = Callable[..., JsonObject | None]


class Api:
    """The routes, and the sessions that they work on."""

    def __init__(self, work_queue: WorkQueue, token: str) -> None:
        self.work_queue, self._token = work_queue, token
        self.sessions, self.pending_results = Sessions(), PendingResults()
        self.training = TrainingHandlers(work_queue, self.sessions, self.pending_results)

    def table(self) -> list[tuple[str, str, Handler]]:
        """Return (method, path, handler) of the routes whose handlers take a request's fields."""
        run, session = "/training_runs/{run}", "/sessions/{session_id}"
        checkpoint = run + "/checkpoints/{kind}/{name}"
        training = self.training
        sampling = SamplingHandlers(self.work_queue, self.sessions, self.pending_results)
        checkpoints = CheckpointHandlers(self.work_queue.checkpoints)
        return [
            ("GET", "/healthz", lambda: {"status": "ok"}),
            ("POST", "/client/config", lambda: {}),  # the SDK keeps its defaults
            ("POST", "/client/dynamic_config", lambda: {"refresh_interval_sec": 300, **NO_CANCEL}),
            ("POST", "/telemetry", lambda: {"status": "accepted"}),  # dropped
            ("GET", "/get_server_capabilities", self.capabilities),
            ("POST", "/create_session", self.create_session),
            ("POST", "/session_heartbeat", self.sessions.heartbeat),
            ("POST", session + "/finish", self.finish),
            ("GET", session, self.sessions.describe),
            ("GET", "/sessions", self.sessions.list_all),
            ("POST", "/create_model", training.create_model),
            ("POST", "/get_info", training.get_info),
            ("POST", "/optim_step", training.optim_step),
            ("POST", "/save_weights", training.save_weights),
            ("POST", "/save_weights_for_sampler", training.save_for_sampler),
            ("POST", "/load_weights", training.load_weights),
            ("POST", "/create_sampling_session", sampling.create),
            ("GET", "/samplers/{sampler_id:path}", sampling.describe),
            ("POST", "/asample", sampling.sample),
            ("POST", "/weights_info", checkpoints.weights_info),
            ("GET", "/training_runs", checkpoints.list_runs),
            ("GET", run, checkpoints.describe_run),
            ("GET", run + "/checkpoints", checkpoints.list_of_run),
            ("GET", "/checkpoints", checkpoints.list_all),
            ("DELETE", checkpoint, checkpoints.delete),
            ("POST", checkpoint + "/publish", checkpoints.publish),
            ("DELETE", checkpoint + "/publish", checkpoints.unpublish),
            ("PUT", checkpoint + "/ttl", checkpoints.set_ttl),
        ]

    def app(self) -> Starlette:
        """Return the ASGI application."""
        routes = [self._route(*entry) for entry in self.table()]
        others = {
            "/api/v1/forward_backward": self.forward_backward,
            "/api/v1/retrieve_future": self.retrieve,
            "/{path:path}": self.not_supported,
        }
        methods = ["GET", "POST", "PUT", "DELETE"]
        routes += [Route(path, answer, methods=methods) for path, answer in others.items()]
        errors = (ValidationError, VerlLikeError, ClientDisconnect)
        return Starlette(routes=routes, exception_handlers=dict.fromkeys(errors, _rejection))

    # ------------------------------------------------------------------ around every request

    def _route(self, method: str, path: str, handler: Handler) -> Route:
        """Return a route that checks the fields of a request and passes them to the handler."""
        kind = body_of(handler)
        takes_whole = "body" in inspect.signature(handler).parameters

        async def answer(request: Request) -> Response:
            fields = await self._fields(request)
            try:
                body = kind.model_validate(fields | {**request.query_params, **request.path_params})
                arguments = {"body": body} if takes_whole else vars(body)
                content = body.model_dump_json().encode()
                run = lambda: handler(**arguments) or {}  # noqa: E731
                return JSONResponse(self.sessions.once(vars(body), content, run))
            except (ValidationError, VerlLikeError):
                self._skip_turn(fields)
                raise

        return Route(f"/api/v1{path}", answer, methods=[method])

    async def _body(self, request: Request) -> bytes:
        """Check who sends a request, and return the body; reject a body that is too large."""
        problem = self._why_rejected(request)
        body, size = bytearray(), 0
        async for part in request.stream():
            size += len(part)
            if size > MAX_BODY_BYTES and problem is None:
                body.clear()
                text = f"the body exceeds {MAX_BODY_BYTES} bytes. Send less per request."
                problem = RequestError(text, 413)
            if problem is None:
                body += part
            elif size > MAX_DROPPED_BYTES:
                break
        if problem is not None:
            raise problem
        return bytes(body)

    def _why_rejected(self, request: Request) -> RequestError | None:
        """Check the key; without keys, check that no page of another site sends the request."""
        headers = request.headers
        if self._token:
            key = headers.get("x-api-key", "")
            if hmac.compare_digest(key.encode(), self._token.encode()):
                return None
            text = "the key in X-API-Key is not the key of this server. Set TINKER_API_KEY to it."
            return RequestError(text, 401)
        foreign = foreign_header(headers.get("Host"), headers.get("Origin"))
        if foreign:
            advice = "Use 127.0.0.1, or start the server with --token-env."
            return RequestError(f"{foreign}, and this server has no key. {advice}", 403)
        return None

    async def _fields(self, request: Request) -> JsonObject:
        """Return the JSON object in the body."""
        return JSON_OBJECT.validate_json(await self._body(request) or b"{}")

    def _skip_turn(self, fields: JsonObject) -> None:
        """Count the `seq_id` of a rejected request as used: the client continues with the next."""
        seq_id, model_id = fields.get("seq_id"), str(fields.get("model_id"))
        session = self.sessions.of(model_id)
        if type(seq_id) is int and session is not None and model_id in session.models:
            session.models[model_id].turns.skip(seq_id)

    async def janitor(self) -> None:
        """Repeatedly end silent sessions, fail requests after a gap, delete expired checkpoints."""
        reported: set[str] = set()
        while True:
            await asyncio.sleep(CLEANUP_S)
            try:
                for opened in self.sessions.all_models():
                    opened.turns.give_up(SEQ_ID_TIMEOUT_S)
                for session in self.sessions.silent_for(SESSION_TIMEOUT_S):
                    self.training.end_session(session)
                await asyncio.to_thread(self.work_queue.checkpoints.delete_expired)
            except Exception as error:  # noqa: BLE001 - the next round may succeed
                if repr(error) not in reported:
                    logger.warning("The cleanup failed, and will be repeated: %r", error)
                reported.add(repr(error))

    # ------------------------------------------------------------------ clients and sessions

    def capabilities(self) -> JsonObject:
        ops = self.work_queue.ops
        names = {self.work_queue.base_model: "actor", **{role: role for role in ops.scorers}}
        models = [
            {
                "model_name": name,
                "max_context_length": self.work_queue.limits.context,
                "trainable": role in ops.trained,
                "sampleable": role == "actor",
            }
            for name, role in names.items()
        ]
        return {"supported_models": models}

    def create_session(
        self, user_metadata: b.Metadata = None, display_name: str | None = None
    ) -> JsonObject:
        session = ClientSession(uuid.uuid4().hex[:16], user_metadata or {}, display_name)
        self.sessions.open[session.session_id] = session
        return {"session_id": session.session_id, "info_message": self.work_queue.notice}

    def finish(self, session_id: str) -> None:
        if session_id in self.sessions.open:
            self.training.end_session(self.sessions.open[session_id])

    async def forward_backward(self, request: Request) -> Response:
        """Handle training passes and forward-only passes, the only requests in protobuf."""
        body = await self._body(request)
        if PROTOBUF not in request.headers.get("content-type", ""):
            raise RequestError(f"forward_backward accepts only bodies of type {PROTOBUF}.", 415)
        message = parse("ForwardBackwardRequest", body)
        model = self.sessions.model(message.model_id)
        ops = self.work_queue.ops
        run = ops.forward if message.forward_only else ops.forward_backward

        def work() -> bytes:
            try:
                loss = loss_of(message, model.role, self.work_queue.aliases)
                return run(model, read_datums(message, loss, self.work_queue.limits), loss)
            except Exception as error:
                if not message.forward_only:
                    model.failure = f"{error}"  # makes the next optim_step fail
                raise

        fields = {"model_id": model.name, "seq_id": message.seq_id}
        submit = lambda: self.training.in_turn(model, message.seq_id, work)  # noqa: E731
        return JSONResponse(self.sessions.once(fields, body, submit))

    async def not_supported(self, request: Request) -> Response:
        """Reject a request of any other route; its `seq_id` counts as used."""
        self._skip_turn(await self._fields(request))
        route = f"{request.method} {request.url.path}"
        raise RequestError(f"this server does not support {route}.", 404)

    async def retrieve(self, request: Request) -> Response:
        """Wait for a result; after `LONGEST_POLL_S`, tell the client to poll again."""
        fields = await self._fields(request)
        pending = self.pending_results.find(fields.get("request_id"))
        result = await pending.wait(LONGEST_POLL_S)
        if result is None:
            again = {"type": "try_again", "request_id": pending.request_id, "queue_state": "active"}
            return JSONResponse(again)
        self.pending_results.was_read(pending)
        return result


def body_of(handler: Handler) -> type[b.Body]:
    """Return a handler's request model, whose fields are the handler's parameters."""
    parameters = inspect.signature(handler, eval_str=True).parameters
    if "body" in parameters:
        kind: type[b.Body] = parameters["body"].annotation
        return kind
    fields: Any = {
        name: (p.annotation, ... if p.default is p.empty else p.default)
        for name, p in parameters.items()
    }
    return create_model(handler.__name__, __base__=b.Body, **fields)


async def _rejection(request: Request, error: Exception) -> Response:
    """Return the response to a rejected request."""
    text = b.fault_of(error) if isinstance(error, ValidationError) else f"{error}"
    return JSONResponse({"detail": text}, getattr(error, "status", 400))


@contextmanager
def open_api(work_queue: WorkQueue, host: str, port: int, token: str) -> Iterator[str]:
    """Context in which clients can reach the server at the returned URL."""
    api = Api(work_queue, token)
    settings = uvicorn.Config(
        api.app(),
        host,
        port,
        log_level="warning",
        lifespan="off",
        timeout_graceful_shutdown=2,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    listener = settings.bind_socket()
    # connections inherit this; otherwise small responses wait 40 ms for the client's ACK
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.listen(settings.backlog)  # so that clients may connect before the thread serves
    server = uvicorn.Server(settings)

    async def serve() -> None:
        janitor = asyncio.create_task(api.janitor())
        try:
            await server.serve([listener])
        finally:
            janitor.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="api", daemon=True)
    thread.start()
    try:
        yield http_url(host, listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def serve(config: Any, host: str, port: int, token: str, aliases: Mapping[str, str]) -> None:
    """Serve until SIGINT or SIGTERM."""
    sys.setswitchinterval(THREAD_SWITCH_S)
    with started(config, aliases) as work_queue, open_api(work_queue, host, port, token) as url:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: work_queue.stop())
        kind = "adapters" if work_queue.ops.trained["actor"].model.lora_rank else "all weights"
        print(f"{work_queue.base_model} ({kind}) answers at {url}", flush=True)
        if work_queue.notice:
            print(f"note: {work_queue.notice}", flush=True)
        work_queue.run()
        print(f"stopped; checkpoints are in {work_queue.checkpoints.folder}", flush=True)
