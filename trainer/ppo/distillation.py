"""On-policy distillation: advantages from what a teacher thinks of each token of its student.

The policy draws a response y, and its teacher scores the same tokens. A token's reward is
log p(teacher) - log p(policy), whose mean over the policy's own samples is minus the KL of the
policy to the teacher, KL(policy || teacher): the reverse KL, which seeks one way of the teacher's
instead of covering all of them. With `distillation.gamma` above 0 a token counts for what follows
from it, too. `distill` makes the advantages, `check_distillation` refuses keys that clash with it.

Source: MiniLLM, arXiv 2306.08543 (the reverse KL by policy gradient); GKD, arXiv 2306.13649 (on the
student's own samples); Thinking Machines, On-Policy Distillation, 2025 (per token, no discount)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.ppo.advantages.returns import returns_of
from trainer.ppo.config import PPOConfig
from verl_like.errors import ConfigError
from verl_like.tensor_ops import masked_mean
from workers.columns import read_columns, write_columns
from workers.config.conditions import has_teacher, teacher_is_alone

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto


@torch.no_grad()
def compute_distillation_advantage(
    old_log_probs: Tensor, teacher_log_prob: Tensor, response_mask: Tensor, gamma: float = 0.0
) -> Tensor:
    """Every token's log p(teacher) - log p(policy), with those of later tokens by `gamma`."""
    inside = response_mask.bool()
    rewards = (teacher_log_prob - old_log_probs).masked_fill(~inside, 0)
    return returns_of(rewards, response_mask, gamma)


def distill(batch: DataProto, config: PPOConfig) -> tuple[DataProto, dict[str, float]]:
    """The same batch with the teacher's part in its advantages and returns, and the reverse KL.

    Without a teacher it stays as it is. The KL is estimated by the mean over samples of their
    tokens' mean.
    """
    if not has_teacher(config):
        return batch, {}
    columns = read_columns(batch, "old_log_probs", "teacher_log_prob", "response_mask")
    settings = config.distillation
    advantages = compute_distillation_advantage(**columns, gamma=settings.gamma)
    returns = advantages
    if not teacher_is_alone(config):
        from_rewards = read_columns(batch, "advantages", "returns")
        advantages = from_rewards["advantages"] + settings.coef * advantages
        returns = from_rewards["returns"]  # what a critic learns is of the rewards
    write_columns(batch, advantages=advantages, returns=returns)

    inside = columns["response_mask"].bool()
    log_ratio = columns["old_log_probs"] - columns["teacher_log_prob"]
    of_samples = masked_mean(log_ratio, inside, axis=-1)
    return batch, {
        "distillation/reverse_kl": masked_mean(of_samples, inside.any(dim=-1)).item(),
        "distillation/teacher_log_prob": masked_mean(columns["teacher_log_prob"], inside).item(),
    }


def check_distillation(config: PPOConfig) -> None:
    """Refuse what a teacher alone does not read, and what leaves it nothing to be compared with."""
    algorithm = config.algorithm
    if not has_teacher(config):
        return
    if algorithm.rollout_correction.bypass_mode:
        raise ConfigError(
            "distillation compares the teacher with the trainer's own log-probs before the update, "
            "and algorithm.rollout_correction.bypass_mode=true computes none. Leave it out."
        )
    if not teacher_is_alone(config):
        return

    buffer = config.reward_model.overlong_buffer
    act_on_rewards = {
        "algorithm.use_kl_in_reward=true": algorithm.use_kl_in_reward,
        "algorithm.filter_groups.enable=true": algorithm.filter_groups.enable,
        "algorithm.use_pf_ppo=true": algorithm.use_pf_ppo,
        f"algorithm.running_norm={algorithm.running_norm}": bool(algorithm.running_norm),
        f"algorithm.score_clip={algorithm.score_clip}": algorithm.score_clip is not None,
        "reward_model.overlong_buffer.enable=true": buffer.enable,
    }
    for setting, is_set in act_on_rewards.items():
        if is_set:
            raise ConfigError(
                f"{setting} acts on rewards, and distillation.use_task_rewards=false leaves the "
                "advantages to the teacher alone. Drop the one, or set "
                "distillation.use_task_rewards=true."
            )
