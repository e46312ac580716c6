"""The second stage: score the samples, and measure the gap between trainer and rollout.

Old log-probs are the trainer's log-probs of the samples before the update.
"""

from __future__ import annotations

from trainer.ppo.advantage_inputs import columns_read
from trainer.ppo.config import PPOConfig
from trainer.ppo.filters import corrects
from trainer.ppo.roles import ScoringCall, scoring_calls
from verl_like.batch.protocol import DataProto
from workers.columns import read_column, read_columns
from workers.config.conditions import has_teacher
from workers.losses.kl import MismatchGauge
from workers.losses.registry import get_policy_loss, traits_of


def calls_of_step(config: PPOConfig, in_update: bool) -> list[ScoringCall]:
    """Return the scoring calls of a step.

    Old log-probs are left out if the update computes them, or in bypass mode, which uses the
    rollout's log-probs.
    """
    calls = scoring_calls(config)
    if config.algorithm.rollout_correction.bypass_mode or in_update:
        return [call for call in calls if call.column != "old_log_probs"]
    return calls


def column_settings(call: ScoringCall, config: PPOConfig) -> dict[str, bool]:
    """Return the settings of a call: the further columns that the estimator reads."""
    wanted = columns_read(config.algorithm.adv_estimator)
    return {name: True for name in call.writes[1:] if name in wanted}


def update_can_compute_old_log_probs(config: PPOConfig) -> bool:
    """Return whether the update can compute the old log-probs of samples of the current policy.

    It can if its first forward pass sees every row under the weights that sampled it, and nothing
    reads the old log-probs earlier. So there must be one mini-batch, one epoch and one step per
    version of the rollout's weights, and no KL in the reward, teacher, rollout correction,
    `bypass_mode`, estimator that reads old log-probs, or loss that chooses tokens by them. (Models
    train without dropout.)
    """
    actor = config.actor_rollout_ref.actor
    correction = config.algorithm.rollout_correction
    if correction.bypass_mode or corrects(correction):
        return False
    if traits_of(get_policy_loss(actor.policy_loss.loss_mode)).choose_tokens is not None:
        return False
    if actor.ppo_epochs > 1 or actor.ppo_mini_batch_size != config.data.train_batch_size:
        return False
    if has_teacher(config) or config.steps_per_version > 1:
        return False
    return not config.algorithm.use_kl_in_reward and "old_log_probs" not in columns_read(
        config.algorithm.adv_estimator
    )


def update_computes_old_log_probs(
    batch: DataProto, config: PPOConfig, step: int, version: int
) -> bool:
    """Return whether the update's own forward pass computes the old log-probs of this batch.

    It does if the configuration allows it in this step, and every sample comes from the current
    policy: weights of this `version`.
    """
    if not update_can_compute_old_log_probs(config) or measures_reference(config, step):
        return False
    return bool((read_column(batch, "policy_version") == version).all())


def measures_reference(config: PPOConfig, step: int) -> bool:
    """Return whether this is the first step, and it measures the error of an int8 reference."""
    return (
        step == 1
        and "ref" in config.role_mapping
        and config.actor_rollout_ref.ref.model.path is None
        and bool(config.actor_rollout_ref.ref.quantization)
    )


def mismatch_metrics(batch: DataProto) -> dict[str, float]:
    """Return verl's metrics that compare `rollout_log_probs` with `old_log_probs`."""
    columns = read_columns(batch, "rollout_log_probs", "old_log_probs", "response_mask")
    gauge = MismatchGauge(columns["response_mask"].shape[1])
    gauge.add(columns["rollout_log_probs"], columns["old_log_probs"], columns["response_mask"])
    return gauge.metrics()


def reference_drift(batch: DataProto, config: PPOConfig, step: int) -> dict[str, float]:
    """Return the mean |reference log-prob - actor log-prob| per token in the first step.

    In that step both have the same weights, and only the reference's are rounded.
    """
    if not measures_reference(config, step):
        return {}
    columns = read_columns(batch, "ref_log_prob", "old_log_probs", "response_mask")
    gaps = (columns["ref_log_prob"] - columns["old_log_probs"]).abs().double()
    inside = columns["response_mask"] != 0
    return {"ref/quantization_log_prob_diff_mean": float(gaps[inside].mean())}
