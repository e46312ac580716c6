"""What the worker that trains a reward model reads."""

from __future__ import annotations

from dataclasses import dataclass

from verl_like.config_key import key
from workers.config.rows import RowWorkerConfig

SCORE_AT = ("last_token", "legacy_mean")
"""Where a row's score may be read."""


@dataclass(kw_only=True)
class RewardTrainingConfig(RowWorkerConfig):
    """The model, and the loss of its scores."""

    loss: str = key("log_sigmoid", registry="pairwise loss")
    """Loss of the gap between the scores of a pair."""
    center_coef: float = key(0.0, at_least=0)
    """Weight of (chosen score + rejected score)², which keeps the scores around zero."""
    score_at: str | None = key(None, choices=SCORE_AT)
    """A row's score is its last token's, or legacy_mean: the mean over its tokens; null takes what
    the model's folder says, or last_token.
    """
