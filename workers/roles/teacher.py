"""The teacher of on-policy distillation: a frozen model that scores the student's responses."""

from __future__ import annotations

from verl_like.batch.protocol import DataProto
from verl_like.calls.dispatch import register
from workers.columns import SEQUENCE_COLUMNS, Column, batch_columns
from workers.config import FrozenFSDPConfig, WorkersConfig, teacher_model
from workers.roles.actor import log_prob_temperature
from workers.roles.model_worker import TRAIN_DISPATCH, ModelWorker
from workers.training.engine import TrainEngine
from workers.training.microbatch import pass_budget
from workers.training.passes.lm_head import TokenOutputs
from workers.training.role_model_spec import RoleModelSpec


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
