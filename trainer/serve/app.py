"""HTTP routes of the Tinker protocol.

Longer work goes into the `WorkQueue`. Its POST is answered at once, with a pending result's id. The
client gets the result with `retrieve_future`, the only route that waits.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import PositiveInt, TypeAdapter, ValidationError, create_model
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from trainer.serve import bodies as b
from trainer.serve.bodies import JsonObject
from trainer.serve.checkpoints import SavedPath, expiry
from trainer.serve.clients import ClientSession, Sessions
from trainer.serve.pending import PendingResults, RequestError
from trainer.serve.rows import loss_of, read_datums
from trainer.serve.sampling import SampleRequest, ServedSampler
from trainer.serve.training_ops import ServedModel
from trainer.serve.wire import PROTOBUF, parse
from trainer.serve.work_queue import WorkQueue
from verl_like.errors import VerlLikeError
from workers.training.optim import OptimStepSettings
from workers.training.states import BASE

HOLD_S = 30.0
"""Maximum seconds that a poll waits for a result; the SDK's own timeout is 45 s."""
GAP_S = 120.0
"""Maximum seconds that requests of a model wait for a lower `seq_id` that has not arrived."""
SILENT_S = 1800.0
"""A session that sends no request for this long ends; the SDK sends a heartbeat every 10 s."""
CLEANUP_S = 5.0
"""Pause between two runs of the janitor."""
LARGEST = 64 * 2**20
"""Maximum size of a request body in bytes."""
NO_CANCEL = {"sample_cancel_enabled": False, "sample_cancel_max_batch_size": 1}
JSON_OBJECT = TypeAdapter(JsonObject)
Handler = Callable[..., JsonObject | None]


class Api:
    """The routes, and the sessions that they work on."""

    def __init__(self, work_queue: WorkQueue, token: str) -> None:
        self.work_queue, self._token = work_queue, token
        self.ops, self.checkpoints = work_queue.ops, work_queue.checkpoints
        self.sessions, self.pending_results = Sessions(), PendingResults()

    def table(self) -> list[tuple[str, str, Handler]]:
        """Return (method, path, handler) of the routes whose handlers take a request's fields."""
        run, session = "/training_runs/{run}", "/sessions/{session_id}"
        checkpoint = run + "/checkpoints/{kind}/{name}"
        return [
            ("GET", "/healthz", lambda: {"status": "ok"}),
            ("POST", "/client/config", lambda: {}),  # the SDK keeps its defaults
            ("POST", "/client/dynamic_config", lambda: {"refresh_interval_sec": 300, **NO_CANCEL}),
            ("POST", "/telemetry", lambda: {"status": "accepted"}),  # dropped
            ("GET", "/get_server_capabilities", self.capabilities),
            ("POST", "/create_session", self.create_session),
            ("POST", "/session_heartbeat", self.heartbeat),
            ("POST", session + "/finish", self.finish),
            ("GET", session, self.get_session),
            ("GET", "/sessions", self.list_sessions),
            ("POST", "/create_model", self.create_model),
            ("POST", "/get_info", self.get_info),
            ("POST", "/optim_step", self.optim_step),
            ("POST", "/save_weights", self.save_weights),
            ("POST", "/save_weights_for_sampler", self.save_for_sampler),
            ("POST", "/load_weights", self.load_weights),
            ("POST", "/create_sampling_session", self.create_sampler),
            ("GET", "/samplers/{sampler_id:path}", self.get_sampler),
            ("POST", "/asample", self.sample),
            ("POST", "/weights_info", self.weights_info),
            ("GET", "/training_runs", self.list_runs),
            ("GET", run, self.checkpoints.describe_run),
            ("GET", run + "/checkpoints", self.list_of_run),
            ("GET", "/checkpoints", self.list_checkpoints),
            ("DELETE", checkpoint, self.delete_checkpoint),
            ("POST", checkpoint + "/publish", self.publish),
            ("DELETE", checkpoint + "/publish", self.unpublish),
            ("PUT", checkpoint + "/ttl", self.set_ttl),
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
        """Check the API key, and return the body; reject a body that is too large."""
        key = request.headers.get("x-api-key", "")
        if self._token and not hmac.compare_digest(key.encode(), self._token.encode()):
            raise RequestError(
                "the key in X-API-Key is not the key of this server. Set TINKER_API_KEY to the "
                "server's --token.",
                401,
            )
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > LARGEST:
                raise RequestError(f"the body exceeds {LARGEST} bytes. Send less per request.", 413)
        return bytes(body)

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
        while True:
            await asyncio.sleep(CLEANUP_S)
            for opened in self.sessions.all_models():
                opened.turns.give_up(GAP_S)
            oldest = time.monotonic() - SILENT_S
            for session in [s for s in self.sessions.open.values() if s.last_request < oldest]:
                self._end(session)
            await asyncio.to_thread(self.checkpoints.delete_expired)

    # ------------------------------------------------------------------ clients and sessions

    def capabilities(self) -> JsonObject:
        names = {self.work_queue.base_model: "actor", **{role: role for role in self.ops.scorers}}
        models = [
            {
                "model_name": name,
                "max_context_length": self.work_queue.limits.context,
                "trainable": role in self.ops.trained,
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

    def heartbeat(self, session_id: str) -> None:
        if session_id not in self.sessions.open:
            raise RequestError("the session has ended. Create a new session.", 410)
        self.sessions.find(session_id)

    def finish(self, session_id: str) -> None:
        if session_id in self.sessions.open:
            self._end(self.sessions.open[session_id])

    def _end(self, session: ClientSession) -> None:
        del self.sessions.open[session.session_id]
        self.pending_results.end_session(session.session_id)
        states = {*session.models, *(sampler.state for sampler in session.samplers.values())}
        self.work_queue.drop(states - self.sessions.sampled_states() - {BASE})

    def get_session(self, session_id: str) -> JsonObject:
        session = self.sessions.find(session_id)
        return {
            "training_run_ids": [*session.models],
            "sampler_ids": [*session.samplers],
            "user_metadata": session.user_metadata,
            "display_name": session.display_name,
        }

    def list_sessions(self, limit: b.Natural = 100, offset: b.Natural = 0) -> JsonObject:
        return _page("sessions", [*self.sessions.open], limit, offset)

    # ----------------------------------------------------------------------------- training

    def create_model(
        self,
        session_id: str,
        model_seq_id: int,
        base_model: str,
        lora_config: b.LoraBody | None = None,
        optimizer_config: b.Optimizer | None = None,
        user_metadata: b.Metadata = None,
    ) -> JsonObject:
        role, lora = self._role_of(base_model), lora_config or b.LoraBody()
        trains = {"mlp": lora.train_mlp, "attn": lora.train_attn, "unembed": lora.train_unembed}
        frozen = tuple(part for part, is_trained in trains.items() if not is_trained)
        name = f"{session_id}:train:{model_seq_id}"
        model = ServedModel(name, role, lora.rank, lora.seed, frozen, user_metadata)
        return self._open(session_id, model, lambda: self.ops.create(model))

    def _role_of(self, name: str | None) -> str:
        """Return the role that a client means by this name of a base model."""
        if name in self.work_queue.names:
            return "actor"
        if name is None or name not in self.ops.scorers:
            names = ", ".join([self.work_queue.base_model, *self.ops.scorers])
            raise RequestError(f"this server has no model {name!r}; it has {names}.")
        return name

    def _check_rank(self, rank: int, role: str) -> None:
        if role not in self.ops.trained:
            names = " and ".join(f"the {name}" for name in self.ops.trained)
            raise RequestError(f"this server trains {names}, not the {role}.")
        trained = self.ops.trained[role]
        if (rank == 0) != (trained.model.lora_rank == 0):
            kind, remedy = "all weights", "rank=0"
            if trained.model.lora_rank:
                kind, remedy = "adapters", "a rank above 0"
            raise RequestError(
                f"this server trains {kind} of the {role}, but the request has rank={rank}. Use "
                f"{remedy}, or start the server with {trained.key}.lora_rank={rank}."
            )

    def _open(
        self, session_id: str, model: ServedModel, work: Callable[[], JsonObject]
    ) -> JsonObject:
        """Open a model in a session; `work` creates its state."""
        self._check_rank(model.rank, model.role)
        session = self.sessions.find(session_id)
        is_taken = any(opened.role == model.role for opened in self.sessions.all_models())
        if model.rank == 0 and is_taken:
            raise RequestError(
                f"this server trains all weights of the {model.role}, for one model at a time, "
                "and a model is open. Try again when the session of that model has ended."
            )
        session.models[model.name] = model
        pending = self.pending_results.new(session_id)
        self.work_queue.work(pending, work)
        return {"request_id": pending.request_id}

    def get_info(self, model_id: str) -> JsonObject:
        model = self.sessions.model(model_id)
        name = self.ops.trained[model.role].model.path
        return {
            "type": "get_info",
            "model_id": model.name,
            "model_data": {"model_name": name, "tokenizer_id": name},
            "is_lora": model.rank > 0,
            "lora_rank": model.rank,
            "model_name": name,
        }

    async def forward_backward(self, request: Request) -> Response:
        """Handle training passes and forward-only passes, the only requests in protobuf."""
        body = await self._body(request)
        if PROTOBUF not in request.headers.get("content-type", ""):
            raise RequestError(f"forward_backward accepts only bodies of type {PROTOBUF}.", 415)
        message = parse("ForwardBackwardRequest", body)
        model = self.sessions.model(message.model_id)
        run = self.ops.forward if message.forward_only else self.ops.forward_backward

        def work() -> bytes:
            try:
                loss = loss_of(message, model.role, self.work_queue.aliases)
                return run(model, read_datums(message, loss, self.work_queue.limits), loss)
            except Exception as error:
                if not message.forward_only:
                    model.failure = f"{error}"  # makes the next optim_step fail
                raise

        fields = {"model_id": model.name, "seq_id": message.seq_id}
        submit = lambda: self._in_turn(model, message.seq_id, work)  # noqa: E731
        return JSONResponse(self.sessions.once(fields, body, submit))

    def _in_turn(
        self, model: ServedModel, seq_id: int, work: Callable[[], bytes | JsonObject]
    ) -> JsonObject:
        """Queue a request of a model until its turn; return the id of its pending result."""
        model.turns.check(seq_id)
        pending = self.pending_results.new(model.name)
        model.turns.submit(seq_id, pending, lambda: self.work_queue.work(pending, work))
        return {"request_id": pending.request_id}

    def optim_step(
        self,
        model_id: str,
        seq_id: PositiveInt,
        adam_params: b.Adam | None = None,
        optimizer_params: None = None,
    ) -> JsonObject:
        model, adam = self.sessions.model(model_id), adam_params or b.Adam()
        settings = OptimStepSettings(
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            grad_clip=adam.grad_clip_norm or float("inf"),
            ends_update=False,
        )
        return self._in_turn(model, seq_id, lambda: self.ops.optim_step(model, settings))

    # -------------------------------------------------------------------------- checkpoints

    def save_weights(self, body: b.Save) -> JsonObject:
        return self._save(body, "weights", bool(body.overwrite))

    def save_for_sampler(self, body: b.Save) -> JsonObject:
        """Save a named checkpoint, or a snapshot that is deleted with the session."""
        if body.sampling_session_seq_id is None:
            return self._save(body, "sampler_weights", True)
        model = self.sessions.model(body.model_id)
        session = self.sessions.find(body.model_id.partition(":")[0])
        name = f"{session.session_id}:sample:{body.sampling_session_seq_id}"
        path = self.ops.spilled(model.name, name)
        answer = self._in_turn(model, body.seq_id, lambda: self.ops.snapshot(model, name))
        session.samplers[name] = ServedSampler(name, name, model.role, path)
        return answer

    def _save(self, body: b.Save, kind: str, may_replace: bool) -> JsonObject:
        model = self.sessions.model(body.model_id)
        path = SavedPath.of(model.name, kind, body.path or f"step-{model.num_steps}")

        def work() -> JsonObject:
            if not may_replace and self.checkpoints.find(path):
                raise RequestError(
                    f"the checkpoint {path} already exists. Set overwrite=true to replace it."
                )
            return self.ops.save(model, path, body.user_metadata, body.ttl_seconds)

        return self._in_turn(model, body.seq_id, work)

    def load_weights(
        self,
        path: str,
        optimizer: bool = False,
        model_id: str | None = None,
        seq_id: int | None = None,
        session_id: str = "",
        model_seq_id: int = 0,
        base_model: str | None = None,
        user_metadata: b.Metadata = None,
    ) -> JsonObject:
        """Load a checkpoint into a new model of a session, or as the first request of a model."""
        saved = SavedPath.parse(path)
        metadata = self.checkpoints.metadata(saved)
        if model_id is not None:
            model = self.sessions.model(model_id)
            if seq_id != 1:
                raise RequestError(
                    "load_weights must be the first request of a model. Create a new training "
                    "client from the checkpoint."
                )
            return self._in_turn(model, 1, lambda: self.ops.load(model, saved, optimizer))
        role, rank, frozen = metadata["role"], metadata["rank"], metadata["frozen"]
        if base_model not in (None, metadata["base_model"], role):
            self._role_of(base_model)
        name = f"{session_id}:train:{model_seq_id}"
        model = ServedModel(name, role, rank, None, frozen, user_metadata)
        return self._open(session_id, model, lambda: self.ops.load(model, saved, optimizer))

    def weights_info(self, tinker_path: str) -> JsonObject:
        metadata = self.checkpoints.metadata(SavedPath.parse(tinker_path))
        return {
            "base_model": metadata["base_model"],
            "is_lora": metadata["rank"] > 0,
            "lora_rank": metadata["rank"] or None,
            **{f"train_{p}": p not in metadata["frozen"] for p in ("mlp", "attn", "unembed")},
        }

    def list_runs(self, limit: b.Natural = 100, offset: b.Natural = 0) -> JsonObject:
        return _page("training_runs", self.checkpoints.describe_runs(), limit, offset)

    def list_of_run(self, run: str) -> JsonObject:
        self.checkpoints.describe_run(run)
        return {"checkpoints": self.checkpoints.describe_all(run)}

    def list_checkpoints(self, limit: b.Natural = 100, offset: b.Natural = 0) -> JsonObject:
        return _page("checkpoints", self.checkpoints.describe_all(), limit, offset)

    def delete_checkpoint(self, run: str, kind: str, name: str) -> None:
        self.checkpoints.delete(SavedPath.of(run, kind, name))

    def publish(self, run: str, kind: str, name: str) -> None:
        self.checkpoints.change(SavedPath.of(run, kind, name), public=True)

    def unpublish(self, run: str, kind: str, name: str) -> None:
        self.checkpoints.change(SavedPath.of(run, kind, name), public=False)

    def set_ttl(self, run: str, kind: str, name: str, ttl_seconds: b.Ttl = None) -> None:
        self.checkpoints.change(SavedPath.of(run, kind, name), expires_at=expiry(ttl_seconds))

    # ----------------------------------------------------------------------------- sampling

    def create_sampler(
        self,
        session_id: str,
        sampling_session_seq_id: int,
        base_model: str | None = None,
        model_path: str | None = None,
    ) -> JsonObject:
        session = self.sessions.find(session_id)
        name = f"{session_id}:sample:{sampling_session_seq_id}"
        if model_path is None:
            sampler = ServedSampler(name, BASE, self._role_of(base_model))
        else:
            path = SavedPath.parse(model_path)
            metadata = self.checkpoints.metadata(path)
            self._check_rank(metadata["rank"], metadata["role"])
            # the time tells apart checkpoints that replace each other under one path
            state = f"{path} of {metadata['time']}"
            sampler = ServedSampler(name, state, metadata["role"], path, str(path))
        session.samplers[name] = sampler
        return {"sampling_session_id": name}

    def get_sampler(self, sampler_id: str) -> JsonObject:
        sampler = self.sessions.sampler(sampler_id)
        is_trained = sampler.role in self.ops.trained
        base = self.ops.trained[sampler.role].model.path if is_trained else sampler.role
        return {"sampler_id": sampler_id, "base_model": base, "model_path": sampler.shown_path}

    def sample(self, body: b.SampleBody) -> JsonObject:
        sampler = self.sessions.sampler(body.sampling_session_id)
        sampling = SampleRequest.of(body, sampler, self.work_queue.limits, self.work_queue.eos)
        sampling.pending = self.pending_results.new(sampler.sampler_id)
        self.work_queue.sample(sampling)
        names = [f"{sampler.sampler_id}:{body.seq_id}:{n}" for n in range(body.num_samples)]
        return {"request_id": sampling.pending.request_id, "sample_sequence_ids": names}

    async def not_supported(self, request: Request) -> Response:
        """Reject a request of any other route; its `seq_id` counts as used."""
        self._skip_turn(await self._fields(request))
        route = f"{request.method} {request.url.path}"
        raise RequestError(f"this server does not support {route}.", 404)

    async def retrieve(self, request: Request) -> Response:
        """Wait for a result; after `HOLD_S`, tell the client to poll again."""
        fields = await self._fields(request)
        pending = self.pending_results.find(str(fields.get("request_id")))
        result = await pending.wait(HOLD_S)
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
    text = f"{error}"
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        text = f"{where}={str(first['input'])[:80]!r}: {first['msg']}"
    return JSONResponse({"detail": text}, getattr(error, "status", 400))


def _page(name: str, items: Sequence[Any], limit: int, offset: int) -> JsonObject:
    """Return one page of a list under `name`, and the cursor of that page."""
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return {name: items[offset : offset + limit], "cursor": cursor}
