"""The second and third stage: score the samples, and turn scores into rewards and advantages.

The second stage also measures the gap between trainer and rollout. Old log-probs are the trainer's
log-probs of the samples before the update.

In the third stage, scores are clamped and normalized as configured, and the KL to the reference is
subtracted. An estimator turns the resulting rewards into advantages
(`trainer.ppo.advantage_inputs`). A teacher adds its own advantages, or replaces the estimator. The
KL in the actor's loss (`actor.use_kl_loss`) is a separate term, computed in `workers`.

On-policy distillation: the policy samples a response y, and its teacher scores the same tokens. A
token's reward is log p(teacher) - log p(policy). Its mean over the policy's own samples is
-KL(policy || teacher). This reverse KL seeks one mode of the teacher instead of covering all of
them. With `distillation.gamma` above 0, later tokens' rewards also count, discounted. Sources:
MiniLLM, arXiv 2306.08543 (the reverse KL by policy gradient); GKD, arXiv 2306.13649 (on the
student's own samples); Thinking Machines, On-Policy Distillation, 2025 (per token, no discount).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.ppo.advantage_inputs import columns_read, estimate_advantages
from trainer.ppo.advantages.estimators import discounted_returns, is_last_inside
from trainer.ppo.config import KLControlConfig, PPOConfig
from trainer.ppo.filters import corrects
from trainer.ppo.roles import ScoringCall, scoring_calls
from verl_like.batch.protocol import DataProto
from verl_like.tensor_ops import last_places, masked_mean
from workers.columns import read_column, read_columns, write_columns
from workers.config.conditions import has_only_teacher, has_teacher
from workers.losses import kl as kl_estimators
from workers.losses.kl import MismatchGauge
from workers.losses.registry import get_policy_loss, traits_of


def needed_scoring_calls(config: PPOConfig, in_update: bool) -> list[ScoringCall]:
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
    estimator_columns = columns_read(config.algorithm.adv_estimator)
    return {name: True for name in call.writes[1:] if name in estimator_columns}


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


Metrics = dict[str, float]


class Estimation:
    """Estimates advantages as configured, and keeps the state between steps.

    Example:

        batch, metrics = Estimation(config)(batch)      # with token_level_scores and response_mask
    """

    def __init__(self, config: PPOConfig) -> None:
        """Take `config.algorithm`, and start with the initial KL coefficient and no statistics."""
        self.config = config
        self.kl_ctrl = KLController(config.algorithm.kl_ctrl)
        self.running_norm = RunningNorm(config.algorithm.running_norm)

    def __call__(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Add token rewards, advantages and returns to the batch, as configured."""
        algorithm, metrics = self.config.algorithm, Metrics()
        if algorithm.score_clip is not None:
            batch, metrics = clamp_scores(batch, algorithm.score_clip)
        rewards, new_metrics = self.running_norm.scores(batch)
        metrics |= new_metrics
        if algorithm.use_kl_in_reward:
            batch, new_metrics = apply_kl_penalty(
                batch, self.kl_ctrl, algorithm.kl_penalty, rewards, algorithm.kl_penalty_per
            )
            metrics |= new_metrics
        else:
            batch = write_columns(batch, token_level_rewards=rewards)

        if not has_only_teacher(self.config):
            batch = estimate_advantages(batch, algorithm)
            batch, new_metrics = self.running_norm.advantages(batch)
            metrics |= new_metrics
        if has_teacher(self.config):
            batch, new_metrics = distill(batch, self.config)
            metrics |= new_metrics
        return batch, metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the KL coefficient and the running moments."""
        return {"kl_coef": self.kl_ctrl.value, "running_norm": self.running_norm.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.kl_ctrl.value = state["kl_coef"]
        self.running_norm.load_state_dict(state.get("running_norm", {}))


class KLController:
    """The coefficient of the KL in the reward; with type `adaptive`, it steers the KL to a target.

    Each update scales it by 1 + error * num_samples / horizon, where the error is the KL's relative
    distance to the target, clipped to ±20 % (arXiv 1909.08593, section 2.2). A batch larger than
    the horizon counts as several updates. `value` is the whole state.
    """

    def __init__(self, config: KLControlConfig) -> None:
        self.config = config
        self.value = config.kl_coef

    def update(self, current_kl: float, num_samples: int) -> None:
        """Adapt the coefficient after a batch of `num_samples` samples with this mean KL."""
        if self.config.type == "fixed":
            return
        horizon = self.config.horizon
        error = min(max(current_kl / self.config.target_kl - 1.0, -0.2), 0.2)
        for first in range(0, num_samples, horizon):  # keeps each factor within 0.8 to 1.2
            part = min(horizon, num_samples - first)
            self.value *= 1.0 + error * part / horizon


def clamp_scores(batch: DataProto, limit: float) -> tuple[DataProto, dict[str, float]]:
    """Clamp each token's score to [-limit, limit]; also return the fraction of changed samples."""
    scores = read_column(batch, "token_level_scores")
    clamped = scores.clamp(-limit, limit)
    changed = (clamped != scores).any(dim=-1).double().mean().item()
    return write_columns(batch, token_level_scores=clamped), {"critic/score/clamped_ratio": changed}


def apply_kl_penalty(
    batch: DataProto,
    kl_ctrl: KLController,
    kl_penalty: str = "kl",
    normalized_scores: Tensor | None = None,
    kl_penalty_per: str = "token",
) -> tuple[DataProto, dict[str, float]]:
    """Set the token rewards to scores - coefficient x KL; also return the KL and the coefficient.

    With `kl_penalty_per=sequence`, the mean KL of a response is subtracted at its last token only.
    The scores are `token_level_scores`, or `normalized_scores` if given. The reported KL, which
    also updates the controller, is averaged over the tokens of each sample, then over samples.
    """
    columns = read_columns(
        batch, "token_level_scores", "old_log_probs", "ref_log_prob", "response_mask"
    )
    inside = columns["response_mask"].bool()
    kl = kl_estimators.kl_penalty(
        columns["old_log_probs"], columns["ref_log_prob"], kl_penalty
    ).masked_fill(~inside, 0)
    scores = columns["token_level_scores"] if normalized_scores is None else normalized_scores
    mean_kl = masked_mean(kl, inside, axis=-1)
    if kl_penalty_per == "sequence":
        kl = mean_kl[:, None] * is_last_inside(inside)
    write_columns(batch, token_level_rewards=scores - kl_ctrl.value * kl)
    current_kl = masked_mean(mean_kl, inside.any(dim=-1)).item()
    metrics = {
        "actor/reward_kl_penalty": current_kl,
        "actor/reward_kl_penalty_coeff": kl_ctrl.value,
    }
    kl_ctrl.update(current_kl, num_samples=len(batch))
    return batch, metrics


@dataclass
class RunningMoments:
    """Count, mean and sum of squared deviations of all numbers so far, in double precision.

    Batches are joined by Chan's form of Welford's update.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, count: int, mean: float, squares: float) -> None:
        """Add a batch by its count, mean, and sum of squared deviations from that mean."""
        if count == 0:
            return
        total = self.count + count
        distance = mean - self.mean
        self.squares += squares + distance**2 * self.count * count / total
        self.mean += distance * count / total
        self.count = total

    @property
    def std(self) -> float:
        """The standard deviation (n - 1), or 1 while all numbers are equal."""
        if self.count < 2 or self.squares <= 0:
            return 1.0
        return math.sqrt(self.squares / (self.count - 1))


class RunningNorm:
    """Running moments of the normalized quantities, by name: "rewards", "advantages"."""

    def __init__(self, names: Sequence[str]) -> None:
        """Normalize the quantities in `names`, the value of `algorithm.running_norm`."""
        self.moments = {name: RunningMoments() for name in names}

    def scores(self, batch: DataProto) -> tuple[Tensor, Metrics]:
        """Return `token_level_scores`, normalized by the running moments if configured.

        The moments are over the scores of samples. Every token's score is divided by the standard
        deviation; the mean is subtracted once per sample, at the last token.
        """
        columns = read_columns(batch, "token_level_scores", "response_mask")
        scores = columns["token_level_scores"]
        if "rewards" not in self.moments:
            return scores, {}

        inside = columns["response_mask"].bool()
        answered = inside.any(dim=-1)
        of_samples = scores.sum(dim=-1)[answered].double()
        mean = of_samples.mean().item() if len(of_samples) else 0.0
        moments = self.moments["rewards"]
        moments.add(len(of_samples), mean, (of_samples - mean).square().sum().item())

        normalized = scores / moments.std
        last = last_places(inside)
        normalized[answered.nonzero().squeeze(-1), last[answered]] -= moments.mean / moments.std
        return normalized, self._metrics("rewards")

    def advantages(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Normalize the batch's advantages by the running moments over tokens, if configured."""
        if "advantages" not in self.moments:
            return batch, {}

        columns = read_columns(batch, "advantages", "response_mask")
        inside = columns["response_mask"].bool().to(columns["advantages"].dtype)
        count = int(torch.count_nonzero(inside))
        mean = columns["advantages"].sum(dtype=torch.float64).item() / max(count, 1)
        normalized = (columns["advantages"] - mean).mul_(inside)
        moments = self.moments["advantages"]
        moments.add(count, mean, torch.linalg.vector_norm(normalized).item() ** 2)

        normalized.add_(inside, alpha=mean - moments.mean).div_(moments.std)
        return write_columns(batch, advantages=normalized), self._metrics("advantages")

    def _metrics(self, name: str) -> Metrics:
        moments = self.moments[name]
        return {
            f"critic/{name}/running_mean": moments.mean,
            f"critic/{name}/running_std": moments.std,
        }

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Return the moments by name, ready for JSON."""
        return {name: asdict(moments) for name, moments in self.moments.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore the state that `state_dict` returned."""
        self.moments = {name: RunningMoments(**state[name]) for name in self.moments}


@torch.no_grad()
def compute_distillation_advantage(
    old_log_probs: Tensor, teacher_log_prob: Tensor, response_mask: Tensor, gamma: float = 0.0
) -> Tensor:
    """Return log p(teacher) - log p(policy) summed from each token on, discounted by `gamma`."""
    inside = response_mask.bool()
    rewards = (teacher_log_prob - old_log_probs).masked_fill(~inside, 0)
    return discounted_returns(rewards, response_mask, gamma)


def distill(batch: DataProto, config: PPOConfig) -> tuple[DataProto, dict[str, float]]:
    """Add the teacher's advantages to the batch's advantages; also return the reverse KL.

    Without task rewards, the teacher's are the only advantages, and also the returns. The KL
    estimate is averaged over the tokens of each sample, then over samples.
    """
    columns = read_columns(batch, "old_log_probs", "teacher_log_prob", "response_mask")
    settings = config.distillation
    advantages = compute_distillation_advantage(**columns, gamma=settings.gamma)
    returns = advantages
    if not has_only_teacher(config):
        from_rewards = read_columns(batch, "advantages", "returns")
        advantages = from_rewards["advantages"] + settings.coef * advantages
        returns = from_rewards["returns"]  # a critic learns only from the rewards
    write_columns(batch, advantages=advantages, returns=returns)

    inside = columns["response_mask"].bool()
    log_ratio = columns["old_log_probs"] - columns["teacher_log_prob"]
    of_samples = masked_mean(log_ratio, inside, axis=-1)
    return batch, {
        "distillation/reverse_kl": masked_mean(of_samples, inside.any(dim=-1)).item(),
        "distillation/teacher_log_prob": masked_mean(columns["teacher_log_prob"], inside).item(),
    }
