"""The figures of the rollout correction: of its weights, of each criterion, of what was rejected.

Names are verl's, under `rollout_corr/`. All that is kept are sums and maxima, so that parts of a
batch, on several ranks or in several micro-batches, add up to the figures of the whole. Rows
without tokens are in none of them. Filled by `correction.RolloutCorrection`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from workers.losses.correction_bounds import Bounds

SUMS = (
    *("tokens", "token_sum", "clamped_sum", "clamped_square"),
    *("judged", "judged_high", "judged_low"),
    *("rows", "row_sum", "row_square", "row_high", "row_low"),
)
MAXIMA = ("extreme", "minus_extreme", "row", "minus_row", "row_deviation")


class Values(NamedTuple):
    """One quantity in a part of a batch, in flat lists of numbers."""

    tokens: Tensor
    """Of every token."""
    rows: Tensor
    """Of every sequence that has tokens."""
    extremes: Tensor
    """Those of which the largest and the smallest are shown."""
    judged: Tensor
    """Those compared with the bounds."""
    judged_rows: Tensor
    """The same of sequences."""


class Spread:
    """How one quantity lies over tokens, and over sequences."""

    def __init__(self, bounds: Bounds, ideal: float) -> None:
        """Counted as high and low is what leaves `bounds`; `ideal` is its value at equal policies.

        For the standard deviation, values are clamped to the upper bound, and to the lower one or
        zero, whichever is less.
        """
        self.bounds = bounds
        self.ideal = ideal
        self.floor = min(0.0, bounds.lower or 0.0)
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64)
        self.maxima = torch.full((len(MAXIMA),), -torch.inf, dtype=torch.float64)

    def add(self, values: Values) -> None:
        """Take in one part of a batch."""
        if not len(values.tokens):
            return
        tokens, rows, extremes, judged, judged_rows = (numbers.detach().cpu() for numbers in values)
        tokens, rows = tokens.double(), rows.double()
        clamped = tokens.clamp(self.floor, self.bounds.upper)
        own = (len(tokens), tokens.sum(), clamped.sum(), torch.dot(clamped, clamped))
        compared = (len(judged), *self._outside(judged))
        of_rows = (len(rows), rows.sum(), rows.square().sum(), *self._outside(judged_rows))
        self.sums += torch.tensor([*own, *compared, *of_rows], dtype=torch.float64)

        deviation = (rows - self.ideal).abs().max()
        largest = (extremes.max(), -extremes.min(), rows.max(), -rows.min(), deviation)
        self.maxima = torch.maximum(self.maxima, torch.stack([x.double() for x in largest]))

    def _outside(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """(how many lie above the bounds, how many below)."""
        lower = -torch.inf if self.bounds.lower is None else self.bounds.lower
        return torch.count_nonzero(values > self.bounds.upper), torch.count_nonzero(values < lower)

    def metrics(self, fraction: str = "fraction") -> dict[str, float]:
        """The figures; none where there were no tokens. `fraction_high` is called as asked."""
        total = dict(zip(SUMS, self.sums.tolist(), strict=True))
        largest = dict(zip(MAXIMA, self.maxima.tolist(), strict=True))
        if not total["tokens"]:
            return {}

        rows = total["rows"]
        mean_square = total["clamped_square"] / total["tokens"]
        clamped_mean = total["clamped_sum"] / total["tokens"]
        row_squares = total["row_square"] - total["row_sum"] ** 2 / rows
        return {
            "mean": total["token_sum"] / total["tokens"],
            "std": math.sqrt(max(mean_square - clamped_mean**2, 0.0)),
            "max": largest["extreme"],
            "min": -largest["minus_extreme"],
            f"{fraction}_high": total["judged_high"] / total["judged"],
            f"{fraction}_low": total["judged_low"] / total["judged"],
            "seq_mean": total["row_sum"] / rows,
            "seq_std": math.sqrt(max(row_squares, 0.0) / (rows - 1)) if rows > 1 else 0.0,
            "seq_max": largest["row"],
            "seq_min": -largest["minus_row"],
            "seq_max_deviation": largest["row_deviation"],
            "seq_fraction_high": total["row_high"] / rows,
            "seq_fraction_low": total["row_low"] / rows,
        }

    @property
    def sample_size(self) -> float:
        """Effective over real number of tokens: the square of the weights' mean over that of their
        squares.
        """
        total = dict(zip(SUMS, self.sums.tolist(), strict=True))
        if not total["clamped_square"]:
            return 0.0
        return float(total["clamped_sum"] ** 2 / total["clamped_square"] / total["tokens"])


class CorrectionGauge:
    """Collects the figures of a correction over any number of parts of a batch."""

    def __init__(self, weights: Bounds | None, criteria: dict[str, Bounds]) -> None:
        """`weights` are the bounds of importance weights, if there are any; `criteria` by name."""
        self.spreads: dict[str, Spread] = {}
        if weights is not None:
            lower = 1 / weights.upper if weights.lower is None else weights.lower
            self.spreads["rollout_is"] = Spread(Bounds(weights.upper, lower), ideal=1.0)
        for name, bounds in criteria.items():
            self.spreads[f"rollout_rs_{name}"] = Spread(bounds, ideal=0.0)
        self.fractions: dict[str, Tensor] = {}

    def add(self, name: str, values: Values) -> None:
        """Take in the values of one quantity."""
        self.spreads[name].add(values)

    def add_fraction(self, name: str, part: Tensor, whole: int) -> None:
        """Take in how many of how many have a property."""
        counts = torch.tensor([float(part), float(whole)], dtype=torch.float64)
        self.fractions[name] = self.fractions.get(name, torch.zeros_like(counts)) + counts

    def all_reduce(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Add up over ranks; collective. Every rank has made at least one pass."""
        if group is None:
            return
        for values in (*(spread.sums for spread in self.spreads.values()), *self._counts()):
            _reduce(values, dist.ReduceOp.SUM, group, device)
        for spread in self.spreads.values():
            _reduce(spread.maxima, dist.ReduceOp.MAX, group, device)

    def _counts(self) -> list[Tensor]:
        return [self.fractions[name] for name in sorted(self.fractions)]

    def metrics(self) -> dict[str, float]:
        """The figures under verl's names."""
        found = {}
        for name, spread in self.spreads.items():
            is_weight = name == "rollout_is"
            figures = spread.metrics("ratio_fraction" if is_weight else "fraction")
            if is_weight and figures:
                figures["eff_sample_size"] = spread.sample_size
            found |= {f"rollout_corr/{name}_{figure}": value for figure, value in figures.items()}

        for name, counts in self.fractions.items():
            part, whole = counts.tolist()
            if whole:
                found[f"rollout_corr/{name}"] = part / whole
        return found


def _reduce(
    values: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Reduce a CPU tensor over the ranks, in place."""
    moved = values.to(device)
    dist.all_reduce(moved, op=op, group=group)
    values.copy_(moved)
