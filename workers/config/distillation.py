"""On-policy distillation: a frozen teacher judges every token that the policy says."""

from __future__ import annotations

from dataclasses import dataclass

from verl_like.config_key import key
from workers.config.conditions import REWARDS_TEACH
from workers.config.model import FrozenModelConfig


@dataclass(kw_only=True)
class TeacherModelConfig(FrozenModelConfig):
    """The teacher; types, attention and packing are the actor's."""

    model_path: str = key("", allows="a folder or a name")
    """Folder of a model with the actor's tokenizer, or its name on the hub; empty: no teacher."""


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
