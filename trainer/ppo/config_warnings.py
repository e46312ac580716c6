"""Warnings about PPO's keys: a run that can train, but not as its keys suggest.

`trainer.ppo.config_errors` rejects keys that cannot work together.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS, wants_kl_in_loss
from trainer.ppo.config import PPOConfig
from verl_like.placement.pools import expand_roles
from workers.config import critic_optim
from workers.losses.registry import POLICY_LOSSES, LossTraits, clip_widths, traits_of
from workers.training.schedule_notes import schedule_notes

ACTOR = "actor_rollout_ref.actor"
WIDEST_RANGE_OF_SEQUENCES = 0.05
"""Widest clip range that often clips the ratio of a sequence, whose mean log-ratio is small."""


def contradictions(config: PPOConfig) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each combination of keys that works, but not as you would expect."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    loss, aggregation = actor.policy_loss.loss_mode, actor.loss_agg_mode
    entry = POLICY_LOSSES.get(loss)  # None for a user's function

    traits = LossTraits() if entry is None else traits_of(entry)
    is_by_token = aggregation in ("token-mean", "token-sum")
    if traits.one_ratio_per_sequence and is_by_token and loss not in traits.longer_count_more:
        yield (
            "sequence-aggregation",
            f"{ACTOR}.policy_loss.loss_mode={loss} computes one ratio per sequence, but "
            f"{ACTOR}.loss_agg_mode={aggregation} counts it once per token, so long sequences "
            "weigh more. The paper uses seq-mean-token-mean.",
        )

    estimator = ADVANTAGE_ESTIMATORS.get(algorithm.adv_estimator)
    is_grpo = estimator is ADVANTAGE_ESTIMATORS["grpo"]
    if aggregation == "seq-mean-token-sum-norm" and is_grpo and algorithm.norm_adv_by_std_in_grpo:
        yield (
            "half-of-dr-grpo",
            f"{ACTOR}.loss_agg_mode={aggregation} is the aggregation of Dr. GRPO, which also "
            "leaves out the division by the group's standard deviation. Set "
            "algorithm.norm_adv_by_std_in_grpo=false, or algorithm=dr_grpo.",
        )

    num_updates = config.data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs
    if not traits.has_ratio and num_updates > 1:
        yield (
            "uncorrected-updates",
            f"a step makes {num_updates} updates "
            f"(data.train_batch_size={config.data.train_batch_size}, "
            f"{ACTOR}.ppo_mini_batch_size={actor.ppo_mini_batch_size}, "
            f"{ACTOR}.ppo_epochs={actor.ppo_epochs}), and {ACTOR}.policy_loss.loss_mode={loss} "
            "has no ratio that corrects the updates after the first. Set "
            f"{ACTOR}.ppo_mini_batch_size={config.data.train_batch_size} and {ACTOR}.ppo_epochs=1, "
            f"or use {ACTOR}.policy_loss.loss_mode=vanilla.",
        )

    if "clip_ratio" in (traits.keys_read or ()):
        low, high = clip_widths(actor)
        if traits.clips_sequences and max(low, high) > WIDEST_RANGE_OF_SEQUENCES:
            yield (
                "clip-of-sequences",
                f"a clip range of {low} below and {high} above is meant for token ratios: "
                f"sequence ratios, which {ACTOR}.policy_loss.loss_mode={loss} clips, hardly ever "
                f"leave this range. The paper uses {ACTOR}.clip_ratio_low=3e-4 and "
                f"{ACTOR}.clip_ratio_high=4e-4.",
            )
        if low > high and not traits.clips_weights:
            yield (
                "clip-upside-down",
                f"{ACTOR}.clip_ratio_low={low} is above {ACTOR}.clip_ratio_high={high}: a token's "
                "probability may fall further than it may rise, the opposite of clip-higher, so "
                "the entropy may fall. Check that the two are not swapped.",
            )

    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield (
            "kl-zero-coef",
            f"{ACTOR}.use_kl_loss=true with {ACTOR}.kl_loss_coef=0: the reference is computed "
            f"only for a metric. Set {ACTOR}.use_kl_loss=false if you do not need this metric.",
        )
    is_fixed = algorithm.kl_ctrl.type == "fixed"
    if algorithm.use_kl_in_reward and is_fixed and algorithm.kl_ctrl.kl_coef == 0:
        yield (
            "kl-zero-coef",
            "algorithm.use_kl_in_reward=true with algorithm.kl_ctrl.kl_coef=0: the reference is "
            "computed only for a metric. Set algorithm.use_kl_in_reward=false if you do not need "
            "this metric.",
        )
    if actor.use_kl_loss and algorithm.use_kl_in_reward:
        yield (
            "kl-twice",
            f"algorithm.use_kl_in_reward=true and {ACTOR}.use_kl_loss=true: the KL to the "
            "reference counts in the reward and in the loss. Keep one.",
        )
    if actor.use_kl_loss and actor.kl_loss_type in ("kl", "k1"):
        yield (
            "kl-without-gradient",
            f"{ACTOR}.kl_loss_type={actor.kl_loss_type}: on the policy's own samples the gradient "
            "of the log-ratio is 0 on average, so this KL does not keep the policy near the "
            f"reference. Set {ACTOR}.kl_loss_type={actor.kl_loss_type}+, k2 or low_var_kl.",
        )
    if algorithm.use_kl_in_reward and estimator is not None and wants_kl_in_loss(estimator):
        yield (
            "kl-in-group-reward",
            "algorithm.use_kl_in_reward=true with "
            f"algorithm.adv_estimator={algorithm.adv_estimator}: the KL of a sample's tokens "
            "changes its score within the group. GRPO puts the KL into the loss: set "
            f"{ACTOR}.use_kl_loss=true.",
        )


def learning_rate_notes(config: PPOConfig, total_steps: int) -> list[str]:
    """Return notes on learning rates that are 0, or that the warm-up never reaches."""
    actor = config.actor_rollout_ref.actor.optim
    num_updates = total_steps - config.trainer.critic_warmup
    notes = schedule_notes("actor_rollout_ref.actor.optim", actor, num_updates)
    if "critic" in expand_roles(config.role_mapping):
        notes += schedule_notes("critic.optim", critic_optim(config), total_steps)
    return notes
