"""Metrics of the rollout correction: of its weights, each criterion, and the rejected tokens.

The names are verl's, under `rollout_corr/`. Rows without tokens are not counted.
`correction.RolloutCorrection` fills the gauges.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from workers.losses.aggregate import Gauge, MaskedRows
from workers.losses.rejection import Bounds


class Spread(Gauge):
    """Accumulates the distribution of one quantity over tokens and over sequences."""

    def __init__(self, bounds: Bounds, ideal: float) -> None:
        """Count values outside `bounds` as high or low; `ideal` is the value for equal policies.

        For the standard deviation and the effective sample size, values are clamped to the upper
        bound, and to the lower bound or zero, whichever is less.
        """
        super().__init__()
        self.bounds = bounds
        self.ideal = ideal
        self.floor = min(0.0, bounds.lower or 0.0)

    def add(self, part: MaskedRows, values: Tensor, raw: Tensor, by_token: bool) -> None:
        """Add some rows; the values in `raw` are compared with the bounds.

        Unless `by_token`, all tokens of a row have the same value.
        """
        if not part.num_tokens:
            return
        tokens, rows = part.tokens(values).cpu().double(), part.rows(values).cpu().double()
        raw_rows = part.rows(raw).cpu()
        judged = part.tokens(raw).cpu() if by_token else raw_rows
        extremes = tokens if by_token else raw_rows.double()
        clamped = tokens.clamp(self.floor, self.bounds.upper)
        lower = -torch.inf if self.bounds.lower is None else self.bounds.lower
        self.note(
            {
                "tokens": len(tokens),
                "token_sum": tokens.sum(),
                "clamped_sum": clamped.sum(),
                "clamped_square": torch.dot(clamped, clamped),
                "judged": len(judged),
                "judged_high": torch.count_nonzero(judged > self.bounds.upper),
                "judged_low": torch.count_nonzero(judged < lower),
                "rows": len(rows),
                "row_sum": rows.sum(),
                "row_square": rows.square().sum(),
                "row_high": torch.count_nonzero(raw_rows > self.bounds.upper),
                "row_low": torch.count_nonzero(raw_rows < lower),
            },
            {
                "extreme": extremes.max(),
                "minus_extreme": -extremes.min(),
                "row": rows.max(),
                "minus_row": -rows.min(),
                "row_deviation": (rows - self.ideal).abs().max(),
            },
        )

    def metrics(self, is_weight: bool) -> dict[str, float]:
        """Return the metrics; empty without tokens."""
        total, largest = self.sums, self.maxima
        if not total:
            return {}

        rows, fraction = total["rows"], "ratio_fraction" if is_weight else "fraction"
        mean_square = total["clamped_square"] / total["tokens"]
        clamped_mean = total["clamped_sum"] / total["tokens"]
        row_squares = total["row_square"] - total["row_sum"] ** 2 / rows
        metrics = {
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
        if is_weight:  # effective sample size per token
            square = total["clamped_square"]
            effective = total["clamped_sum"] ** 2 / square if square else 0.0
            metrics["eff_sample_size"] = effective / total["tokens"]
        return metrics


class CorrectionGauge(Gauge):
    """Accumulates the metrics of a correction. Each counter is a pair (part, whole)."""

    def __init__(self, weights: Bounds | None, criteria: dict[str, Bounds]) -> None:
        """Take the bounds of the importance weights, and those of each criterion by name.

        Truncated weights have no lower bound; weights below 1 / upper count as low.
        """
        super().__init__()
        self.spreads: dict[str, Spread] = {}
        if weights is not None:
            lower = 1 / weights.upper if weights.lower is None else weights.lower
            self.spreads["rollout_is"] = Spread(Bounds(weights.upper, lower), ideal=1.0)
        for name, bounds in criteria.items():
            self.spreads[f"rollout_rs_{name}"] = Spread(bounds, ideal=0.0)

    def add_fraction(self, name: str, part: float | Tensor, total: int) -> None:
        """Add `part` and `total` to the counts of a fraction."""
        self.note({name: part, f"{name} of": total})

    def add_rejected(self, name: str, accepted: Tensor, part: MaskedRows) -> None:
        """Add the fractions of rejected tokens and of rows with a rejected token."""
        of_rows = (part.mask & ~accepted).sum(dim=-1)
        self.add_fraction(f"{name}_masked_fraction", of_rows.sum(), part.num_tokens)
        self.add_fraction(f"{name}_seq_masked_fraction", (of_rows > 0).sum(), part.num_rows)

    def all_reduce(self, group: dist.ProcessGroup | None) -> None:
        """Combine the counts of all ranks; every rank must call this."""
        for gauge in self.spreads.values():
            gauge.all_reduce(group)
        super().all_reduce(group)

    def metrics(self) -> dict[str, float]:
        """Return the metrics under verl's names."""
        metrics = {}
        for name, spread in self.spreads.items():
            for figure, value in spread.metrics(name == "rollout_is").items():
                metrics[f"rollout_corr/{name}_{figure}"] = value
        for name, part in self.sums.items():
            total = self.sums.get(f"{name} of")
            if total:
                metrics[f"rollout_corr/{name}"] = part / total
        return metrics
