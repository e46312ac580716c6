"""Preference losses by name. The parameters of a loss name its inputs.

    @PREFERENCE_LOSSES.register("mine")
    def compute_my_loss(log_probs, ref_log_probs, beta): ...         # [pairs, 2] -> [pairs]

A loss with the parameter `desirable` learns from labeled rows, [rows]; any other loss learns from
pairs. A loss with `ref_log_probs` needs a reference, unless `reference_free` sets them to 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn.functional import logsigmoid

from verl_like.registry import Registry
from verl_like.signatures import check_by_name

PreferenceLoss = Callable[..., Tensor]

PREFERENCE_LOSSES: Registry[PreferenceLoss] = Registry("preference loss", check_by_name)
"""Names for `loss` of preference training."""
COLUMNS: Mapping[str, str] = {
    "log_probs": "log-probs of the responses: sums over their tokens",
    "ref_log_probs": "the same under the reference",
    "num_tokens": "tokens of the responses",
    "margin": "the margin of a pair in its file, or 0",
    "desirable": "true if the response of a row is good",
    "mismatched_kl": "KTO's estimate of the KL to the reference, the same in every row",
}
"""Columns that a loss may read: [pairs, 2] (chosen, rejected) or [rows]; margins are [pairs]."""


def parameters_of(loss: PreferenceLoss) -> list[str]:
    """Return the names of the columns and keys that a loss reads."""
    return list(inspect.signature(loss).parameters)


def compute_losses(name: str, columns: Mapping[str, Tensor], settings: Any) -> Tensor:
    """Return the loss of every pair or row; its config keys are read from `settings`."""
    loss = PREFERENCE_LOSSES.look_up(name)
    arguments = {}
    for parameter in parameters_of(loss):
        is_column = parameter in COLUMNS
        arguments[parameter] = columns[parameter] if is_column else getattr(settings, parameter)
    return loss(**arguments)


def per_token(log_probs: Tensor, num_tokens: Tensor) -> Tensor:
    """Return the mean over the tokens of each response; zero for an empty response."""
    return log_probs / num_tokens.clamp(min=1)


def smoothed(logits: Tensor, label_smoothing: float) -> Tensor:
    """Return -log sigmoid(logits) if a fraction `label_smoothing` of the pairs is swapped."""
    right, wrong = -logsigmoid(logits), -logsigmoid(-logits)
    return (1 - label_smoothing) * right + label_smoothing * wrong


def gap(of_sides: Tensor) -> Tensor:
    """Return the chosen side minus the rejected side: [pairs, 2] -> [pairs]."""
    return of_sides[:, 0] - of_sides[:, 1]
