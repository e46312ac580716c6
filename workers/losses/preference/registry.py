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

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from verl_like.registry import Registry
from verl_like.signatures import check_by_name

PreferenceLoss = Callable[..., Tensor]

PREFERENCE_LOSSES: Registry[PreferenceLoss] = Registry("preference loss", check_by_name)
"""Names for `loss` of preference training: functions from log-probs [pairs, 2] to losses."""
COLUMNS: Mapping[str, str] = {
    "log_probs": "log-probs of the responses: sums over their tokens",
    "ref_log_probs": "the same under the reference",
    "num_tokens": "tokens of the responses",
    "margin": "the margin of a pair in its file, or 0",
    "desirable": "true if the response of a row is good",
    "mismatched_kl": "KTO's estimate of the KL to the reference, the same in every row",
}
"""Columns that a loss may read: [pairs, 2] (chosen, rejected) or [rows]; margins are [pairs]."""
_NEAREST_TO_CERTAIN = -1e-12
"""Log-probs per token are clamped to this, because the odds of a log-prob of 0 are infinite."""


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


@PREFERENCE_LOSSES.register("dpo")
def compute_dpo_loss(
    log_probs: Tensor, ref_log_probs: Tensor, margin: Tensor, beta: float, label_smoothing: float
) -> Tensor:
    """`-(1 - e) log σ(x) - e log σ(-x)` with `x = beta h - margin`.

    `h` is the log-ratio to the reference, chosen minus rejected. `e`, the `label_smoothing`, is the
    assumed fraction of swapped pairs. If `e` is above 0, the loss is cDPO (Mitchell, 2023). With
    margins, the loss is ODPO (arXiv 2402.10571).

    Source: DPO, arXiv 2305.18290, equation 7
    """
    return smoothed(beta * gap(log_probs - ref_log_probs) - margin, label_smoothing)


@PREFERENCE_LOSSES.register("hinge")
def compute_hinge_loss(
    log_probs: Tensor, ref_log_probs: Tensor, margin: Tensor, beta: float
) -> Tensor:
    """`max(0, 1 - (beta h - margin))`, with `h` as in DPO.

    Source: RSO, arXiv 2309.06657, hinge-norm; SLiC, arXiv 2305.10425, has the hinge
    """
    return (1 - (beta * gap(log_probs - ref_log_probs) - margin)).clamp(min=0)


@PREFERENCE_LOSSES.register("ipo")
def compute_ipo_loss(
    log_probs: Tensor, ref_log_probs: Tensor, num_tokens: Tensor, beta: float
) -> Tensor:
    """`(h - 1 / (2 beta))^2`. `h` is the log-ratio per token, chosen minus rejected.

    `beta` is the paper's tau. As in TRL, the log-ratio is a mean over the response's tokens.

    Source: IPO, arXiv 2310.12036, equation 17
    """
    h = gap(per_token(log_probs - ref_log_probs, num_tokens))
    return (h - 1 / (2 * beta)).square()


@PREFERENCE_LOSSES.register("kto")
def compute_kto_loss(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    desirable: Tensor,
    mismatched_kl: Tensor,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """`w (1 - σ(s beta (r - z)))`, with `r` the log-ratio to the reference.

    A good response has `s = 1` and `w = desirable_weight`, a bad response `s = -1` and `w =
    undesirable_weight`. `z` estimates the KL to the reference, without gradient. It is the mean
    log-ratio, at least 0, over a batch whose responses are paired with the wrong prompts.

    Source: KTO, arXiv 2402.01306, section 4.1, equation 7
    """
    is_good = desirable != 0
    above = beta * (log_probs - ref_log_probs - mismatched_kl)
    weights = above.new_tensor([undesirable_weight, desirable_weight])
    return weights[is_good.long()] * torch.sigmoid(torch.where(is_good, -above, above))


@PREFERENCE_LOSSES.register("orpo")
def compute_orpo_loss(log_probs: Tensor, num_tokens: Tensor, orpo_lambda: float) -> Tensor:
    """`-m_chosen - orpo_lambda log σ(log odds_chosen - log odds_rejected)`.

    `m` is the log-prob per token, and `odds = e^m / (1 - e^m)`. The first term is the SFT loss.

    Source: ORPO, arXiv 2403.07691, equations 6 and 7
    """
    means = per_token(log_probs, num_tokens)
    certain = means.clamp(max=_NEAREST_TO_CERTAIN)
    log_odds = certain - torch.log(-torch.expm1(certain))
    return -means[:, 0] - orpo_lambda * logsigmoid(gap(log_odds))


@PREFERENCE_LOSSES.register("simpo")
def compute_simpo_loss(
    log_probs: Tensor,
    num_tokens: Tensor,
    margin: Tensor,
    beta: float,
    simpo_gamma: float,
    label_smoothing: float,
) -> Tensor:
    """The loss of DPO with `x = beta d - simpo_gamma - margin`.

    `d` is the log-prob per token, chosen minus rejected.

    Source: SimPO, arXiv 2405.14734, equation 6
    """
    logits = beta * gap(per_token(log_probs, num_tokens)) - simpo_gamma - margin
    return smoothed(logits, label_smoothing)
