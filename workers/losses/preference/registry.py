"""Preference losses by name, and what a loss reads, which its parameters say.

    @PREFERENCE_LOSSES.register("mine")
    def compute_my_loss(log_probs, ref_log_probs, beta): ...         # [pairs, 2] -> [pairs]

A loss with the parameter `desirable` learns rows with a label, [rows]; any other learns pairs. One
with `ref_log_probs` has a reference.
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

COLUMNS: Mapping[str, str] = {
    "log_probs": "log-probs of the responses: sums over their tokens",
    "ref_log_probs": "the same under the reference",
    "num_tokens": "tokens of the responses",
    "margin": "of a pair: the least by which its file wants the chosen one to be better, or 0",
    "desirable": "whether the response of a row is a good one",
    "mismatched_kl": "KTO's estimate of the KL to the reference, the same in every row",
}
"""What a loss may read of a batch: [pairs, 2], chosen and rejected, or [rows]; margins: [pairs]."""


def parameters_of(loss: PreferenceLoss) -> list[str]:
    """The names of the columns and keys that a loss reads."""
    return list(inspect.signature(loss).parameters)


def compute_losses(name: str, columns: Mapping[str, Tensor], settings: Any) -> Tensor:
    """The loss of every pair or row; keys are attributes of `settings`."""
    loss = PREFERENCE_LOSSES.look_up(name)
    arguments = {}
    for parameter in parameters_of(loss):
        is_column = parameter in COLUMNS
        arguments[parameter] = columns[parameter] if is_column else getattr(settings, parameter)
    return loss(**arguments)


def per_token(log_probs: Tensor, num_tokens: Tensor) -> Tensor:
    """The mean over a response's tokens; zero for one without any."""
    return log_probs / num_tokens.clamp(min=1)


def smoothed(logits: Tensor, label_smoothing: float) -> Tensor:
    """-log sigmoid(logits), where a share of the pairs is taken to be the wrong way round."""
    right, wrong = -logsigmoid(logits), -logsigmoid(-logits)
    return (1 - label_smoothing) * right + label_smoothing * wrong


def gap(of_sides: Tensor) -> Tensor:
    """[pairs, 2] -> [pairs]: the chosen side's less the rejected one's."""
    return of_sides[:, 0] - of_sides[:, 1]
