"""On-policy distillation: a frozen teacher judges every token that the policy says."""

from __future__ import annotations

from dataclasses import dataclass

from verl_like.config_key import key
from workers.config.conditions import CUT_BY_SAMPLES, REWARDS_TEACH
from workers.config.model import QUANTIZATIONS, FrozenFSDPConfig


@dataclass(kw_only=True)
class TeacherModelConfig:
    """The teacher; types, attention and packing are the actor's."""

    model_path: str = key("", allows="a folder or a name")
    """Folder of a model with the actor's tokenizer, or its name on the hub; empty: no teacher."""
    quantization: str | None = key(None, choices=QUANTIZATIONS)
    """int8: linear weights are held as int8, whole on every rank; null: as passes compute."""
    log_prob_micro_batch_size_per_gpu: int = key(
        8, above=0, read_when=CUT_BY_SAMPLES, may_change_on_resume=True
    )
    """Samples per forward pass on one rank."""
    fsdp_config: FrozenFSDPConfig = key(factory=FrozenFSDPConfig)
    """Sharding."""


@dataclass(kw_only=True)
class DistillationConfig:
    """The policy learns from a teacher: log p(teacher) - log p(policy) is a token's reward."""

    teacher_model: TeacherModelConfig = key(factory=TeacherModelConfig)
    """Teacher; starts the teacher role."""
    temperature: float | None = key(None, above=0, hint="or null for the rollout's")
    """Divides the teacher's logits; null takes the rollout's, which divides the student's."""
    gamma: float = key(0.0, at_least=0, at_most=1)
    """How much a token counts for each later one: 0 leaves every token its own reward, 1 minimises
    the KL of whole responses.
    """
    use_task_rewards: bool = key(False, verl="distillation.distillation_loss.use_task_rewards")
    """Learn from the rewards, too; else they are only logged, and none is needed."""
    coef: float = key(
        1.0,
        at_least=0,
        read_when=REWARDS_TEACH,
        verl="distillation.distillation_loss.distillation_loss_coef",
    )
    """Weight of the teacher's part beside the advantages of `algorithm.adv_estimator`."""
