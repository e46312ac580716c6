"""Off-policy correction on the driver: weights and rejection from the whole batch, and its checks.

`correct_rollout` takes a batch that has old log-probs and advantages, before anything is cut: a
rejected token is in no mini-batch's mask, so it is in no denominator either, at any number of
ranks. Advantages are estimated before, from all that was sampled. Under `bypass_mode` there is
nothing to compare yet, and the actor does it within its update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.ppo.compute_advantage import columns_read
from trainer.ppo.config import PPOConfig
from verl_like.errors import ConfigError
from workers.columns import drawn_from, read_columns, write_columns
from workers.config import RolloutCorrectionConfig
from workers.losses.correction import RolloutCorrection, normalized
from workers.losses.correction_bounds import SECTION
from workers.losses.registry import get_policy_loss

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto


def columns_of_correction(config: RolloutCorrectionConfig) -> tuple[str, ...]:
    """The columns that `correct_rollout` writes: none without a correction, or if it bypasses."""
    if config.bypass_mode:
        return ()
    correction = RolloutCorrection.of(config)
    weights = ("rollout_is_weights",) if correction.weighs else ()
    return (*weights, "response_mask") if correction.rejects else weights


def correct_rollout(
    batch: DataProto, config: RolloutCorrectionConfig
) -> tuple[DataProto, dict[str, float]]:
    """The batch of an update: with importance weights, without the tokens that are rejected.

    The batch that is given keeps its mask.
    """
    if not columns_of_correction(config):
        return batch, {}
    correction = RolloutCorrection.of(config)
    behaviour = drawn_from(batch.columns)
    columns = read_columns(batch, "old_log_probs", behaviour, "response_mask")
    mask = columns["response_mask"]

    gauge = correction.gauge()
    weights, kept = correction(columns["old_log_probs"], columns[behaviour], mask, gauge)
    metrics = gauge.metrics()
    batch = batch.select()
    if weights is not None:
        if config.rollout_is_batch_normalize:
            weights, mean = normalized(weights, mask.bool(), str(correction.level))
            metrics["rollout_corr/rollout_is_batch_norm_factor"] = mean
        write_columns(batch, rollout_is_weights=weights)
    return write_columns(batch, response_mask=kept), metrics


def check_correction(config: PPOConfig) -> None:
    """Refuse what the correction cannot be, and what a bypass leaves without old log-probs."""
    correction = config.algorithm.rollout_correction
    RolloutCorrection.of(correction)
    if not correction.bypass_mode:
        return

    estimator = config.algorithm.adv_estimator
    if config.algorithm.use_kl_in_reward or "old_log_probs" in columns_read(estimator):
        key = "use_kl_in_reward=true" if config.algorithm.use_kl_in_reward else "adv_estimator"
        raise ConfigError(
            f"algorithm.{key} reads the trainer's own log-probs before the update, and "
            f"{SECTION}.bypass_mode=true computes none. Take actor_rollout_ref.actor.use_kl_loss "
            "for a KL to the reference, or bypass_mode=false."
        )
    if correction.rollout_is_batch_normalize:
        raise ConfigError(
            f"{SECTION}.rollout_is_batch_normalize divides by a mean over the whole batch, and "
            "under bypass_mode weights are found micro-batch by micro-batch. Set one of them to "
            "false."
        )
    _check_bypass_loss(config)


def _check_bypass_loss(config: PPOConfig) -> None:
    """`loss_type` and the named loss agree; under `ppo_clip` that one's ratio is the correction."""
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    is_plain = get_policy_loss(loss) is get_policy_loss("reinforce")
    if config.algorithm.rollout_correction.loss_type == "reinforce":
        if loss != "vanilla" and not is_plain:
            raise ConfigError(
                f"{SECTION}.loss_type=reinforce puts REINFORCE in the place of "
                f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}. Set loss_type=ppo_clip to "
                "keep that loss, or loss_mode=reinforce."
            )
        return

    if is_plain:
        raise ConfigError(
            f"actor_rollout_ref.actor.policy_loss.loss_mode={loss} has no ratio that could correct "
            f"for the rollout, as {SECTION}.loss_type=ppo_clip needs; set loss_type=reinforce."
        )
    if config.algorithm.rollout_correction.rollout_is is not None:
        raise ConfigError(
            f"{SECTION}.rollout_is={config.algorithm.rollout_correction.rollout_is}: under "
            "bypass_mode with loss_type=ppo_clip the ratio of the loss is to the rollout already, "
            "and a weight would count it twice. Set rollout_is=null or loss_type=reinforce."
        )
