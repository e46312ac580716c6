"""Passes are cut by tokens, unless rows are asked for: a rule of PPO's `Recipe.complete`.

What the user set wins. The cut changes no number beyond rounding.
"""

from __future__ import annotations

from collections.abc import Collection

from trainer.ppo.config import PPOConfig

BY_TOKENS = "actor_rollout_ref.actor.use_dynamic_bsz"
ROWS_OF_A_PASS = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size_per_gpu",
    "distillation.teacher_model.log_prob_micro_batch_size_per_gpu",
)


def rows_where_asked(config: PPOConfig, keys: Collection[str]) -> list[str]:
    """Cut by rows where the user has set a number of rows, and not how passes are cut."""
    asked = [key for key in ROWS_OF_A_PASS if key in keys]
    if not asked or BY_TOKENS in keys:
        return []
    config.actor_rollout_ref.actor.use_dynamic_bsz = False
    return [
        f"notice: {asked[0]} counts samples, so all passes are cut by samples "
        f"({BY_TOKENS}=false); without it they are cut by tokens, which is mostly faster"
    ]
