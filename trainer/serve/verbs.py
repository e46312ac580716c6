"""Run requests on the worker groups, for one model's state at a time.

Only one thread at a time is inside `using`, and the actor has the state that this thread named. So
no request can see the weights, gradients or moments of another model.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from trainer.config.flat import flat_config
from trainer.serve.bodies import Facts
from trainer.serve.checkpoints import Checkpoints, SavedPath
from trainer.serve.promises import Repeats, Turns
from trainer.serve.rows import Datum, TrainingRows, pass_columns
from trainer.serve.wire import Array, training_output
from verl_like.batch.protocol import DataProto
from verl_like.batch.ragged import Ragged, rectangle_of
from verl_like.errors import ConfigError
from workers.losses.token_sums import TOKEN_SUMS
from workers.roles.served import MASK, OURS
from workers.training.optim import StepSettings
from workers.training.states import BASE
from workers.weights.sync import sync_weights

SPILLED = "snapshots"
"""Folder of a run with the snapshots that do not fit into memory."""


@dataclass
class ServedModel:
    """A client's model: the name of its state, its settings, and the order of its requests."""

    name: str
    rank: int
    seed: int | None = None
    frozen: tuple[str, ...] = ()
    user_metadata: Facts | None = None
    num_steps: int = 0
    failure: str = ""
    """The error of a `forward_backward` since the last step; the next step fails with it."""
    snapshots: list[str] = field(default_factory=list)
    """Names of the frozen copies in memory, the oldest first."""
    turns: Turns = field(default_factory=Turns)
    repeats: Repeats = field(default_factory=lambda: Repeats("seq_id"))

    def facts(self, base_model: str) -> Facts:
        """Return the entries of `checkpoint.json` and `run.json` for this model."""
        return {
            "base_model": base_model,
            "rank": self.rank,
            "frozen": list(self.frozen),
            "num_steps": self.num_steps,
        }


class Verbs:
    """Runs requests on the groups `actor` and `rollout`."""

    def __init__(self, config: Any, groups: Any, checkpoints: Checkpoints) -> None:
        self.config, self.checkpoints = config, checkpoints
        self.actor, self.rollout = groups["actor"], groups["rollout"]
        self.scorers = {role: groups[role] for role in groups if role not in ("actor", "rollout")}
        """The other roles that the configuration places: references, critics, reward models."""
        self.base_model: str = config.actor_rollout_ref.model.path
        self._lock = threading.RLock()
        self.states = {BASE}
        """Names of the states in the actor's memory."""
        self._synced: str | None = None
        self._version = 0

    @contextmanager
    def using(self, state: str) -> Iterator[None]:
        """Inside the block, the actor has this state, and no other thread uses the actor."""
        with self._lock:
            self.actor.use_state(state)
            yield

    def create(self, model: ServedModel) -> Facts:
        """Add a model that starts with the base weights."""
        with self._lock:
            self.actor.add_state(model.name, model.rank, model.seed, list(model.frozen))
            self.states.add(model.name)
        return {"model_id": model.name}

    def drop(self, state: str) -> None:
        """Delete a state."""
        with self._lock:
            if state in self.states:
                self.actor.drop_state(state)
                self.states.discard(state)
                shutil.rmtree(self.checkpoints.folder / state / SPILLED, ignore_errors=True)

    def forward(
        self, model: ServedModel, datums: Sequence[Datum], loss: str, settings: Mapping[str, Any]
    ) -> bytes:
        """Return log-probs and the loss, without gradients."""
        rows = TrainingRows.of(datums, loss, settings)
        with self.using(model.name):
            column = self.actor.forward(rows.batch, ("log_probs",)).column("log_probs")
        if loss not in TOKEN_SUMS:
            return training_output(rows.log_probs(column), {})
        columns = {name: rows.batch.padded(name) for name in rows.batch.columns}
        losses = TOKEN_SUMS[loss].of_tokens(rectangle_of(column), columns, settings)
        return training_output(rows.log_probs(column), {"loss:sum": float(losses.sum())})

    def forward_backward(
        self, model: ServedModel, datums: Sequence[Datum], loss: str, settings: Mapping[str, Any]
    ) -> bytes:
        """Add the gradients of a loss to the model's; after a failure the next step fails, too."""
        rows = TrainingRows.of(datums, loss, settings)
        counts = None
        if loss.startswith(OURS):
            inside = rows.batch.padded(MASK) != 0
            counts = {"num_rows": int(inside.any(dim=1).sum()), "num_tokens": int(inside.sum())}
        try:
            with self.using(model.name):
                result = self.actor.forward_backward(rows.batch, loss, counts)
        except Exception as error:
            self.fail_step(model, error)
            raise
        metrics = {}
        for name, values in result.metrics.items():
            reduction = "mean" if counts and name != "loss" else "sum"
            metrics[f"{name.replace(':', '_')}:{reduction}"] = float(values[0])
        return training_output(rows.log_probs(result.batch.column("log_probs")), metrics)

    def fail_step(self, model: ServedModel, error: Exception) -> None:
        """Clear the gradients, and let the next step fail with this error."""
        model.failure = f"{error}"
        with self.using(model.name):
            self.actor.clear_gradients()

    def optim_step(self, model: ServedModel, settings: StepSettings) -> Facts:
        """Take an optimizer step, unless a `forward_backward` before it failed."""
        with self.using(model.name):
            if model.failure:
                failure, model.failure = model.failure, ""
                self.actor.clear_gradients()
                raise ConfigError(
                    "no step was taken, and the gradients are cleared: a forward_backward before "
                    f"it failed: {failure}"
                )
            metrics = self.actor.optim_step(settings)[0]
        model.num_steps += 1
        return {"metrics": {name: float(value) for name, value in metrics.items()}}

    def save(
        self, model: ServedModel, path: SavedPath, user_metadata: Facts | None, ttl: int | None
    ) -> Facts:
        """Write a checkpoint of a model."""
        facts = {**model.facts(self.base_model), "user_metadata": user_metadata}
        self._write(model.name, model.rank, model.num_steps, path, facts, ttl)
        self.checkpoints.note_run(
            model.name, {**model.facts(self.base_model), "user_metadata": model.user_metadata}
        )
        return {"path": str(path)}

    def _write(
        self, state: str, rank: int, step: int, path: SavedPath, facts: Facts, ttl: int | None
    ) -> None:
        config = flat_config(self.config) | {"actor_rollout_ref.model.lora_rank": rank}
        contents = ["model", "optimizer"] if path.kind == "weights" else ["model"]

        def save(folder: str) -> None:
            with self.using(state):
                self.actor.save_checkpoint(folder, step, contents)

        self.checkpoints.write(path, step, save, config, facts, ttl)

    def load(self, model: ServedModel, path: SavedPath, with_optimizer: bool) -> Facts:
        """Load the weights of a checkpoint into a new model, with moments on request."""
        facts = self.checkpoints.facts(path)
        if path.kind != "weights" and with_optimizer:
            raise ConfigError(f"{path} has no optimizer state: it was saved for sampling.")
        with self._lock:
            if model.name not in self.states:
                model.rank, model.frozen = facts["rank"], tuple(facts["frozen"])
                self.create(model)
            self._read(model.name, model.rank, path, with_optimizer)
        model.num_steps = facts["num_steps"]
        return {"path": str(path), "model_id": model.name}

    def _read(self, state: str, rank: int, path: SavedPath, with_optimizer: bool) -> None:
        """Read a checkpoint of this server's base and of this rank into a state."""
        facts, base = self.checkpoints.facts(path), self.base_model
        if (facts["base_model"], facts["rank"]) != (base, rank):
            raise ConfigError(
                f"{path} has rank {facts['rank']} on {facts['base_model']}, and this model has "
                f"rank {rank} on {base}."
            )
        with self.using(state):
            self.actor.load_checkpoint(str(self.checkpoints.state_folder(path)))
            if not with_optimizer:
                self.actor.clear_gradients(forget_moments=True)

    def snapshot(self, model: ServedModel, name: str, most: int) -> None:
        """Copy the weights to a frozen state; only the newest `most` copies stay in memory."""
        with self._lock:
            self.actor.copy_state(model.name, name)
            self.states.add(name)
            model.snapshots.append(name)
            while len(model.snapshots) > most:
                oldest = model.snapshots.pop(0)
                facts = model.facts(self.base_model)
                path = self.spilled(model.name, oldest)
                self._write(oldest, model.rank, model.num_steps, path, facts, None)
                self.drop(oldest)

    def spilled(self, model: str, snapshot: str) -> SavedPath:
        """Return the path of a snapshot that is on disk."""
        return SavedPath(model, SPILLED, snapshot.rpartition(":")[2])

    def bring_back(self, state: str, path: SavedPath) -> None:
        """Load a state for sampling from its checkpoint if it is not in memory."""
        with self._lock:
            if state in self.states:
                return
            rank = self.checkpoints.facts(path)["rank"]
            self.create(ServedModel(state, rank))
            try:
                self._read(state, rank, path, with_optimizer=False)
            except Exception:
                self.drop(state)
                raise

    def send_to_rollout(self, state: str) -> None:
        """Send the weights of a state to the rollout if it has others."""
        with self._lock:
            if state == self._synced:
                return
            self._synced = None
            self._version += 1
            bucket = self.config.actor_rollout_ref.rollout.update_weights_bucket_megabytes
            with self.using(state):
                sync_weights(self.actor, self.rollout, self._version, bucket)
            self._synced = state

    def log_probs(
        self, state: str, rows: Sequence[tuple[Sequence[int], Sequence[int]]], role: str = "actor"
    ) -> list[Array]:
        """Return log-probs at temperature 1 for rows (tokens, targets).

        Target i is scored as the token after token i, also if the row has another token there.
        A critic returns values instead. A reward model returns a score per row, at its last token.
        """
        if not rows:
            return []
        ids, targets = ([torch.tensor(row[side]) for row in rows] for side in (0, 1))
        batch = DataProto.from_dict(pass_columns(ids, targets))
        if role == "actor":
            with self.using(state):
                results = self.actor.forward(batch, ("log_probs",))
        else:
            group = self.scorers[role]
            # in the actor's process, a reference uses the actor's weights
            shares = group.shares_processes_with(self.actor)
            with self.using(BASE) if shares else nullcontext():
                results = group.forward(batch)
        (column,) = (results.column(name) for name in results.columns)
        if isinstance(column, Ragged):
            return [row.numpy() for row in column.rows()]
        pairs = zip(rows, column.tolist(), strict=True)
        return [np.array([np.nan] * (len(targets) - 1) + [score]) for (_, targets), score in pairs]
