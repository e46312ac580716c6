"""Conditions under which keys of the workers' sections are read: the `read_when` of their fields.

Each takes the section that the key stands in and the whole configuration.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_like.config_key import When
from verl_like.registry import registry_of


def _actor(run: Any) -> Any:
    return run.actor_rollout_ref.actor


def _has_reference(_: Any, run: Any) -> bool:
    return bool(run.algorithm.use_kl_in_reward or _actor(run).use_kl_loss)


def _validates(_: Any, run: Any) -> bool:
    asked_for = run.trainer.val_before_train or run.trainer.test_freq > 0
    return bool(run.data.val_files) and asked_for


def has_teacher(run: Any) -> bool:
    """Whether the policy is distilled from a teacher; in recipes without training it cannot be."""
    distillation = getattr(run, "distillation", None)
    return distillation is not None and bool(distillation.teacher_model.model_path)


def teacher_is_alone(run: Any) -> bool:
    """Whether advantages are the teacher's part alone."""
    return has_teacher(run) and not run.distillation.use_task_rewards


def has_no_reward(run: Any) -> bool:
    """Whether none is named, nor one by each row's data_source needed."""
    custom, model = run.custom_reward_function, run.reward_model
    return teacher_is_alone(run) and not (run.rewards or custom.path or model.enable)


def _rules_score(_: Any, run: Any) -> bool:
    if has_no_reward(run):
        return False
    model_alone = run.reward_model.enable and run.reward_model.rule_weight == 0
    return not model_alone or bool(run.custom_reward_function.path)


def _rollout_is_apart(_: Any, run: Any) -> bool:
    from verl_like.placement.roles import expand_roles

    pools = expand_roles(run.role_mapping)
    return "actor" in pools and pools["actor"] != pools["rollout"]


def is_bare_config(path: str) -> bool:
    """Whether it is a folder with a model's config.json and without weights."""
    folder = Path(path).expanduser()
    weights = (*folder.glob("*.safetensors"), *folder.glob("*.bin"))
    return (folder / "config.json").is_file() and not weights


def policy_loss_of(run: Any) -> str:
    """The policy loss by name; a REINFORCE bypass has its own, whatever `loss_mode` says."""
    correction = run.algorithm.rollout_correction
    if correction.bypass_mode and correction.loss_type == "reinforce":
        return "reinforce"
    loss_mode: str = _actor(run).policy_loss.loss_mode
    return loss_mode


def loss_reads(name: str) -> Callable[[Any, Any], bool]:
    """Whether the policy loss reads that key of the actor's section; one of the user's may."""

    def holds(_: Any, run: Any) -> bool:
        loss = registry_of("policy loss").look_up(policy_loss_of(run))
        keys = getattr(loss, "keys_read", None)
        return keys is None or name in keys

    return holds


def optimizer_takes(name: str) -> When:
    """The optimizer's constructor has a parameter of that name."""

    def holds(optim: Any, _: Any) -> bool:
        optimizer = registry_of("optimizer").look_up(optim.optimizer)
        return name in inspect.signature(optimizer).parameters

    return When(f"the optimizer takes `{name}`", holds, "the optimizer does not take it")


def schedule_takes(name: str) -> When:
    """The learning-rate schedule has a parameter of that name."""

    def holds(optim: Any, _: Any) -> bool:
        schedule = registry_of("learning-rate schedule").look_up(optim.lr_scheduler_type)
        return name in inspect.signature(schedule).parameters

    return When(
        f"the schedule takes `{name}`",
        holds,
        "the schedule of lr_scheduler_type does not take it",
    )


def section_has(name: str) -> When:
    """The key `name` of the same section is set."""
    return When(
        f"`{name}` is set", lambda section, _: bool(getattr(section, name)), f"there is no {name}"
    )


HAS_CRITIC = When(
    "there is a critic",
    lambda _, run: "critic" in run.role_mapping,
    "this run has no critic: algorithm.adv_estimator takes no values",
)
VALUE_IS_CLIPPED = When(
    "`value_loss` is clipped",
    lambda critic, _: critic.value_loss == "clipped",
    "critic.value_loss=huber clips nothing",
)
VALUE_IS_HUBER = When(
    "`value_loss` is huber",
    lambda critic, _: critic.value_loss == "huber",
    "critic.value_loss is not huber",
)
CRITIC_HAS_DIVISOR = When(
    "the critic's aggregation is seq-mean-token-sum-norm",
    lambda critic, run: (
        (critic.loss_agg_mode or _actor(run).loss_agg_mode) == "seq-mean-token-sum-norm"
    ),
    "the critic's losses are not aggregated by seq-mean-token-sum-norm",
)
HAS_REFERENCE = When(
    "there is a reference",
    _has_reference,
    "this run has no reference: set algorithm.use_kl_in_reward or "
    "actor_rollout_ref.actor.use_kl_loss",
)
UPDATES_REFERENCE = When(
    "`update_every` is set",
    lambda ref, _: ref.update_every is not None,
    "ref.update_every is not set: the reference stands still",
)
HAS_PTX = When(
    "there are `ptx.train_files`",
    lambda _, run: bool(run.ptx.train_files),
    "there are no ptx.train_files",
)
HAS_TEACHER = When(
    "there is a teacher",
    lambda _, run: has_teacher(run),
    "there is no distillation.teacher_model.model_path",
)
REWARDS_TEACH = When(
    "rewards are learned from",
    lambda _, run: not teacher_is_alone(run),
    "distillation.use_task_rewards is false: the teacher alone gives the advantages",
)
HAS_NO_WEIGHTS = When(
    "the folder of `path` has no weights",
    lambda model, _: is_bare_config(model.path),
    "the folder of model.path has weights, or is not there",
)
HAS_LORA = When("`lora_rank` > 0", lambda model, _: model.lora_rank > 0, "model.lora_rank is 0")

WARMS_UP_BY_SHARE = When(
    "`lr_warmup_steps` is -1",
    lambda optim, _: optim.lr_warmup_steps == -1,
    "lr_warmup_steps is not -1, and counts the calls itself",
)

SEVERAL_PASSES = When(
    "`ppo_epochs` > 1, the actor's or the critic's",
    lambda actor, run: max(actor.ppo_epochs, run.critic.ppo_epochs or 1) > 1,
    "an update passes over the batch once (ppo_epochs=1), so there is no later pass to reshuffle",
)
SHUFFLES = When("`shuffle`", lambda actor, _: actor.shuffle, "actor.shuffle is false")
HAS_ENTROPY_BONUS = When(
    "`entropy_coeff` > 0",
    lambda actor, _: actor.entropy_coeff > 0,
    "actor.entropy_coeff is not above 0: it is the first weight of the bonus",
)
STEERS_ENTROPY = When(
    "`target_entropy` is set",
    lambda actor, _: actor.target_entropy is not None,
    "actor.target_entropy is not set",
)
ONE_CLIP_RATIO = When(
    "`clip_ratio_low` or `clip_ratio_high` is null",
    lambda actor, _: actor.clip_ratio_low is None or actor.clip_ratio_high is None,
    "clip_ratio_low and clip_ratio_high are both set and replace it",
)
LOSS_CLIPS = When(
    "the policy loss clips a ratio",
    loss_reads("clip_ratio"),
    "the loss of policy_loss.loss_mode clips no ratio",
)
LOSS_CLIPS_TWICE = When(
    "the policy loss has a dual clip",
    loss_reads("clip_ratio_c"),
    "the loss of policy_loss.loss_mode has no dual clip; vanilla has one",
)
LOSS_HAS_DIVISOR = When(
    "`loss_agg_mode` is seq-mean-token-sum-norm",
    lambda actor, _: actor.loss_agg_mode == "seq-mean-token-sum-norm",
    "only loss_agg_mode=seq-mean-token-sum-norm reads it",
)
USES_KL_LOSS = When(
    "`use_kl_loss`", lambda actor, _: actor.use_kl_loss, "actor.use_kl_loss is false"
)
WEIGHS_ROLLOUT = When(
    "`rollout_is` is set",
    lambda correction, _: correction.rollout_is is not None,
    "algorithm.rollout_correction.rollout_is is not set",
)

REJECTS = When(
    "`rollout_rs` is set",
    lambda correction, _: correction.rollout_rs is not None,
    "algorithm.rollout_correction.rollout_rs is not set",
)
BYPASSES = When(
    "`bypass_mode`",
    lambda correction, _: correction.bypass_mode,
    "algorithm.rollout_correction.bypass_mode is false",
)
LOSS_IS_NAMED = When(
    "no `bypass_mode` of loss_type reinforce",
    lambda policy_loss, run: policy_loss_of(run) == policy_loss.loss_mode,
    "algorithm.rollout_correction.loss_type=reinforce is the loss under bypass_mode",
)

CUT_BY_TOKENS = When(
    "`actor.use_dynamic_bsz`",
    lambda _, run: _actor(run).use_dynamic_bsz,
    "actor.use_dynamic_bsz is false",
)
CUT_BY_SAMPLES = When(
    "not `actor.use_dynamic_bsz`",
    lambda _, run: not _actor(run).use_dynamic_bsz,
    "actor.use_dynamic_bsz cuts batches by ppo_max_token_len_per_gpu",
)

ENGINE_IS_VLLM = When(
    "`name` is vllm", lambda rollout, _: rollout.name == "vllm", "only rollout.name=vllm reads it"
)
ENGINE_IS_NOT_VLLM = When(
    "`name` is not vllm",
    lambda rollout, _: rollout.name != "vllm",
    "rollout.name=vllm quantises by rollout.engine_kwargs.quantization",
)
ENGINE_IS_NOT_HF = When(
    "`name` is not hf", lambda rollout, _: rollout.name != "hf", "rollout.name=hf does not read it"
)
WEIGHTS_COME_AT_ONCE = When(
    "`detached.new_weights` is at_once",
    lambda _, run: hasattr(run, "detached") and run.detached.new_weights == "at_once",
    "weights arrive between two generations: verl-like detached reads it, with "
    "detached.new_weights=at_once",
)
ROLLOUT_SAMPLES = When(
    "`do_sample`",
    lambda rollout, _: rollout.do_sample,
    "rollout.do_sample=false decodes greedily",
)
ROLLOUT_IS_APART = When(
    "actor and rollout are on two pools",
    _rollout_is_apart,
    "actor and rollout share their processes: weights do not travel in pieces",
)
SAMPLES_BESIDE = When(
    "samples are made beside the training",
    lambda _, run: hasattr(run, "detached"),
    "samples are made before they are trained on: this is for detached runs",
)
VALIDATES = When(
    "the run validates",
    _validates,
    "this run never validates: set data.val_files, and trainer.test_freq or "
    "trainer.val_before_train",
)
VALIDATION_SAMPLES = When(
    "`do_sample`",
    lambda sampling, _: sampling.do_sample,
    "val_kwargs.do_sample=false decodes greedily",
)

NO_REWARD_LIST = When(
    "`rewards` is empty", lambda _, run: not run.rewards, "the list `rewards` says what scores"
)
HAS_REWARD_MODEL = When(
    "`enable`", lambda rewards, _: rewards.enable, "reward_model.enable is false"
)
RULES_SCORE = When(
    "a rule scores",
    _rules_score,
    "no rule scores: reward_model.rule_weight=0 leaves the score to the model, or a teacher alone "
    "gives the advantages",
)
PUNISHES_LENGTH = When("`enable`", lambda buffer, _: buffer.enable, "its enable is false")

SAVE_EVERY_MINUTES = 30.0
"""Default of `trainer.save_every_minutes`: so much work can be lost where nobody has asked."""
SAVES = When(
    "`trainer.save_freq` > 0, or `trainer.save_every_minutes` set",
    lambda _, run: (
        run.trainer.save_freq > 0
        or run.trainer.save_every_minutes not in (None, SAVE_EVERY_MINUTES)
    ),
    "no checkpoints are asked for by trainer.save_freq or trainer.save_every_minutes",
)
"""Those that the default writes for safety are what the defaults of such keys say."""
