"""Models that score the policy's samples token by token: the reference, and a teacher.

The reference is the actor's initial policy or another model, frozen or following the actor. The
teacher of on-policy distillation is frozen.

In the process of an actor that trains LoRA adapters, the reference is the actor's module without
adapters, and loads nothing, unless it has its own model folder. With `ref.update_every`, the driver
sends it the actor's weights from time to time, as it does to a rollout, and checkpoints contain
its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from verl_like.batch.protocol import DataProto
from verl_like.calls.dispatch import Dispatch, register
from verl_like.errors import CheckpointError
from workers.columns import SEQUENCE_COLUMNS, Column, batch_columns
from workers.config import (
    FrozenFSDPConfig,
    RefConfig,
    WorkersConfig,
    is_actors_module,
    reference_model,
    teacher_model,
)
from workers.roles.actor import log_prob_temperature
from workers.roles.model_worker import ENGINE_DISPATCH, TRAIN_DISPATCH, ModelWorker
from workers.training.checkpoints.calls import BackgroundSaves
from workers.training.engine import TrainEngine
from workers.training.microbatch import pass_budget
from workers.training.passes.lm_head import TokenOutputs
from workers.training.role_model_spec import RoleModelSpec
from workers.weights.sync import SyncReport
from workers.weights.transfer import WeightReceiver


class ReferenceWorker(BackgroundSaves, WeightReceiver, ModelWorker):
    """Computes log-probs of responses under the reference's weights."""

    engine: Any
    is_frozen = True

    def __init__(self, config: WorkersConfig) -> None:
        super().__init__()
        policy = config.actor_rollout_ref
        self.config: RefConfig = policy.ref
        self.temperature = log_prob_temperature(policy.rollout)
        self.budget = pass_budget(config, self.config.log_prob_micro_batch_size_per_gpu)
        self.follows = self.config.update_every is not None
        model = self.role_model(config)
        if self.follows:
            from workers.training.moving_average import MovingAverageTrainEngine

            self.engine = MovingAverageTrainEngine(model, decay=self.config.ema_decay)
        else:
            self.engine = TrainEngine(model)
        self.split_calls_by(self.engine)

    @classmethod
    def role_model(cls, config: WorkersConfig, role: str = "ref") -> RoleModelSpec:
        """Describe the reference's model: the initial policy, or another model."""
        policy, ref = config.actor_rollout_ref, config.actor_rollout_ref.ref
        follows = ref.update_every is not None
        is_apart = ref.model.path is not None
        base_quantization = None if is_apart else policy.model.quantization
        return RoleModelSpec(
            "actor_rollout_ref.ref.model.path" if is_apart else "actor_rollout_ref.model.path",
            reference_model(policy),
            FrozenFSDPConfig(**ref.fsdp_config),
            policy.actor.strategy,
            quantization=ref.quantization or base_quantization,
            has_average=follows and ref.ema_decay > 0,
            saved=("model",) if follows else (),
            section="actor_rollout_ref.ref",
            rows=ref.log_prob_micro_batch_size_per_gpu,
            parallel=config.axes(ref.parallel),
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, total_steps: int = 0) -> None:
        """Load the model without an optimizer, or share the module of an actor with adapters.

        If the actor is in the same process, call this after the actor's `init_model`.
        """
        actor: Any = self.sibling("actor")
        if actor is not None and is_actors_module(actor.policy):
            self.engine = actor.engine
            self.split_calls_by(self.engine)
        else:
            self.engine.build(self)

    def without_adapter(self) -> AbstractContextManager[None]:
        """Context in which the actor's module computes without its adapter."""
        if self.engine.model_config.lora_rank == 0:
            return nullcontext()
        from workers.models.lora import adapter_off

        return adapter_off(self.engine.module)

    @register(dispatch_mode=TRAIN_DISPATCH, readonly=True)
    @batch_columns(reads=SEQUENCE_COLUMNS, scores=True)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Return `ref_log_prob` of the responses."""
        with self.without_adapter():
            outputs = self.engine.forward_rows(data, self.budget, TokenOutputs(self.temperature))
        return DataProto.from_dict({"ref_log_prob": outputs["log_probs"]})

    @register(dispatch_mode=ENGINE_DISPATCH, readonly=True)
    def forward(self, data: DataProto, outputs: Sequence[str] = (), top_k: int = 0) -> DataProto:
        """Return the columns `outputs`, computed with the reference's weights."""
        with self.without_adapter():
            return super().forward(data, outputs, top_k)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_weights(self, version: int) -> SyncReport:
        """Update the moving average with the weights of the actor in this process."""
        actor: Any = self.sibling("actor")
        assert actor is not None, "sync_weights sends weights to a reference in another process"
        self.engine.load_weights(actor.engine.named_full_tensors())
        self.engine.commit(version)
        return SyncReport()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, step: int = 0) -> None:
        """Save the random state, and the weights if the reference follows the actor."""
        super().save_checkpoint(path, step)
        if self.follows:
            self.engine.save(Path(path), self.copies)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Load the random state, and the weights if the reference follows the actor.

        In that case, the checkpoint of a frozen reference is rejected, because it has no weights.
        """
        super().load_checkpoint(path)
        if not self.follows:
            return
        if not any(Path(path).glob("*.safetensors")):
            raise CheckpointError(
                f"{path} holds no weights: the run that saved it did not update its reference. "
                "Leave out actor_rollout_ref.ref.update_every, or start a new run."
            )
        self.engine.load(Path(path))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights_checksum(self) -> str:
        """Return a hash of the full weights."""
        with self.without_adapter():
            checksum: str = self.engine.weights_checksum()
            return checksum


class TeacherWorker(ModelWorker):
    """Computes the teacher's log-probs of the student's response tokens."""

    is_frozen = True

    def __init__(self, config: WorkersConfig) -> None:
        super().__init__()
        policy = config.actor_rollout_ref
        self.temperature = log_prob_temperature(policy.rollout)
        self.budget = pass_budget(config, policy.rollout.log_prob_micro_batch_size_per_gpu)
        self.engine = TrainEngine(self.role_model(config))
        self.split_calls_by(self.engine)

    @classmethod
    def role_model(cls, config: WorkersConfig, role: str = "teacher") -> RoleModelSpec:
        """Describe the teacher's model, which is frozen."""
        teacher = config.distillation.teacher_model
        return RoleModelSpec(
            "distillation.teacher_model.model_path",
            teacher_model(config),
            FrozenFSDPConfig(**teacher.fsdp_config),
            config.actor_rollout_ref.actor.strategy,
            quantization=teacher.quantization,
            section="distillation.teacher_model",
            rows=config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu,
            parallel=config.axes(teacher.parallel),
        )

    @register(dispatch_mode=TRAIN_DISPATCH, readonly=True)
    @batch_columns(
        reads=SEQUENCE_COLUMNS,
        writes=[Column("teacher_log_prob", "[rows, R]", "float32", role="teacher")],
        scores=True,
    )
    def compute_teacher_log_prob(self, data: DataProto) -> DataProto:
        """Return `teacher_log_prob` of the responses."""
        outputs = self.engine.forward_rows(data, self.budget, TokenOutputs(self.temperature))
        return DataProto.from_dict({"teacher_log_prob": outputs["log_probs"]})
