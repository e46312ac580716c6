"""Handlers of the requests that train, save and sample; `trainer.serve.app` has their routes.

The parameters of a handler are the fields of its request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainer.serve import bodies as b
from trainer.serve.bodies import JsonObject
from trainer.serve.checkpoints import SavedPath
from trainer.serve.clients import ClientSession, Sessions
from trainer.serve.pending import PendingResults, RequestError
from trainer.serve.sampling import SampleRequest, ServedSampler
from trainer.serve.training_ops import ServedModel, TrainingOps, path_of_snapshot
from trainer.serve.work_queue import WorkQueue
from workers.training.optim import OptimStepSettings
from workers.training.trained_states import BASE

ABANDONED_S = 120.0
"""A session without a request for this long gives its place to another; the SDK sends a heartbeat
every 10 s."""


@dataclass(frozen=True)
class TrainingHandlers:
    """Open models, train them, and save and load their weights."""

    work_queue: WorkQueue
    sessions: Sessions
    pending_results: PendingResults

    def create_model(
        self,
        session_id: str,
        model_seq_id: b.Int64,
        base_model: str,
        lora_config: b.LoraBody | None = None,
        optimizer_config: b.Optimizer | None = None,
        user_metadata: b.Metadata = None,
    ) -> JsonObject:
        role, lora = self.work_queue.role_of(base_model), lora_config or b.LoraBody()
        trains = {"mlp": lora.train_mlp, "attn": lora.train_attn, "unembed": lora.train_unembed}
        frozen = tuple(part for part, is_trained in trains.items() if not is_trained)
        name = f"{session_id}:train:{model_seq_id}"
        model = ServedModel(name, role, lora.rank, lora.seed, frozen, user_metadata)
        return self._open(session_id, model, lambda: self.work_queue.ops.create(model))

    def _open(
        self, session_id: str, model: ServedModel, work: Callable[[], JsonObject]
    ) -> JsonObject:
        """Open a model in a session; `work` creates its state."""
        check_rank(self.work_queue.ops, model.rank, model.role)
        session = self.sessions.find(session_id)
        if model.rank == 0:
            self._free_place(model.role)

        def opened() -> JsonObject:
            try:
                return work()
            except Exception:
                model.is_open = False
                raise

        session.models[model.name] = model
        pending = self.pending_results.new(session_id)
        self.work_queue.work(pending, opened)
        return {"request_id": pending.request_id}

    def _free_place(self, role: str) -> None:
        """End abandoned sessions that train all weights of a role; raise if one is in use."""
        for session in [*self.sessions.open.values()]:
            if not any(model.role == role and model.is_open for model in session.models.values()):
                continue
            if session not in self.sessions.silent_for(ABANDONED_S):
                raise RequestError(
                    f"this server trains all weights of the {role}, for one model at a time, and a "
                    "model is open. Try again when the session of that model has ended: such a "
                    f"session ends when it has sent no heartbeat for {ABANDONED_S:g} s and another "
                    "client wants its place."
                )
            self.end_session(session)

    def end_session(self, session: ClientSession) -> None:
        """Close a session, and drop its models and samplers."""
        del self.sessions.open[session.session_id]
        self.pending_results.end_session(session.session_id)
        states = {*session.models, *(sampler.state for sampler in session.samplers.values())}
        sessions = self.sessions.open.values()
        sampled = {sampler.state for other in sessions for sampler in other.samplers.values()}
        self.work_queue.drop(states - sampled - {BASE})

    def get_info(self, model_id: str) -> JsonObject:
        model = self.sessions.model(model_id)
        name = self.work_queue.ops.trained[model.role].model.path
        return {
            "type": "get_info",
            "model_id": model.name,
            "model_data": {"model_name": name, "tokenizer_id": name},
            "is_lora": model.rank > 0,
            "lora_rank": model.rank,
            "model_name": name,
        }

    def in_turn(
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
        seq_id: b.Positive,
        adam_params: b.Adam | None = None,
        optimizer_params: None = None,
    ) -> JsonObject:
        """Take an optimizer step with the accumulated gradients of a model."""
        model, adam = self.sessions.model(model_id), adam_params or b.Adam()
        settings = OptimStepSettings(
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            grad_clip=adam.grad_clip_norm or float("inf"),
            ends_update=False,
        )
        return self.in_turn(model, seq_id, lambda: self.work_queue.ops.optim_step(model, settings))

    def save_weights(self, body: b.Save) -> JsonObject:
        return self._save(body, "weights", bool(body.overwrite))

    def save_for_sampler(self, body: b.Save) -> JsonObject:
        """Save a named checkpoint, or a snapshot that is deleted with the session."""
        if body.sampling_session_seq_id is None:
            return self._save(body, "sampler_weights", True)
        model = self.sessions.model(body.model_id)
        session = self.sessions.find(body.model_id.partition(":")[0])
        name = f"{session.session_id}:sample:{body.sampling_session_seq_id}"
        path = path_of_snapshot(model, name)
        answer = self.in_turn(model, body.seq_id, lambda: self.work_queue.ops.snapshot(model, name))
        session.samplers[name] = ServedSampler(name, name, model.role, path)
        return answer

    def _save(self, body: b.Save, kind: str, may_replace: bool) -> JsonObject:
        model = self.sessions.model(body.model_id)
        path = SavedPath.of(model.name, kind, body.path or f"step-{model.num_steps}")

        def work() -> JsonObject:
            if not may_replace and self.work_queue.ops.checkpoints.find(path):
                raise RequestError(
                    f"the checkpoint {path} already exists. Set overwrite=true to replace it."
                )
            return self.work_queue.ops.save(model, path, body.user_metadata, body.ttl_seconds)

        return self.in_turn(model, body.seq_id, work)

    def load_weights(
        self,
        path: str,
        optimizer: bool = False,
        model_id: str | None = None,
        seq_id: b.Int64 | None = None,
        session_id: str = "",
        model_seq_id: b.Int64 = 0,
        base_model: str | None = None,
        user_metadata: b.Metadata = None,
    ) -> JsonObject:
        """Load a checkpoint into a new model of a session, or as the first request of a model."""
        saved = SavedPath.parse(path)
        metadata = self.work_queue.ops.checkpoints.metadata(saved)
        if model_id is not None:
            model = self.sessions.model(model_id)
            if seq_id != 1:
                raise RequestError(
                    "load_weights must be the first request of a model. Create a new training "
                    "client from the checkpoint."
                )
            return self.in_turn(model, 1, lambda: self.work_queue.ops.load(model, saved, optimizer))
        role, rank, frozen = metadata["role"], metadata["rank"], metadata["frozen"]
        if base_model not in (None, metadata["base_model"], role):
            self.work_queue.role_of(base_model)
        name = f"{session_id}:train:{model_seq_id}"
        model = ServedModel(name, role, rank, None, frozen, user_metadata)
        work = lambda: self.work_queue.ops.load(model, saved, optimizer)  # noqa: E731
        return self._open(session_id, model, work)


@dataclass(frozen=True)
class SamplingHandlers:
    """Open samplers, and sample with them."""

    work_queue: WorkQueue
    sessions: Sessions
    pending_results: PendingResults

    def create(
        self,
        session_id: str,
        sampling_session_seq_id: b.Int64,
        base_model: str | None = None,
        model_path: str | None = None,
    ) -> JsonObject:
        """Create a sampling session of a base model or of saved weights."""
        session = self.sessions.find(session_id)
        name = f"{session_id}:sample:{sampling_session_seq_id}"
        if model_path is None:
            sampler = ServedSampler(name, BASE, self.work_queue.role_of(base_model))
        else:
            path = SavedPath.parse(model_path)
            metadata = self.work_queue.ops.checkpoints.metadata(path)
            check_rank(self.work_queue.ops, metadata["rank"], metadata["role"])
            # the time tells apart checkpoints that replace each other under one path
            state = f"{path} of {metadata['time']}"
            sampler = ServedSampler(name, state, metadata["role"], path, str(path))
        session.samplers[name] = sampler
        return {"sampling_session_id": name}

    def describe(self, sampler_id: str) -> JsonObject:
        sampler = self.sessions.sampler(sampler_id)
        is_trained = sampler.role in self.work_queue.ops.trained
        base = self.work_queue.ops.trained[sampler.role].model.path if is_trained else sampler.role
        return {"sampler_id": sampler_id, "base_model": base, "model_path": sampler.shown_path}

    def sample(self, body: b.SampleBody) -> JsonObject:
        sampler = self.sessions.sampler(body.sampling_session_id)
        sampling = SampleRequest.of(body, sampler, self.work_queue.limits, self.work_queue.eos)
        sampling.pending = self.pending_results.new(sampler.sampler_id)
        self.work_queue.sample(sampling)
        names = [f"{sampler.sampler_id}:{body.seq_id}:{n}" for n in range(body.num_samples)]
        return {"request_id": sampling.pending.request_id, "sample_sequence_ids": names}


def check_rank(ops: TrainingOps, rank: int, role: str) -> None:
    """Reject a role that is not trained, or a rank that the server does not support."""
    if role not in ops.trained:
        names = " and ".join(f"the {name}" for name in ops.trained)
        raise RequestError(f"this server trains {names}, not the {role}.")
    trained = ops.trained[role]
    if (rank == 0) != (trained.model.lora_rank == 0):
        kind, remedy = "all weights", "rank=0"
        if trained.model.lora_rank:
            kind, remedy = "adapters", "a rank above 0"
        raise RequestError(
            f"this server trains {kind} of the {role}, but the request has rank={rank}. Use "
            f"{remedy}, or start the server with {trained.key}.lora_rank={rank}."
        )
