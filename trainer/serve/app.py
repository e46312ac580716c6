"""HTTP routes of the Tinker protocol.

Every POST is answered at once. Longer work is queued at the `Desk`, and the answer names a promise.
`retrieve_future` waits for the promise.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from trainer.serve import bodies as b
from trainer.serve.bodies import Facts
from trainer.serve.checkpoints import SavedPath, expiry
from trainer.serve.clients import ClientSession, Sessions
from trainer.serve.desk import Desk
from trainer.serve.promises import Promises, RequestError
from trainer.serve.rows import loss_of, read_datums
from trainer.serve.sampling import SampleRequest, ServedSampler
from trainer.serve.verbs import ServedModel
from trainer.serve.wire import PROTOBUF, parse
from verl_like.errors import VerlLikeError
from workers.training.optim import StepSettings
from workers.training.states import BASE

HOLD_S = 30.0
"""A poll waits this long for a result. The SDK gives up after 45 s, and polls again at once."""
GAP_S = 120.0
"""Requests of a model wait this long for a lower `seq_id` that has not arrived."""
SILENT_S = 1800.0
"""A session without requests for this long ends; the SDK sends a heartbeat every 10 s."""
CLEANUP_S = 5.0
"""Pause between two runs of the janitor."""
LARGEST_BODY = 64 * 2**20
NO_CANCEL = {"refresh_interval_sec": 300, "sample_cancel_enabled": False}
CONSTANT: list[tuple[str, str, Facts]] = [
    ("GET", "/healthz", {"status": "ok"}),
    ("POST", "/client/config", {}),  # all flags are the SDK's defaults
    ("POST", "/client/dynamic_config", NO_CANCEL | {"sample_cancel_max_batch_size": 1}),
    ("POST", "/telemetry", {"status": "accepted"}),  # telemetry of clients is dropped
]
Handler = Callable[[Any], Facts]


class Door:
    """The routes, and the sessions behind them."""

    def __init__(self, desk: Desk, token: str) -> None:
        self.desk, self.verbs, self.checkpoints = desk, desk.verbs, desk.checkpoints
        self._token = token
        self.sessions, self.promises = Sessions(), Promises()

    def table(self) -> list[tuple[str, str, Handler]]:
        """Return method, path and handler of the routes whose body is JSON."""
        run, session = "/training_runs/{run}", "/sessions/{session_id}"
        checkpoint = run + "/checkpoints/{kind}/{name}"
        return [
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
            ("GET", run, self.get_run),
            ("GET", run + "/checkpoints", self.list_of_run),
            ("GET", "/checkpoints", self.list_checkpoints),
            ("DELETE", checkpoint, self.delete_checkpoint),
            ("POST", checkpoint + "/publish", self.publish),
            ("DELETE", checkpoint + "/publish", self.unpublish),
            ("PUT", checkpoint + "/ttl", self.set_ttl),
        ]

    def app(self) -> Starlette:
        """Return the application, for an ASGI server."""
        routes = [self._route(method, path, _answering(facts)) for method, path, facts in CONSTANT]
        routes += [self._route(*entry) for entry in self.table()]
        others = {
            "/api/v1/forward_backward": self.forward_backward,
            "/api/v1/retrieve_future": self.retrieve,
            "/{path:path}": self.not_supported,
        }
        methods = ["GET", "POST", "PUT", "DELETE"]
        routes += [Route(p, self._guarded(f), methods=methods) for p, f in others.items()]
        return Starlette(routes=routes)

    # ------------------------------------------------------------------ around every request

    def _route(self, method: str, path: str, handler: Handler) -> Route:
        """Return a route whose handler gets a body of the type in its annotation."""
        kind = get_type_hints(handler)["body"]

        async def answer(request: Request) -> Response:
            fields = _json_object(await _body(request))
            try:
                body = kind.model_validate(fields | {**request.query_params, **request.path_params})
                return JSONResponse(handler(body))
            except (ValidationError, RequestError, VerlLikeError):
                self._skip_turn(fields)
                raise

        return Route(f"/api/v1{path}", self._guarded(answer), methods=[method])

    def _skip_turn(self, fields: Facts) -> None:
        """Count a rejected request as done, because the client continues with the next number."""
        seq_id = fields.get("seq_id")
        if type(seq_id) is int and fields.get("model_id") is not None:
            opened = self.sessions.find_model(fields["model_id"])
            if opened is not None:
                opened.turns.skip(seq_id)

    def _guarded(self, answer: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """Check the key, and turn errors into HTTP responses."""

        async def guarded(request: Request) -> Response:
            try:
                key = request.headers.get("x-api-key", "")
                if self._token and not hmac.compare_digest(key.encode(), self._token.encode()):
                    raise RequestError("the key in X-API-Key is not this server's.", 401)
                response: Response = await answer(request)
                return response
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"]))
                text = f"{where}={str(first['input'])[:80]!r}: {first['msg']}"
                return JSONResponse({"detail": text}, 400)
            except RequestError as error:
                return JSONResponse({"detail": str(error)}, error.status)
            except VerlLikeError as error:
                return JSONResponse({"detail": str(error)}, 400)
            except ClientDisconnect:
                return Response(status_code=400)

        return guarded

    async def janitor(self) -> None:
        """End silent sessions, fail requests after a gap, and delete expired checkpoints."""
        while True:
            await asyncio.sleep(CLEANUP_S)
            for opened in self.sessions.all_models():
                opened.turns.give_up(GAP_S)
            oldest = time.monotonic() - SILENT_S
            for session in [s for s in self.sessions.open.values() if s.last_request < oldest]:
                self._end(session)
            await asyncio.to_thread(self.checkpoints.delete_expired)

    # ------------------------------------------------------------------ clients and sessions

    def capabilities(self, body: b.Body) -> Facts:
        names = {self.desk.base_model: "actor", **{role: role for role in self.verbs.scorers}}
        return {
            "supported_models": [
                {
                    "model_name": name,
                    "max_context_length": self.desk.limits.context,
                    "trainable": role in self.verbs.trained,
                    "sampleable": role == "actor",
                }
                for name, role in names.items()
            ]
        }

    def create_session(self, body: b.CreateSession) -> Facts:
        session = self.sessions.begin(body)
        return {"session_id": session.session_id, "info_message": self.desk.notice}

    def heartbeat(self, body: b.OfSession) -> Facts:
        if body.session_id not in self.sessions.open:
            raise RequestError("the session has ended.", 410)
        self.sessions.find(body.session_id)
        return {}

    def finish(self, body: b.OfSession) -> Facts:
        if body.session_id in self.sessions.open:
            self._end(self.sessions.open[body.session_id])
        return {}

    def _end(self, session: ClientSession) -> None:
        del self.sessions.open[session.session_id]
        self.promises.end_session(session.session_id)
        states = {*session.models, *(sampler.state for sampler in session.samplers.values())}
        self.desk.drop(states - self.sessions.sampled_states() - {BASE})

    def get_session(self, body: b.OfSession) -> Facts:
        session = self.sessions.find(body.session_id)
        return {
            "training_run_ids": [*session.models],
            "sampler_ids": [*session.samplers],
            "user_metadata": session.user_metadata,
            "display_name": session.display_name,
        }

    def list_sessions(self, body: b.Page) -> Facts:
        return {"sessions": _page(body, [*self.sessions.open])[0]}

    # ----------------------------------------------------------------------------- training

    def create_model(self, body: b.CreateModel) -> Facts:
        role, lora = self._role_of(body.base_model), body.lora_config
        self._check_rank(lora.rank, role)
        trains = {"mlp": lora.train_mlp, "attn": lora.train_attn, "unembed": lora.train_unembed}
        frozen = tuple(part for part, is_trained in trains.items() if not is_trained)
        model = ServedModel("", role, lora.rank, lora.seed, frozen, body.user_metadata)
        return self._open(body, model, lambda: self.verbs.create(model))

    def _role_of(self, name: str | None) -> str:
        """Return the role that clients mean by the name of a base model."""
        if name in self.desk.names:
            return "actor"
        if name is None or name not in self.verbs.scorers:
            names = ", ".join([self.desk.base_model, *self.verbs.scorers])
            raise RequestError(f"this server has no model {name!r}; it has {names}.")
        return name

    def _check_rank(self, rank: int, role: str) -> None:
        if role not in self.verbs.trained:
            names = " and ".join(self.verbs.trained)
            raise RequestError(f"this server trains {names}; the {role} only scores rows.")
        trained = self.verbs.trained[role]
        if (rank == 0) != (trained.rank == 0):
            kind = "adapters" if trained.rank else "all weights"
            raise RequestError(
                f"this server trains {kind} of the {role}, and rank={rank} asks for something "
                f"else. Rank 0 is all weights, with {trained.key}.lora_rank=0 at the server's "
                "start."
            )

    def _open(
        self, body: b.CreateModel | b.Load, model: ServedModel, work: Callable[[], Facts]
    ) -> Facts:
        """Open a model of a session; `work` makes its state."""
        session = self.sessions.find(body.session_id)

        def answer() -> Facts:
            is_taken = any(m.role == model.role for m in self.sessions.all_models())
            if model.rank == 0 and is_taken:
                raise RequestError(
                    f"this server trains all weights of the {model.role}, for one client at a "
                    "time, and another client has a model open; try again when its session has "
                    "ended."
                )
            model.name = f"{session.session_id}:train:{body.model_seq_id}"
            session.models[model.name] = model
            promise = self.promises.new(session.session_id)
            self.desk.work(promise, work)
            return {"request_id": promise.request_id}

        return session.model_repeats.answer(body.model_seq_id, body.content, answer)

    def get_info(self, body: b.OfModel) -> Facts:
        model = self.sessions.model(body.model_id)
        name = self.verbs.trained[model.role].path
        return {
            "type": "get_info",
            "model_id": model.name,
            "model_data": {"model_name": name, "tokenizer_id": name},
            "is_lora": model.rank > 0,
            "lora_rank": model.rank,
            "model_name": name,
        }

    async def forward_backward(self, request: Request) -> Response:
        """Handle the only protobuf request, which is also used for forward passes."""
        if PROTOBUF not in request.headers.get("content-type", ""):
            raise RequestError(f"forward_backward takes {PROTOBUF}.", 415)
        body = await _body(request)
        message = parse("ForwardBackwardRequest", body)
        model = self.sessions.model(message.model_id)
        run = self.verbs.forward if message.forward_only else self.verbs.forward_backward

        def work() -> bytes:
            try:
                loss = loss_of(message, model.role, self.desk.aliases)
                datums = read_datums(message, loss, self.desk.limits)
            except VerlLikeError as error:
                if not message.forward_only:
                    self.verbs.fail_step(model, error)
                raise
            return run(model, datums, loss)

        return JSONResponse(self._in_turn(model, message.seq_id, body, work))

    def _in_turn(
        self, model: ServedModel, seq_id: int, content: bytes, work: Callable[[], bytes | Facts]
    ) -> Facts:
        """Queue a request of a model until its turn; the answer names its promise."""

        def answer() -> Facts:
            model.turns.check(seq_id)
            promise = self.promises.new(model.name.partition(":")[0])
            model.turns.submit(seq_id, promise, lambda: self.desk.work(promise, work))
            return {"request_id": promise.request_id}

        return model.repeats.answer(seq_id, content, answer)

    def optim_step(self, body: b.OptimStep) -> Facts:
        model, adam = self.sessions.model(body.model_id), body.adam_params
        settings = StepSettings(
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            grad_clip=adam.grad_clip_norm or float("inf"),
            ends_update=False,
        )
        work = lambda: self.verbs.optim_step(model, settings)  # noqa: E731
        return self._in_turn(model, body.seq_id, body.content, work)

    # -------------------------------------------------------------------------- checkpoints

    def save_weights(self, body: b.Save) -> Facts:
        return self._save(body, "weights", bool(body.overwrite))

    def save_for_sampler(self, body: b.Save) -> Facts:
        """Save a named checkpoint, or a snapshot that lives as long as the session."""
        if body.sampling_session_seq_id is None:
            return self._save(body, "sampler_weights", True)
        model = self.sessions.model(body.model_id)
        session = self.sessions.find(body.model_id.partition(":")[0])
        name = f"{session.session_id}:sample:{body.sampling_session_seq_id}"
        path = self.verbs.spilled(model.name, name)
        work = lambda: self.verbs.snapshot(model, name)  # noqa: E731
        answer = self._in_turn(model, body.seq_id, body.content, work)
        session.samplers.setdefault(name, ServedSampler(name, name, model.role, path))
        return answer

    def _save(self, body: b.Save, kind: str, may_replace: bool) -> Facts:
        model = self.sessions.model(body.model_id)
        path = SavedPath.of(model.name, kind, body.path or f"step-{model.num_steps}")
        expiry(body.ttl_seconds)

        def work() -> Facts:
            if not may_replace and self.checkpoints.find(path):
                raise RequestError(f"there is a checkpoint {path}; overwrite=true replaces it.")
            return self.verbs.save(model, path, body.user_metadata, body.ttl_seconds)

        return self._in_turn(model, body.seq_id, body.content, work)

    def load_weights(self, body: b.Load) -> Facts:
        path = SavedPath.parse(body.path)
        facts = self.checkpoints.facts(path)
        if body.model_id is not None:
            model = self.sessions.model(body.model_id)
            if body.seq_id != 1:
                raise RequestError("load_weights must be a model's first request.")
            work = lambda: self.verbs.load(model, path, body.optimizer)  # noqa: E731
            return self._in_turn(model, 1, body.content, work)
        role, frozen = facts["role"], tuple(facts["frozen"])
        if body.base_model not in (None, facts["base_model"], role):
            self._role_of(body.base_model)
        self._check_rank(facts["rank"], role)
        model = ServedModel("", role, facts["rank"], None, frozen, body.user_metadata)
        return self._open(body, model, lambda: self.verbs.load(model, path, body.optimizer))

    def weights_info(self, body: b.OfPath) -> Facts:
        facts = self.checkpoints.facts(SavedPath.parse(body.tinker_path))
        parts = ("mlp", "attn", "unembed")
        return {
            "base_model": facts["base_model"],
            "is_lora": facts["rank"] > 0,
            "lora_rank": facts["rank"] or None,
            **{f"train_{part}": part not in facts["frozen"] for part in parts},
        }

    def list_runs(self, body: b.Page) -> Facts:
        runs, cursor = _page(body, self.checkpoints.runs())
        return {"training_runs": [*map(self.checkpoints.describe_run, runs)], "cursor": cursor}

    def get_run(self, body: b.OfRun) -> Facts:
        return self.checkpoints.describe_run(body.run)

    def list_of_run(self, body: b.OfRun) -> Facts:
        self.checkpoints.describe_run(body.run)
        return {"checkpoints": self.checkpoints.describe_all(body.run)}

    def list_checkpoints(self, body: b.Page) -> Facts:
        checkpoints, cursor = _page(body, self.checkpoints.describe_all())
        return {"checkpoints": checkpoints, "cursor": cursor}

    def delete_checkpoint(self, body: b.OfCheckpoint) -> Facts:
        self.checkpoints.delete(SavedPath.of(body.run, body.kind, body.name))
        return {}

    def publish(self, body: b.OfCheckpoint) -> Facts:
        return self._change(body, public=True)

    def unpublish(self, body: b.OfCheckpoint) -> Facts:
        return self._change(body, public=False)

    def set_ttl(self, body: b.OfCheckpoint) -> Facts:
        return self._change(body, expires_at=expiry(body.ttl_seconds))

    def _change(self, body: b.OfCheckpoint, **changes: Any) -> Facts:
        self.checkpoints.change(SavedPath.of(body.run, body.kind, body.name), **changes)
        return {}

    # ----------------------------------------------------------------------------- sampling

    def create_sampler(self, body: b.CreateSampler) -> Facts:
        session = self.sessions.find(body.session_id)
        name = f"{session.session_id}:sample:{body.sampling_session_seq_id}"

        def answer() -> Facts:
            if body.model_path is None:
                sampler = ServedSampler(name, BASE, self._role_of(body.base_model))
            else:
                path = SavedPath.parse(body.model_path)
                facts = self.checkpoints.facts(path)
                self._check_rank(facts["rank"], facts["role"])
                # a replaced checkpoint is a different state
                state = f"{path} of {facts['time']}"
                sampler = ServedSampler(name, state, facts["role"], path, str(path))
            session.samplers[name] = sampler
            return {"sampling_session_id": name}

        number = body.sampling_session_seq_id
        return session.sampler_repeats.answer(number, body.content, answer)

    def get_sampler(self, body: b.OfSampler) -> Facts:
        sampler = self.sessions.sampler(body.sampler_id)
        is_trained = sampler.role in self.verbs.trained
        base = self.verbs.trained[sampler.role].path if is_trained else sampler.role
        shown = sampler.shown_path
        return {"sampler_id": sampler.sampler_id, "base_model": base, "model_path": shown}

    def sample(self, body: b.SampleBody) -> Facts:
        sampler = self.sessions.sampler(body.sampling_session_id)
        sampler_id = sampler.sampler_id

        def answer() -> Facts:
            sampling = SampleRequest.of(body, sampler, self.desk.limits, self.desk.eos)
            sampling.promise = self.promises.new(sampler_id.partition(":")[0])
            self.desk.sample(sampling)
            names = [f"{sampler_id}:{body.seq_id}:{n}" for n in range(body.num_samples)]
            return {"request_id": sampling.promise.request_id, "sample_sequence_ids": names}

        return sampler.repeats.answer(body.seq_id, body.content, answer)

    async def not_supported(self, request: Request) -> Response:
        """Reject all other routes; a numbered request is counted as done."""
        self._skip_turn(_json_object(await _body(request)))
        route = f"{request.method} {request.url.path}"
        raise RequestError(f"this server does not support {route}.", 404)

    async def retrieve(self, request: Request) -> Response:
        """Wait for a result; after `HOLD_S` the client has to poll again."""
        poll = b.Retrieve.model_validate(_json_object(await _body(request)))
        promise = self.promises.find(poll.request_id)
        outcome = await promise.wait(HOLD_S)
        if outcome is None:
            again = {"type": "try_again", "request_id": promise.request_id, "queue_state": "active"}
            return JSONResponse(again)
        self.promises.was_read(promise)
        body, media_type = outcome
        return Response(body, media_type=media_type)


def _answering(facts: Facts) -> Handler:
    def answer(body: b.Body) -> Facts:
        return facts

    return answer


async def _body(request: Request) -> bytes:
    """Return the body; reject one that is too large."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > LARGEST_BODY:
            raise RequestError(f"the body exceeds {LARGEST_BODY} bytes; send smaller chunks.", 413)
        parts.append(part)
    return b"".join(parts)


def _json_object(body: bytes) -> Facts:
    try:
        value = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError(f"the body is a {type(value).__name__}, not a JSON object.")
    return value


def _page(body: b.Page, items: Sequence[Any]) -> tuple[Sequence[Any], Facts]:
    """Return a page of a list, and the cursor of that page."""
    cursor = {"offset": body.offset, "limit": body.limit, "total_count": len(items)}
    return items[body.offset : body.offset + body.limit], cursor
