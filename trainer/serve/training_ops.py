"""Run requests on the worker groups, with one model's state at a time.

Only one thread at a time is inside `using`, where the role's workers have the state that this
thread named. So no request can see the weights, gradients or moments of another model.
"""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch

from trainer.config.keys import flat_config
from trainer.groups.worker_groups import worker_class
from trainer.serve.bodies import Array, JsonObject, training_output
from trainer.serve.checkpoints import SPILLED, SavedPath, ServedCheckpoints, expiry
from trainer.serve.pending import RequestOrder
from trainer.serve.rows import Datum, RequestLoss, batch_of, datum_values
from verl_like.batch.protocol import DataProto
from verl_like.batch.ragged import RaggedTensor
from verl_like.errors import ConfigError
from workers.losses.token_sums import TokenSum
from workers.roles.served import MASK, TrainsStates
from workers.training.optim import OptimStepSettings
from workers.training.trained_states import BASE
from workers.weights.sync import sync_weights

ADAPTERS_IN_MEMORY, MODELS_IN_MEMORY = 16, 2
"""How many frozen snapshots of a model stay in memory: of adapters, of whole models."""


@dataclass
class ServedModel:
    """A client's model: the name of its state, its settings, and the order of its requests."""

    name: str
    role: str
    rank: int
    seed: int | None = None
    frozen: Sequence[str] = ()
    user_metadata: JsonObject | None = None
    num_steps: int = 0
    is_open: bool = True
    """False if it could not be created or loaded."""
    failure: str = ""
    """Error of a `forward_backward` since the last optimizer step; the next step fails with it."""
    snapshots: list[str] = field(default_factory=list)
    """Names of the frozen copies in memory, the oldest first."""
    turns: RequestOrder = field(default_factory=RequestOrder)

    def metadata(self, base_model: str) -> JsonObject:
        """Return the entries of `checkpoint.json` and `run.json` for this model."""
        return {
            "base_model": base_model,
            "role": self.role,
            "rank": self.rank,
            "frozen": list(self.frozen),
            "num_steps": self.num_steps,
        }


@dataclass(frozen=True)
class TrainedRole:
    """A role whose model clients can train."""

    group: Any
    key: str
    """The section of its model in the configuration."""
    model: Any
    """That section; with `lora_rank=0`, all weights are trained."""
    output: str
    """The column that a forward pass computes."""
    field: str
    """The name of that column in a client's result."""


class TrainingOps:
    """Runs requests on the worker groups."""

    def __init__(self, config: Any, groups: Any, checkpoints: ServedCheckpoints) -> None:
        self.config, self.checkpoints = config, checkpoints
        self.actor, self.rollout = groups["actor"], groups["rollout"]
        self.scorers = {role: groups[role] for role in groups if role not in ("actor", "rollout")}
        """The other roles in the configuration: references, critics, reward models."""
        policy, critic = config.actor_rollout_ref.model, config.critic.model
        actor = TrainedRole(self.actor, "actor_rollout_ref.model", policy, "log_probs", "logprobs")
        self.trained = {"actor": actor}
        if "critic" in groups and issubclass(worker_class(config, "critic"), TrainsStates):
            self.trained["critic"] = TrainedRole(
                groups["critic"], "critic.model", critic, "values", "values"
            )
        self._lock = threading.RLock()
        self.states: dict[str, str] = {}
        """Maps the name of a state in memory to the role that it belongs to."""
        self._synced: str | None = None
        self._versions = count(1)

    @contextmanager
    def using(self, state: str, role: str) -> Iterator[Any]:
        """Context in which a role's group has this state, and no other thread can use it."""
        with self._lock:
            group = self.trained[role].group
            group.use_state(state)
            yield group

    def create(self, model: ServedModel) -> JsonObject:
        """Add a model that starts from the base weights."""
        with self._lock:
            group = self.trained[model.role].group
            group.add_state(model.name, model.rank, model.seed, list(model.frozen))
            self.states[model.name] = model.role
        return {"model_id": model.name}

    def drop(self, states: Iterable[str]) -> None:
        """Delete states from memory, and with a model's state its snapshots on disk."""
        with self._lock:
            for state in self.states.keys() & states:
                self.trained[self.states.pop(state)].group.drop_state(state)
                shutil.rmtree(self.checkpoints.folder / state / SPILLED, ignore_errors=True)

    def forward(self, model: ServedModel, datums: Sequence[Datum], loss: RequestLoss) -> bytes:
        """Return log-probs or values, and the loss if it is a sum over tokens."""
        batch = batch_of(datums, loss)
        column = self._outputs(model.name, model.role, batch)
        metrics = {}
        if isinstance(loss.inputs, TokenSum):
            columns = {name: batch.padded(name) for name in batch.columns}
            losses = loss.inputs.of_tokens(column.padded(), columns, loss.settings)
            metrics["loss:sum"] = float(losses.sum())
        field = self.trained[model.role].field
        return training_output(field, datum_values(datums, column), metrics)

    def forward_backward(
        self, model: ServedModel, datums: Sequence[Datum], loss: RequestLoss
    ) -> bytes:
        """Add the gradients of a loss to the model's gradients."""
        batch, trained = batch_of(datums, loss), self.trained[model.role]
        counts = None
        if not isinstance(loss.inputs, TokenSum):
            inside = batch.padded(MASK) != 0
            counts = {"num_rows": int(inside.any(dim=1).sum()), "num_tokens": int(inside.sum())}
        with self.using(model.name, model.role) as group:
            result = group.forward_backward(batch, loss.name, counts)
        metrics = {}
        for name, values in result.metrics.items():
            reduction = "mean" if counts and name != "loss" else "sum"
            metrics[f"{name.replace(':', '_')}:{reduction}"] = float(values[0])
        outputs = datum_values(datums, result.batch.column(trained.output))
        return training_output(trained.field, outputs, metrics)

    def optim_step(self, model: ServedModel, settings: OptimStepSettings) -> JsonObject:
        """Take an optimizer step; raise if a `forward_backward` since the last step failed."""
        with self.using(model.name, model.role) as group:
            if model.failure:
                failure, model.failure = model.failure, ""
                group.clear_gradients()
                raise ConfigError(
                    "no optimizer step was run, and the gradients are cleared, because an earlier "
                    f"forward_backward failed: {failure}"
                )
            metrics = group.optim_step(settings)[0]
        model.num_steps += 1
        numbers = {name: float(value) for name, value in metrics.items()}
        # JSON has no NaN and no infinity; the SDK reads the words "nan" and "inf" as numbers
        return {"metrics": {n: v if math.isfinite(v) else f"{v}" for n, v in numbers.items()}}

    def save(
        self, model: ServedModel, path: SavedPath, user_metadata: JsonObject | None, ttl: int | None
    ) -> JsonObject:
        """Write a checkpoint of a model."""
        self._write(model, model.name, path, user_metadata=user_metadata, expires_at=expiry(ttl))
        metadata = model.metadata(self.trained[model.role].model.path)
        self.checkpoints.note_run(model.name, {**metadata, "user_metadata": model.user_metadata})
        return {"path": str(path)}

    def _write(self, model: ServedModel, state: str, path: SavedPath, **entries: Any) -> None:
        """Write a checkpoint of a model's state, with these entries in `checkpoint.json`."""
        trained, step = self.trained[model.role], model.num_steps
        config = flat_config(self.config) | {f"{trained.key}.lora_rank": model.rank}
        contents = ["model", "optimizer"] if path.kind == "weights" else ["model"]
        metadata = model.metadata(trained.model.path) | entries
        with (
            self.checkpoints.writing(path, step, config, metadata) as folder,
            self.using(state, model.role) as group,
        ):
            group.save_checkpoint(str(folder / model.role), step, contents)

    def load(self, model: ServedModel, path: SavedPath, with_optimizer: bool) -> JsonObject:
        """Load a checkpoint's weights into a model, and its optimizer state on request.

        A model without a state gets one. Its role, base model and rank must equal those of the
        checkpoint.
        """
        metadata, base = self.checkpoints.metadata(path), self.trained[model.role].model.path
        if path.kind != "weights" and with_optimizer:
            raise ConfigError(f"{path} has no optimizer state: it was saved for sampling.")
        saved = metadata["role"], metadata["rank"], metadata["base_model"]
        if saved != (model.role, model.rank, base):
            raise ConfigError(
                f"{path} was saved by the role {saved[0]} with LoRA rank {saved[1]} on {saved[2]}, "
                f"but this model is the role {model.role} with LoRA rank {model.rank} on {base}."
            )
        (folder,) = self.checkpoints.place(path).glob("global_step_*")
        with self._lock:
            is_new = model.name not in self.states
            if is_new:
                self.create(model)
            try:
                with self.using(model.name, model.role) as group:
                    group.load_checkpoint(str(folder / model.role))
                    if not with_optimizer:
                        group.clear_gradients(forget_moments=True)
            except Exception:
                if is_new:
                    self.drop([model.name])
                raise
        model.num_steps = metadata["num_steps"]
        return {"path": str(path), "model_id": model.name}

    def snapshot(self, model: ServedModel, name: str) -> JsonObject:
        """Copy the weights to a frozen state; the oldest copies beyond a limit move to disk."""
        most = ADAPTERS_IN_MEMORY if model.rank else MODELS_IN_MEMORY
        with self._lock:
            self.trained[model.role].group.copy_state(model.name, name)
            self.states[name] = model.role
            model.snapshots.append(name)
            while len(model.snapshots) > most:
                oldest = model.snapshots.pop(0)
                self._write(model, oldest, path_of_snapshot(model, oldest))
                self.drop([oldest])
        return {"sampling_session_id": name}

    def restore_state(self, state: str, path: SavedPath) -> None:
        """Load a sampler's state from its checkpoint unless it is in memory."""
        with self._lock:
            if state not in self.states:
                metadata = self.checkpoints.metadata(path)
                self.load(ServedModel(state, metadata["role"], metadata["rank"]), path, False)

    def send_to_rollout(self, state: str) -> None:
        """Send the weights of a state to the rollout unless it has them already."""
        with self._lock:
            if state == self._synced:
                return
            self._synced = None
            bucket = self.config.actor_rollout_ref.rollout.update_weights_bucket_megabytes
            with self.using(state, "actor"):
                sync_weights(self.actor, self.rollout, next(self._versions), bucket)
            self._synced = state

    def score(self, state: str, role: str, datums: Sequence[Datum]) -> list[Array]:
        """Return log-probs at temperature 1, a critic's values, or a reward model's scores.

        Target i is scored as the token after token i, even if the row has another token there. A
        reward model gives one score per row, at the last token, and NaN at other tokens.
        """
        return datum_values(datums, self._outputs(state, role, batch_of(datums))) if datums else []

    def top_tokens(self, state: str, role: str, datum: Datum, k: int) -> tuple[Array, Array]:
        """Return the ids and log-probs of the `k` likeliest tokens after each token, [N, k]."""
        columns: dict[str, Any] = self._forward(state, role, batch_of([datum]), k).columns
        names = [[f"top_{part}_{rank}" for rank in range(k)] for part in ("tokens", "log_probs")]
        if names[0][0] not in columns:
            raise ConfigError(f"the role {role} has no likeliest tokens: it computes no log-probs.")
        ids, log_probs = (
            np.stack([datum_values([datum], columns[name])[0] for name in part], axis=1)
            for part in names
        )
        return ids, log_probs

    def _forward(self, state: str, role: str, batch: DataProto, top_k: int = 0) -> DataProto:
        """Run a forward pass of a role."""
        options = {"top_k": top_k} if top_k else {}
        if role in self.trained:
            with self.using(state, role) as group:
                results: DataProto = group.forward(batch, **options)
            return results
        group = self.scorers[role]
        # a reference in the actor's process uses the actor's weights
        shares = group.shares_processes_with(self.actor)
        with self.using(BASE, "actor") if shares else nullcontext():
            results = group.forward(batch, **options)
        return results

    def _outputs(self, state: str, role: str, batch: DataProto) -> RaggedTensor:
        """Return the column that a role computes for a batch."""
        (column,) = self._forward(state, role, batch).columns.values()
        if isinstance(column, RaggedTensor):
            return column
        scored: Any = batch.column("responses")
        values = torch.full(scored.values.shape, torch.nan)
        values[scored.lengths.cumsum(0) - 1] = column.float()
        by_token: RaggedTensor = scored.with_values(values)
        return by_token


def path_of_snapshot(model: ServedModel, name: str) -> SavedPath:
    """Return the path of a snapshot that does not stay in memory."""
    return SavedPath(model.name, SPILLED, name.rpartition(":")[2])
