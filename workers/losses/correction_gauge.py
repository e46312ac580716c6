"""The figures of the rollout correction: of its weights, of each criterion, of what was rejected.

Names are verl's, under `rollout_corr/`. Rows without tokens are in none of them. Filled by
`correction.RolloutCorrection`.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from workers.losses.correction_bounds import Bounds
from workers.losses.gauge import Gauge


class Part:
    """Some rows of a batch: where their tokens are, and how many."""

    def __init__(self, inside: Tensor) -> None:
        self.inside = inside
        self.lengths = inside.sum(dim=-1)
        self.filled = self.lengths > 0
        self.places = inside.flatten().nonzero().squeeze(-1)
        self.num_tokens = len(self.places)
        self.num_rows = int(self.filled.sum())

    def tokens(self, values: Tensor) -> Tensor:
        """A flat list of those inside."""
        return values.expand_as(self.inside).flatten().index_select(0, self.places)

    def rows(self, values: Tensor) -> Tensor:
        """The mean of every row that has tokens; `values` are zero outside, or one a row."""
        if values.shape[-1] == 1:
            return values[self.filled, 0]
        return (values.sum(dim=-1) / self.lengths)[self.filled]


class Spread(Gauge):
    """How one quantity lies over tokens, and over sequences."""

    def __init__(self, bounds: Bounds, ideal: float) -> None:
        """Counted as high and low is what leaves `bounds`; `ideal` is its value at equal policies.

        For the standard deviation, values are clamped to the upper bound, and to the lower one or
        zero, whichever is less.
        """
        super().__init__()
        self.bounds = bounds
        self.ideal = ideal
        self.floor = min(0.0, bounds.lower or 0.0)

    def add(self, part: Part, values: Tensor, raw: Tensor, by_token: bool) -> None:
        """Take in one part of a batch; compared with the bounds are the values `raw`.

        Unless `by_token`, the values of a row's tokens are one.
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
        """The figures; none where there were no tokens."""
        total, largest = self.sums, self.maxima
        if not total:
            return {}

        rows, fraction = total["rows"], "ratio_fraction" if is_weight else "fraction"
        mean_square = total["clamped_square"] / total["tokens"]
        clamped_mean = total["clamped_sum"] / total["tokens"]
        row_squares = total["row_square"] - total["row_sum"] ** 2 / rows
        found = {
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
        if is_weight:  # effective over real number of tokens
            square = total["clamped_square"]
            effective = total["clamped_sum"] ** 2 / square if square else 0.0
            found["eff_sample_size"] = effective / total["tokens"]
        return found


class CorrectionGauge(Gauge):
    """Collects the figures of a correction; its sums are counts, of a part and of the whole."""

    def __init__(self, weights: Bounds | None, criteria: dict[str, Bounds]) -> None:
        """`weights` are the bounds of importance weights, if there are any; `criteria` by name."""
        super().__init__()
        self.spreads: dict[str, Spread] = {}
        if weights is not None:
            lower = 1 / weights.upper if weights.lower is None else weights.lower
            self.spreads["rollout_is"] = Spread(Bounds(weights.upper, lower), ideal=1.0)
        for name, bounds in criteria.items():
            self.spreads[f"rollout_rs_{name}"] = Spread(bounds, ideal=0.0)

    def add_fraction(self, name: str, part: float | Tensor, whole: int) -> None:
        """Take in how many of how many have a property."""
        self.note({name: part, f"{name} of": whole})

    def add_rejected(self, name: str, kept: Tensor, part: Part) -> None:
        """The shares of tokens that are rejected, and of rows in which any is."""
        of_rows = (part.inside & ~kept).sum(dim=-1)
        self.add_fraction(f"{name}_masked_fraction", of_rows.sum(), part.num_tokens)
        self.add_fraction(f"{name}_seq_masked_fraction", (of_rows > 0).sum(), part.num_rows)

    def all_reduce(self, group: dist.ProcessGroup | None) -> None:
        """Add up over ranks; collective."""
        for gauge in self.spreads.values():
            gauge.all_reduce(group)
        super().all_reduce(group)

    def metrics(self) -> dict[str, float]:
        """The figures under verl's names."""
        found = {}
        for name, spread in self.spreads.items():
            for figure, value in spread.metrics(name == "rollout_is").items():
                found[f"rollout_corr/{name}_{figure}"] = value
        for name, part in self.sums.items():
            whole = self.sums.get(f"{name} of")
            if whole:
                found[f"rollout_corr/{name}"] = part / whole
        return found
