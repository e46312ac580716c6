"""Conditions under which keys in several of the workers' sections are read.

A condition that only one section needs is next to its field. Functions in a condition get the key's
section and the whole configuration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl_like.config_key import ReadWhen, unless, when
from verl_like.registry import get_registry

ACTOR = "actor_rollout_ref.actor"


def _asks_for_validations(_: Any, run: Any) -> bool:
    return bool(run.trainer.val_before_train or run.trainer.test_freq >= 0)


def has_teacher(run: Any) -> bool:
    """True if the policy is distilled from a teacher; False in recipes without training."""
    distillation = getattr(run, "distillation", None)
    return distillation is not None and bool(distillation.teacher_model.model_path)


def has_only_teacher(run: Any) -> bool:
    """True if advantages come only from the teacher."""
    return has_teacher(run) and not run.distillation.use_task_rewards


def why_no_critic(run: Any) -> str:
    """Return the reason why a run without a critic has none."""
    if has_only_teacher(run):
        return "only the teacher provides advantages"
    return f"algorithm.adv_estimator={run.algorithm.adv_estimator} needs no value function"


def has_no_reward(run: Any) -> bool:
    """True if the section `reward` has no reward and, because of a teacher, needs none."""
    reward = run.reward
    return has_only_teacher(run) and not (
        reward.list or reward.function.path or reward.model.enable
    )


def is_bare_config(path: str) -> bool:
    """True for a folder with a model's config.json and without weights."""
    folder = Path(path).expanduser()
    weights = (*folder.glob("*.safetensors"), *folder.glob("*.bin"))
    return (folder / "config.json").is_file() and not weights


def may_read_images(path: str) -> bool:
    """True for the folder of a model with a vision tower, and for any name on the hub."""
    file = Path(path).expanduser() / "config.json"
    if file.is_file():
        return '"vision_config"' in file.read_text(encoding="utf-8")
    return "/" in path and not file.parent.parent.exists()


def policy_loss_of(run: Any) -> str:
    """Return the name of the policy loss: `loss_mode`, unless `bypass_mode` selects REINFORCE."""
    correction = run.algorithm.rollout_correction
    if correction.bypass_mode and correction.loss_type == "reinforce":
        return "reinforce"
    loss_mode: str = run.actor_rollout_ref.actor.policy_loss.loss_mode
    return loss_mode


def loss_reads(name: str) -> ReadWhen:
    """Return the condition that the policy loss reads this key of the actor.

    It also holds for a policy loss that does not declare which keys it reads.
    """

    def holds(_: Any, run: Any) -> bool:
        loss = get_registry("policy loss").look_up(policy_loss_of(run))
        traits = getattr(loss, "traits", None)
        keys = None if traits is None else traits.keys_read
        return keys is None or name in keys

    return ReadWhen(
        f"the policy loss reads `{name.rpartition('.')[2]}`",
        holds,
        "the loss of policy_loss.loss_mode does not read it",
    )


HAS_CRITIC = ReadWhen(
    "there is a critic",
    lambda _, run: "critic" in run.role_mapping,
    lambda run: f"this run has no critic, because {why_no_critic(run)}",
)
HAS_TEACHER = unless("distillation.teacher_model.model_path", "")
REWARDS_TEACH = ReadWhen(
    "the policy is trained on rewards",
    lambda _, run: not has_only_teacher(run),
    "distillation.use_task_rewards is false, so only the teacher provides advantages",
)
SPLIT_BY_TOKENS = when(f"{ACTOR}.use_dynamic_bsz")
SPLIT_BY_SAMPLES = when(f"{ACTOR}.use_dynamic_bsz", False)
VALIDATION_IS_ON = ReadWhen(
    "`trainer.test_freq` is 0 or more, or `trainer.val_before_train` is true",
    _asks_for_validations,
    "this run never validates. Set trainer.test_freq to 0 or more, or "
    "trainer.val_before_train=true",
)
VALIDATES = ReadWhen(
    "the run validates",
    lambda _, run: bool(run.data.val_files) and _asks_for_validations(_, run),
    "this run never validates. Set data.val_files, and trainer.test_freq to 0 or more or "
    "trainer.val_before_train=true",
)
NO_REWARD_LIST = ReadWhen(
    "`reward.list` is empty", lambda _, run: not run.reward.list, "reward.list sets the rewards"
)
SAVES = ReadWhen(
    "`trainer.save_freq` or `trainer.save_every_minutes` is set",
    lambda _, run: run.trainer.save_freq >= 0 or run.trainer.save_every_minutes is not None,
    "this run writes no checkpoints (trainer.save_freq=-1, trainer.save_every_minutes=null)",
)
VALIDATES_OR_SAVES = ReadWhen(
    "the run validates, or writes checkpoints",
    lambda section, run: VALIDATES.condition(section, run) or SAVES.condition(section, run),
    "this run neither validates nor writes checkpoints. Set data.val_files, or trainer.save_freq",
)
