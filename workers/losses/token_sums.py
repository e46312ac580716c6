"""Losses that are plain sums over tokens, with per-token inputs from a client.

    losses = TOKEN_SUMS["ppo"].of_tokens(log_probs, columns, settings)     # [rows, R]; add them up

Nothing is averaged and nothing is masked. A token with weight or advantage 0 adds nothing, except
in `dro`, whose penalty counts every token. The formulas are those of the Tinker protocol: p is the
log-prob under the model in training, q the log-prob under the policy that sampled (`logprobs`), A
the advantage, r = exp(p - q).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verl_like.errors import ConfigError, nearest

Columns = Mapping[str, Tensor]
Settings = Mapping[str, float]
BOUNDS = ("clip_low_threshold", "clip_high_threshold")
"""Names of the bounds of r; each is a setting, or a column with one number per token."""
POLICY = ("logprobs", "advantages")
WEIGHTS = "weights"


@dataclass(frozen=True)
class LossInputs:
    """The input columns of a loss, and its settings with their defaults."""

    columns: tuple[str, ...]
    settings: Settings = field(default_factory=dict)

    @property
    def optional_columns(self) -> tuple[str, ...]:
        """Input columns that are used if the batch has them; by default a weight is 1."""
        return tuple(name for name in (WEIGHTS, *BOUNDS) if name in (*self.columns, *self.settings))

    @property
    def needed_columns(self) -> tuple[str, ...]:
        """Input columns that a batch must have."""
        return tuple(name for name in self.columns if name != WEIGHTS)

    def checked(self, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings unchanged; the role that computes the loss checks their names."""
        return dict(settings)


@dataclass(frozen=True, kw_only=True)
class TokenSum(LossInputs):
    """A loss that is a sum over tokens."""

    of_tokens: Callable[[Tensor, Columns, Settings], Tensor]

    def checked(self, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings with defaults; reject unknown names and strings."""
        for setting, value in settings.items():
            if isinstance(value, str):
                raise ConfigError(
                    f"the settings of the loss {name} must be numbers, but {setting}={value!r}."
                )
            if setting not in self.settings:
                raise ConfigError(
                    f"the loss {name} has no setting {setting!r}; it has "
                    f"{', '.join(self.settings) or 'none'}.{nearest(setting, self.settings)}"
                )
        merged = {**self.settings, **settings}
        low, high = (merged.get(bound, 0.0) for bound in BOUNDS)
        if low > high:
            raise ConfigError(
                f"the loss {name}: {BOUNDS[0]}={low} is above {BOUNDS[1]}={high}. Both are bounds "
                "of the ratio, such as 0.8 and 1.2."
            )
        return merged


def cross_entropy(log_probs: Tensor, columns: Columns, settings: Settings) -> Tensor:
    """Return -p w; weights may be fractional or negative."""
    return -log_probs * columns[WEIGHTS]


def importance_sampling(log_probs: Tensor, columns: Columns, settings: Settings) -> Tensor:
    """Return -r A."""
    return -_ratio(log_probs, columns) * columns["advantages"]


def ppo(log_probs: Tensor, columns: Columns, settings: Settings) -> Tensor:
    """Return -min(r A, clip(r) A)."""
    return _pessimistic(_ratio(log_probs, columns), columns, settings)


def cispo(log_probs: Tensor, columns: Columns, settings: Settings) -> Tensor:
    """Return -clip(r) p A, where clip(r) has no gradient."""
    weight = _clipped(_ratio(log_probs.detach(), columns), columns, settings)
    return -weight * log_probs * columns["advantages"]


def dro(log_probs: Tensor, columns: Columns, settings: Settings) -> Tensor:
    """Return -(p A - beta / 2 (p - q)^2)."""
    gap = log_probs - columns["logprobs"]
    return -(log_probs * columns["advantages"] - 0.5 * settings["beta"] * gap.square())


def gspo(log_probs: Tensor, columns: Columns, settings: Settings) -> Tensor:
    """Return PPO's loss with one ratio per row: exp(mean of p - q over `sequence_ratio_mask`)."""
    mask = columns["sequence_ratio_mask"]
    gaps = (log_probs.detach() - columns["logprobs"]) * mask
    mean = gaps.sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True).clamp(min=1)
    ratio = mean.exp() * (log_probs - log_probs.detach()).exp()
    return _pessimistic(ratio, columns, settings)


def _ratio(log_probs: Tensor, columns: Columns) -> Tensor:
    """Return r; for tokens with advantage 0, return 1 without a gradient."""
    gap = log_probs - columns["logprobs"]
    return torch.where(columns["advantages"] == 0, 0.0, gap).exp()


def _clipped(ratio: Tensor, columns: Columns, settings: Settings) -> Tensor:
    low, high = (columns.get(name, ratio.new_tensor(settings[name])) for name in BOUNDS)
    return ratio.clamp(low, high)


def _pessimistic(ratio: Tensor, columns: Columns, settings: Settings) -> Tensor:
    advantages = columns["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, columns, settings) * advantages)


_RANGE = {BOUNDS[0]: 0.8, BOUNDS[1]: 1.2}
TOKEN_SUMS: dict[str, TokenSum] = {
    "cross_entropy": TokenSum((WEIGHTS,), of_tokens=cross_entropy),
    "importance_sampling": TokenSum(POLICY, of_tokens=importance_sampling),
    "ppo": TokenSum(POLICY, _RANGE, of_tokens=ppo),
    "cispo": TokenSum(POLICY, _RANGE, of_tokens=cispo),
    "dro": TokenSum(POLICY, {"beta": 0.05}, of_tokens=dro),
    "gspo": TokenSum((*POLICY, "sequence_ratio_mask"), _RANGE, of_tokens=gspo),
}
"""Name in the protocol -> the loss."""
