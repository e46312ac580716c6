"""TRL's GRPO: batches, losses, advantages, rewards, the engine."""

from __future__ import annotations

from typing import Any

from trainer.migrate.translation import Translation
from trainer.migrate.trl.flags import ACTOR, ROLLOUT
from trainer.migrate.trl.given import GivenFields
from verl_like.errors import ConfigError

NO_BOUND = "1e9"
"""A ratio that none reaches."""
NO_LEAST = "1.0e-9"
"""A weight that none falls below."""
CORRECTION = (
    "vllm_importance_sampling_cap",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
)
LOSSES: dict[str, tuple[str, str]] = {
    "grpo": ("vanilla", "seq-mean-token-mean"),
    "bnpo": ("vanilla", "token-mean"),
    "dapo": ("vanilla", "token-mean"),
    "dr_grpo": ("vanilla", "seq-mean-token-sum-norm"),
    "cispo": ("cispo", "token-mean"),
    "luspo": ("luspo", "seq-mean-token-sum"),
    "sapo": ("sapo", "seq-mean-token-mean"),
}
"""`loss_type` -> the policy loss, and how token losses become one number."""


def grpo(fields: GivenFields, done: Translation) -> None:
    """All that several fields of `GRPOConfig` say together."""
    _sizes(fields, done)
    _loss(fields, done)
    _advantages(fields, done)
    _reference(fields, done)
    _rewards(fields, done)
    _engine(fields, done)


def _sizes(fields: GivenFields, done: Translation) -> None:
    """TRL counts completions of one process; here a step and an update count prompts."""
    group = fields.count("num_generations", 8)
    rows = fields.count("per_device_train_batch_size", 8) * fields.count("num_processes", 1)
    accumulated = fields.count("gradient_accumulation_steps", 1)
    update = rows * accumulated
    step = rows * fields.count("steps_per_generation", accumulated)
    step = fields.count("generation_batch_size", step)
    for name, size in (("an update's", update), ("a step's", step)):
        if size % group:
            raise ConfigError(
                f"{name} {size} completions are no whole number of prompts of num_generations="
                f"{group} completions. Take a multiple."
            )
    told = (
        f"per_device_train_batch_size, gradient_accumulation_steps: {update} completions an update"
    )
    settings: dict[str, Any] = {
        "data.train_batch_size": step // group,
        f"{ACTOR}.ppo_mini_batch_size": min(update, step) // group,
    }
    done.rename(told, [], settings)
    steps = fields.count("max_steps", -1)
    if steps > 0:
        updates = max(step // update, 1) * fields.count("num_iterations", 1)
        settings = {"trainer.total_training_steps": -(-steps // updates)}
        fields.becomes(done, "max_steps", settings)


def _loss(fields: GivenFields, done: Translation) -> None:
    kind = fields.value("loss_type", "dapo")
    if kind not in LOSSES:
        done.absent.append(f"loss_type={kind}: there are {', '.join(LOSSES)}")
    loss, aggregation = LOSSES.get(kind, LOSSES["dapo"])
    low, high = fields.value("epsilon", "0.2"), fields.value("epsilon_high", "")
    level = fields.value("importance_sampling_level", "token")
    if level == "sequence" and loss == "vanilla":
        loss = "gspo"
        settings = {f"{ACTOR}.policy_loss.loss_mode": loss}
        fields.becomes(done, "importance_sampling_level", settings)
    chosen = {f"{ACTOR}.policy_loss.loss_mode": loss, f"{ACTOR}.loss_agg_mode": aggregation}
    fields.becomes(done, "loss_type", chosen)
    done.default("loss_type", "dapo", chosen)

    if loss == "cispo":
        _bound_of_cispo(fields, done)
    elif high:
        settings = {f"{ACTOR}.clip_ratio_low": low, f"{ACTOR}.clip_ratio_high": high}
        fields.becomes(done, "epsilon_high", settings)
        fields.ignore("epsilon")
    else:
        fields.becomes(done, "epsilon", {f"{ACTOR}.clip_ratio": low})
    if loss == "vanilla":
        bound_twice = {f"{ACTOR}.clip_ratio_c": fields.value("delta", NO_BOUND)}
        fields.becomes(done, "delta", bound_twice)
        done.default("delta", "none, no dual clip", bound_twice)


def _bound_of_cispo(fields: GivenFields, done: Translation) -> None:
    """Its bound is a ratio; ours is the distance from 1."""
    bound = fields.number("epsilon_high", 5.0) - 1
    settings = {f"{ACTOR}.clip_ratio_low": "1.0", f"{ACTOR}.clip_ratio_high": f"{bound:g}"}
    if fields.has("epsilon_high"):
        fields.becomes(done, "epsilon_high", settings)
        return
    for key, value in settings.items():
        done.set(key, value)
    done.absent.append(
        "loss_type=cispo without epsilon_high: there epsilon alone bounds every ratio; the command "
        "takes 5, ScaleRL's bound"
    )


def _advantages(fields: GivenFields, done: Translation) -> None:
    scale = fields.value("scale_rewards", "group").lower()
    settings: dict[str, Any] = {"algorithm.adv_estimator": "grpo"}
    if scale == "batch":
        settings = {"algorithm.adv_estimator": "grpo_batch_std"}
    elif scale in ("false", "none"):
        settings["algorithm.norm_adv_by_std_in_grpo"] = False
    elif scale not in ("true", "group"):
        done.absent.append(f"scale_rewards={scale}: there are group, batch and none")
    fields.becomes(done, "scale_rewards", settings)
    done.default("the estimator", "GRPO's", settings)
    if fields.value("multi_objective_aggregation", "sum_then_normalize") != "sum_then_normalize":
        done.absent.append(
            "multi_objective_aggregation=normalize_then_sum: algorithm.adv_estimator=gdpo with "
            "algorithm.gdpo_reward_keys"
        )


def _reference(fields: GivenFields, done: Translation) -> None:
    """The KL in the loss, k3; and a reference that follows the policy."""
    beta = fields.value("beta", "0.0")
    if "$" in beta or float(beta) > 0:
        settings: dict[str, Any] = {
            f"{ACTOR}.use_kl_loss": True,
            f"{ACTOR}.kl_loss_coef": beta,
            f"{ACTOR}.kl_loss_type": "low_var_kl",
        }
        fields.becomes(done, "beta", settings)
    if fields.value("sync_ref_model", "False").lower() == "true":
        stays = 1 - fields.number("ref_model_mixup_alpha", 0.6)
        settings = {
            "actor_rollout_ref.ref.update_every": fields.value("ref_model_sync_steps", "512"),
            "actor_rollout_ref.ref.ema_decay": f"{stays:g}",
        }
        fields.becomes(done, "sync_ref_model", settings)
    fields.ignore("ref_model_mixup_alpha", "ref_model_sync_steps")


def _rewards(fields: GivenFields, done: Translation) -> None:
    model = fields.value("reward_model_name_or_path", "")
    functions = fields.value("reward_funcs", "")
    if model:
        settings = {
            "reward_model.enable": True,
            "reward_model.model.path": model,
            "reward_model.rule_weight": 1 if functions else 0,
        }
        fields.becomes(done, "reward_model_name_or_path", settings)
    if functions:
        done.absent.append(
            f"reward_funcs={functions}: put them into a file and name each in `rewards`, or one in "
            "custom_reward_function.path; parameters are called solution_strs, raw_prompts, "
            "ground_truths"
        )
    if fields.value("reward_weights", ""):
        done.absent.append("reward_weights: each reward of the list `rewards` has its weight")


def _engine(fields: GivenFields, done: Translation) -> None:
    top_k = fields.count("top_k", 0)
    fields.becomes(done, "top_k", {f"{ROLLOUT}.top_k": top_k or -1})
    min_p = fields.value("min_p", "")
    fields.becomes(done, "min_p", {f"{ROLLOUT}.sampling_kwargs": f"{{min_p: {min_p}}}"})
    if fields.value("use_vllm", "False").lower() == "true":
        fields.becomes(done, "use_vllm", {f"{ROLLOUT}.name": "vllm"})
        done.default("vllm_gpu_memory_utilization", 0.3, {f"{ROLLOUT}.gpu_memory_utilization": 0.3})
        _correction(fields, done)
    else:
        fields.ignore("vllm_tensor_parallel_size", "vllm_gpu_memory_utilization", "use_vllm")
        fields.ignore(*CORRECTION)


def _correction(fields: GivenFields, done: Translation) -> None:
    """Importance weights of what vLLM drew: truncated, or zero outside their bounds."""
    fields.ignore(*CORRECTION)
    if fields.value("vllm_importance_sampling_correction", "True").lower() != "true":
        return
    mode = fields.value("vllm_importance_sampling_mode", "sequence_mask")
    largest = fields.value("vllm_importance_sampling_cap", "3.0")
    largest = fields.value("vllm_importance_sampling_clip_max", largest)
    least = fields.value("vllm_importance_sampling_clip_min", "")
    level, _, kind = mode.partition("_")
    if kind == "truncate" and least:
        done.absent.append(
            f"vllm_importance_sampling_clip_min={least}: weights are truncated from above alone"
        )
    masked = f"{least or NO_LEAST}_{float(largest)}"
    settings = {
        "algorithm.rollout_correction.rollout_is": level,
        "algorithm.rollout_correction.rollout_is_threshold": masked if kind == "mask" else largest,
    }
    for name in CORRECTION:
        fields.becomes(done, name, settings)
    done.default("vllm_importance_sampling_mode", f"{mode}, up to {largest}", settings)
