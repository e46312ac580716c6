"""Rewards and advantages normalised by mean and standard deviation over all steps of the run.

`algorithm.running_norm` names which of them. The state is a part of every checkpoint, so a resumed
run goes on with the same moments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl_like.tensor_ops import last_places
from workers.columns import read_columns, write_columns

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto

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
        inside = columns["response_mask"].to(columns["advantages"].dtype)
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
