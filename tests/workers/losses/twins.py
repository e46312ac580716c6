"""A twin of every policy loss in plain Python: token losses, one token at a time.

The twins get only the tokens inside the mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

from tests.workers.losses.plain_python import Rows

Samples = list[tuple[list[float], list[float], list[float]]]
"""(old log-probs, log-probs, advantages) of every row."""
Divergence = Callable[[float, float], float]
"""Distance of a token's log-prob from its old log-prob."""


def ratios_of(old: list[float], new: list[float]) -> list[float]:
    return [math.exp(after - before) for before, after in zip(old, new, strict=True)]


def clamp(number: float, lowest: float, highest: float) -> float:
    return min(max(number, lowest), highest)


def clipped_surrogate(
    ratio: float, advantage: float, low: float, high: float, c: float = math.inf
) -> float:
    objective = min(ratio * advantage, clamp(ratio, 1 - low, 1 + high) * advantage)
    return -max(objective, c * advantage) if advantage < 0 else -objective


def vanilla(rows: Samples, low: float, high: float, c: float) -> Rows:
    return [
        [
            clipped_surrogate(r, a, low, high, c)
            for r, a in zip(ratios_of(old, new), advantages, strict=True)
        ]
        for old, new, advantages in rows
    ]


def gspo(rows: Samples, low: float, high: float, c: float) -> Rows:
    losses = []
    for old, new, advantages in rows:
        log_ratio = sum(new) - sum(old)
        ratio = math.exp(log_ratio / max(len(new), 1))
        losses.append([clipped_surrogate(ratio, a, low, high) for a in advantages])
    return losses


def cispo(rows: Samples, low: float, high: float, c: float) -> Rows:
    losses = []
    for old, new, advantages in rows:
        weights = [clamp(ratio, 1 - low, 1 + high) for ratio in ratios_of(old, new)]
        losses.append([-w * a * lp for w, a, lp in zip(weights, advantages, new, strict=True)])
    return losses


def reinforce(rows: Samples, low: float, high: float, c: float) -> Rows:
    return [[-a * lp for a, lp in zip(advantages, new, strict=True)] for _, new, advantages in rows]


def geo_mean(rows: Samples, low: float, high: float, c: float) -> Rows:
    losses = []
    for old, new, advantages in rows:
        log_ratios = []
        for before, after, advantage in zip(old, new, advantages, strict=True):
            moved = after - before
            log_ratios.append(min(moved, high) if advantage > 0 else max(moved, -low))
        num_tokens = max(len(old), 1)
        ratio = math.exp(sum(log_ratios) / num_tokens)
        losses.append([-sum(advantages) / num_tokens * ratio] * len(old))
    return losses


def sapo(rows: Samples, low: float, high: float, c: float) -> Rows:
    losses: Rows = []
    for old, new, advantages in rows:
        losses.append([])
        for ratio, advantage in zip(ratios_of(old, new), advantages, strict=True):
            tau = 1.0 if advantage > 0 else 1.05
            gate = 4 / tau / (1 + math.exp(-tau * (ratio - 1)))
            losses[-1].append(-advantage * gate)
    return losses


def dppo(divergence: Divergence, rows: Samples, low: float, high: float, c: float) -> Rows:
    """Ignore tokens that have moved too far in their advantage's direction."""
    losses: Rows = []
    for old, new, advantages in rows:
        losses.append([])
        for before, after, advantage in zip(old, new, advantages, strict=True):
            distance = divergence(before, after)
            up = advantage > 0 and after > before and distance > high
            down = advantage <= 0 and after < before and distance > low
            weight = 0.0 if up or down else min(math.exp(after - before), c)
            losses[-1].append(-advantage * weight * after)
    return losses


def distance_of_probabilities(before: float, after: float) -> float:
    return abs(math.exp(after) - math.exp(before))


def binary_kl(before: float, after: float) -> float:
    old, new = math.exp(before), math.exp(after)
    others = math.log(max(1 - old, 1e-8) / max(1 - new, 1e-8))
    return old * (before - after) + (1 - old) * others


def dro(rows: Samples, low: float, high: float, c: float) -> Rows:
    losses = []
    for old, new, advantages in rows:
        tokens = zip(old, new, advantages, strict=True)
        losses.append([0.025 * (after - before) ** 2 - a * after for before, after, a in tokens])
    return losses


TWINS: Mapping[str, Callable[..., Rows]] = {
    "dppo_tv": partial(dppo, distance_of_probabilities),
    "dppo_kl": partial(dppo, binary_kl),
    "dro": dro,
    "vanilla": vanilla,
    "gspo": gspo,
    "luspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
    "gpg": reinforce,
    "geo_mean": geo_mean,
    "gmpo": geo_mean,
    "sapo": sapo,
}


def cispo_with_fixed_weights(rows: Samples, new: Rows, low: float, high: float, c: float) -> Rows:
    """Return the loss of log-probs `new`, with the weights of the log-probs in `rows`."""
    losses = []
    for (old, fixed, advantages), moved in zip(rows, new, strict=True):
        weights = [clamp(ratio, 1 - low, 1 + high) for ratio in ratios_of(old, fixed)]
        losses.append([-w * a * lp for w, a, lp in zip(weights, advantages, moved, strict=True)])
    return losses


def dppo_with_fixed_weights(
    divergence: Divergence, rows: Samples, new: Rows, low: float, high: float, c: float
) -> Rows:
    losses = []
    for (old, fixed, advantages), moved in zip(rows, new, strict=True):
        of_row = dppo(divergence, [(old, fixed, advantages)], low, high, c)[0]
        # each loss is linear in the log-prob: its factor is the loss over that log-prob
        losses.append([x / f * lp for x, f, lp in zip(of_row, fixed, moved, strict=True)])
    return losses


def gspo_with_fixed_ratio(rows: Samples, new: Rows, low: float, high: float, c: float) -> Rows:
    losses = []
    for (old, fixed, advantages), moved in zip(rows, new, strict=True):
        ratio = math.exp((sum(fixed) - sum(old)) / max(len(fixed), 1))
        tokens = zip(fixed, moved, advantages, strict=True)
        losses.append(
            [clipped_surrogate(ratio * math.exp(m - f), a, low, high) for f, m, a in tokens]
        )
    return losses


SURROGATES: Mapping[str, Callable[..., Rows]] = {
    "cispo": cispo_with_fixed_weights,
    "dppo_tv": partial(dppo_with_fixed_weights, distance_of_probabilities),
    "dppo_kl": partial(dppo_with_fixed_weights, binary_kl),
    "gspo": gspo_with_fixed_ratio,
    "luspo": gspo_with_fixed_ratio,
}
"""Losses with a detached weight: functions of the log-probs that have their gradients."""
