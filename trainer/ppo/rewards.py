"""From scores to rewards: the clamp, the running norm, the KL to the reference and its weight.

The KL inside the actor's loss is another thing (`actor.use_kl_loss`) and lives in `workers`. The
state of the running norm is a part of every checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.ppo.advantages.returns import is_last_inside
from trainer.ppo.config import KLControlConfig
from verl_like.tensor_ops import last_places, masked_mean
from workers.columns import read_columns, write_columns
from workers.losses import kl as kl_estimators

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto


class FixedKLController:
    """A weight that stays."""

    def __init__(self, kl_coef: float) -> None:
        """Start, and stay, at `kl_coef`."""
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing to adapt."""


class AdaptiveKLController:
    """A weight that steers the KL to a target (arXiv 1909.08593, section 2.2).

    It grows or shrinks by its clipped relative error, at most 20 %, times n_steps / horizon; a
    batch larger than the horizon counts as several. `value` is all its state.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: int) -> None:
        """Start at `init_kl_coef`."""
        self.value = init_kl_coef
        self.target = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Move after a batch of `n_steps` samples whose mean KL was `current_kl`."""
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        for first in range(0, n_steps, self.horizon):  # no factor is below 0.8, so none below zero
            part = min(self.horizon, n_steps - first)
            self.value *= 1.0 + error * part / self.horizon


KLController = FixedKLController | AdaptiveKLController


def get_kl_controller(kl_ctrl: KLControlConfig) -> KLController:
    """The controller that `algorithm.kl_ctrl` describes."""
    if kl_ctrl.type == "adaptive":
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    return FixedKLController(kl_ctrl.kl_coef)


def clamp_scores(batch: DataProto, limit: float) -> tuple[DataProto, dict[str, float]]:
    """The same batch with every score inside [-limit, limit], and the share that this changed."""
    scores = read_columns(batch, "token_level_scores")["token_level_scores"]
    clamped = scores.clamp(-limit, limit)
    changed = (clamped != scores).any(dim=-1).double().mean().item()
    return write_columns(batch, token_level_scores=clamped), {"critic/score/clamped_ratio": changed}


def apply_kl_penalty(
    batch: DataProto,
    kl_ctrl: KLController,
    kl_penalty: str = "kl",
    normalised_scores: Tensor | None = None,
    kl_penalty_per: str = "token",
) -> tuple[DataProto, dict[str, float]]:
    """The same batch with rewards = scores - weight x KL on response tokens, and two metrics.

    With `kl_penalty_per` sequence the mean KL of a response is taken from its last token alone.
    Scores are `token_level_scores`, or `normalised_scores` where these are given.
    The KL reported, and shown to the controller, is the mean over samples of their tokens' mean.
    """
    columns = read_columns(
        batch, "token_level_scores", "old_log_probs", "ref_log_prob", "response_mask"
    )
    inside = columns["response_mask"].bool()
    kl = kl_estimators.kl_penalty(
        columns["old_log_probs"], columns["ref_log_prob"], kl_penalty
    ).masked_fill(~inside, 0)
    scores = columns["token_level_scores"] if normalised_scores is None else normalised_scores
    mean_kl = masked_mean(kl, inside, axis=-1)
    if kl_penalty_per == "sequence":
        kl = mean_kl[:, None] * is_last_inside(inside)
    write_columns(batch, token_level_rewards=scores - kl_ctrl.value * kl)
    current_kl = masked_mean(mean_kl, inside.any(dim=-1)).item()
    metrics = {
        "actor/reward_kl_penalty": current_kl,
        "actor/reward_kl_penalty_coeff": kl_ctrl.value,
    }
    kl_ctrl.update(current_kl, n_steps=len(batch))
    return batch, metrics


Metrics = dict[str, float]


class RunningMoments:
    """Count, mean and sum of squared deviations of all numbers so far, in double precision.

    Batches are joined by Chan's form of Welford's update.
    """

    def __init__(self) -> None:
        """Nothing has been seen."""
        self.count = 0
        self.mean = 0.0
        self.squares = 0.0

    def add(self, count: int, mean: float, squares: float) -> None:
        """Take in a batch: its count, mean, and sum of squared deviations from that mean."""
        if count == 0:
            return
        total = self.count + count
        distance = mean - self.mean
        self.squares += squares + distance**2 * self.count * count / total
        self.mean += distance * count / total
        self.count = total

    @property
    def std(self) -> float:
        """The standard deviation (n - 1); 1 as long as all numbers are equal."""
        if self.count < 2 or self.squares <= 0:
            return 1.0
        return math.sqrt(self.squares / (self.count - 1))

    def state_dict(self) -> dict[str, float]:
        """The three numbers."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from what `state_dict` gave."""
        self.count, self.mean = int(state["count"]), state["mean"]
        self.squares = state["squares"]


class RunningNorm:
    """The moments of what is normalised, by its name: "rewards", "advantages"."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names` are those of `algorithm.running_norm`."""
        self.moments = {name: RunningMoments() for name in names}

    def scores(self, batch: DataProto) -> tuple[Tensor, Metrics]:
        """`token_level_scores`, normalised where that is asked for: by samples' sums.

        Every score is divided by the standard deviation; the mean is taken off at the last token.
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

        normalised = scores / moments.std
        last = last_places(inside)
        normalised[answered.nonzero().squeeze(-1), last[answered]] -= moments.mean / moments.std
        return normalised, self._metrics("rewards")

    def advantages(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """The same batch with its advantages normalised, where that is asked for, by tokens."""
        if "advantages" not in self.moments:
            return batch, {}

        columns = read_columns(batch, "advantages", "response_mask")
        inside = columns["response_mask"].bool().to(columns["advantages"].dtype)
        count = int(torch.count_nonzero(inside))
        mean = columns["advantages"].sum(dtype=torch.float64).item() / max(count, 1)
        normalised = (columns["advantages"] - mean).mul_(inside)
        moments = self.moments["advantages"]
        moments.add(count, mean, torch.linalg.vector_norm(normalised).item() ** 2)

        normalised.add_(inside, alpha=mean - moments.mean).div_(moments.std)
        return write_columns(batch, advantages=normalised), self._metrics("advantages")

    def _metrics(self, name: str) -> Metrics:
        moments = self.moments[name]
        return {
            f"critic/{name}/running_mean": moments.mean,
            f"critic/{name}/running_std": moments.std,
        }

    def state_dict(self) -> dict[str, dict[str, float]]:
        """The moments by name, as JSON has them."""
        return {name: moments.state_dict() for name, moments in self.moments.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Go on from what `state_dict` gave."""
        for name, moments in self.moments.items():
            moments.load_state_dict(state[name])
