"""Reject tokens and sequences on which the trainer and the rollout engine disagree.

With r = trainer's probability / rollout's probability of a sampled token,

    k1 = -log r        k2 = (log r)^2 / 2        k3 = r - 1 - log r

estimate the KL of the rollout to the trainer. A criterion applies to each token (`token_k1`), or to
the sum (`seq_sum_k1`), mean (`seq_mean_k1`) or maximum (`seq_max_k2`) over a sequence. The names
are verl's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_like.errors import ConfigError, nearest
from workers.losses.correction_bounds import SECTION, Bounds, divergence_bound, ratio_bounds
from workers.losses.importance_ratio import LARGEST_LOG_RATIO

CRITERIA = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)
"""Allowed names in `rollout_rs`."""


@dataclass(frozen=True)
class Criterion:
    """One of `CRITERIA`, with the accepted range."""

    name: str
    bounds: Bounds
    """For k1, logarithms of the ratios in the configuration."""

    @property
    def judges_tokens(self) -> bool:
        """True if the criterion rejects single tokens."""
        return self.name.startswith("token")

    def figures(self, log_ratio: Tensor, inside: Tensor) -> Tensor:
        """Return [rows, R] for a token criterion, [rows, 1] for a sequence criterion.

        `log_ratio` is zero outside the mask, so k1, k2 and k3 are zero there, too.
        """
        level, _, estimator = self.name.rpartition("_")
        of_tokens = _estimate(estimator, log_ratio)
        if level == "seq_sum":
            return of_tokens.sum(dim=-1, keepdim=True)
        if level == "seq_mean":
            return of_tokens.sum(dim=-1, keepdim=True) / lengths(inside)
        if level == "seq_max":  # k2 and k3 are never below zero
            return of_tokens.amax(dim=-1, keepdim=True)
        return of_tokens

    def keeps(self, figures: Tensor) -> Tensor:
        """Return where a value is within the range, ends included; NaN is not."""
        accepted = figures <= self.bounds.upper
        return accepted if self.bounds.lower is None else accepted & (figures >= self.bounds.lower)


def lengths(inside: Tensor) -> Tensor:
    """Return the number of tokens per row, [rows, 1]; 1 for an empty row."""
    return inside.sum(dim=-1, keepdim=True).clamp(min=1)


def criteria_of(names: str | None, thresholds: str | None) -> tuple[Criterion, ...]:
    """Return the criteria of `rollout_rs` with their thresholds; both texts are split at commas.

    A single threshold applies to all criteria.
    """
    if names is None:
        return ()
    chosen = _parts(names)
    for name in chosen:
        if name not in CRITERIA:
            raise ConfigError(
                f"{SECTION}.rollout_rs={names}: there is no criterion {name!r}; there are "
                f"{', '.join(CRITERIA)}.{nearest(name, CRITERIA)}"
            )
        if chosen.count(name) > 1:
            raise ConfigError(f"{SECTION}.rollout_rs={names} names {name} twice.")

    texts = _parts(thresholds or "")
    if not chosen or len(texts) not in (1, len(chosen)):
        raise ConfigError(
            f"{SECTION}.rollout_rs={names} needs one threshold for all, or one for each of its "
            f"{len(chosen)}; {SECTION}.rollout_rs_threshold={thresholds} has {len(texts)}."
        )
    texts = texts if len(texts) == len(chosen) else texts * len(chosen)
    return tuple(_criterion(name, text) for name, text in zip(chosen, texts, strict=True))


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _criterion(name: str, threshold: str) -> Criterion:
    if name.endswith("k1"):
        lower, upper = ratio_bounds(threshold)
        return Criterion(name, Bounds(math.log(upper), math.log(lower)))
    return Criterion(name, Bounds(divergence_bound(name, threshold)))


def _estimate(estimator: str, log_ratio: Tensor) -> Tensor:
    log_ratio = log_ratio.clamp(min=-LARGEST_LOG_RATIO, max=LARGEST_LOG_RATIO)
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return torch.expm1(log_ratio) - log_ratio
