"""Estimator, rewards' shaping, KL, losses: what several flags say together."""

from __future__ import annotations

from typing import Any

from trainer.migrate.openrlhf.given import GivenFlags
from trainer.migrate.translation import Translation
from verl_like.errors import ConfigError

ACTOR = "actor_rollout_ref.actor"
ESTIMATORS = {
    "gae": "gae",
    "reinforce": "reinforce_plus_plus",
    "reinforce_baseline": "reinforce_plus_plus_baseline",
    "rloo": "rloo",
    "group_norm": "grpo",
    "dr_grpo": "grpo",
}
NEVER = "1e9"
"""A bound that no ratio reaches."""
KL_ESTIMATORS = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}


def algorithm(flags: GivenFlags, done: Translation) -> None:
    """Estimator, what happens to scores before it, and the KL."""
    estimator = flags.value("advantage_estimator", "gae")
    if estimator not in ESTIMATORS:
        raise ConfigError(
            f"{flags.spelled('advantage_estimator')} {estimator}: OpenRLHF has "
            f"{', '.join(ESTIMATORS)}."
        )

    settings: dict[str, Any] = {"algorithm.adv_estimator": ESTIMATORS[estimator]}
    if estimator == "dr_grpo":
        settings["algorithm.norm_adv_by_std_in_grpo"] = False
    flags.becomes(done, "advantage_estimator", settings)
    flags.becomes(done, "no_advantage_std_norm", {"algorithm.norm_adv_by_std_in_grpo": False})
    flags.becomes(done, "normalize_reward", {"algorithm.running_norm": ["rewards"]})

    low, high = flags.values("reward_clip_range") or ("-10", "10")
    if low == f"-{high}":
        flags.becomes(done, "reward_clip_range", {"algorithm.score_clip": high})
        flags.defaults_to(done, "reward_clip_range", 10, "algorithm.score_clip")
    else:
        done.absent.append(f"--reward_clip_range {low} {high}: scores are clamped evenly about 0")

    flags.becomes(
        done,
        "dynamic_filtering",
        {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "seq_reward"},
    )
    if flags.has("overlong_buffer_len"):
        buffer = "reward_model.overlong_buffer"
        factor = flags.value("overlong_penalty_factor", "1")
        length = int(flags.number("overlong_buffer_len", 0))
        settings = {"enable": True, "len": length, "penalty_factor": factor}
        named = {f"{buffer}.{key}": value for key, value in settings.items()}
        flags.becomes(done, "overlong_buffer_len", named)
    else:
        flags.values("overlong_penalty_factor")

    _correction(flags, done)
    _kl(flags, done)


def _correction(flags: GivenFlags, done: Translation) -> None:
    """Importance weights of what vLLM drew: older flags have one threshold, newer ones two."""
    section = "algorithm.rollout_correction"
    kind = flags.value("algo.advantage.is_correction_type", "tis")
    limits = flags.values("algo.advantage.is_correction_threshold")
    one = flags.value("vllm_is_truncated_threshold", "")
    if not flags.has("enable_vllm_is_correction"):
        return
    flag = flags.spelled("enable_vllm_is_correction")
    low, high = limits or ("0.5", one or ("5.0" if "." in flag else "2"))
    if kind == "tis":
        settings = {"rollout_is": "token", "rollout_is_threshold": high}
    elif kind == "icepop":
        settings = {"rollout_is": "token", "rollout_is_threshold": f"{low}_{high}"}
    else:
        settings = {
            "rollout_is": "token",
            "rollout_is_threshold": high,
            "rollout_rs": "geometric",
            "rollout_rs_threshold": f"{low}_{high}",
        }
    flags.becomes(
        done, "enable_vllm_is_correction", {f"{section}.{k}": v for k, v in settings.items()}
    )


def _kl(flags: GivenFlags, done: Translation) -> None:
    coefficient = flags.value("init_kl_coef", "0.01")
    estimator = KL_ESTIMATORS[flags.value("kl_estimator", "k1")]
    horizon, target = flags.value("kl_horizon", "10000"), flags.value("kl_target", "")
    if flags.has("init_kl_coef") and flags.number("init_kl_coef", 0.01) == 0:
        flags.becomes(done, "init_kl_coef", {"algorithm.use_kl_in_reward": False})
        return
    if flags.has("use_kl_loss"):
        settings = {"use_kl_loss": True, "kl_loss_coef": coefficient, "kl_loss_type": estimator}
        flags.becomes(done, "use_kl_loss", {f"{ACTOR}.{k}": v for k, v in settings.items()})
        return
    settings = {
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_penalty": estimator,
        "algorithm.kl_ctrl.kl_coef": coefficient,
    }
    if target:
        settings["algorithm.kl_ctrl.type"] = "adaptive"
        settings["algorithm.kl_ctrl.target_kl"] = target
        settings["algorithm.kl_ctrl.horizon"] = horizon
    flags.becomes(done, "init_kl_coef", settings)
    done.default("--init_kl_coef", "0.01", settings)


def losses(flags: GivenFlags, done: Translation) -> None:
    """Clipping of policy and values, and the average of the policy's weights."""
    clip = flags.value("eps_clip", "0.2")
    low, high = flags.values("eps_clip_low_high") or (clip, clip)
    flags.becomes(done, "eps_clip", {f"{ACTOR}.clip_ratio": clip})
    flags.becomes(
        done,
        "eps_clip_low_high",
        {f"{ACTOR}.clip_ratio_low": low, f"{ACTOR}.clip_ratio_high": high},
    )
    kind = flags.value("policy_loss_type", "ppo")
    mode = {"ppo": "vanilla"}.get(kind, kind)
    flags.becomes(done, "policy_loss_type", {f"{ACTOR}.policy_loss.loss_mode": mode})
    if mode == "vanilla":
        if not flags.has("dual_clip"):
            done.default("--dual_clip", "off", {f"{ACTOR}.clip_ratio_c": NEVER})
    clipped = {"critic.cliprange_value": flags.value("value_clip", "0.5")}
    if flags.has_critic:
        flags.becomes(done, "value_clip", clipped)
    if flags.has("enable_ema"):
        decay = {f"{ACTOR}.ema_decay": flags.value("ema_beta", "0.992")}
        flags.becomes(done, "enable_ema", decay)
    flags.values("ema_beta")
