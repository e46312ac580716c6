"""Losses that learn from preferences, by name: of a reward model's scores, or of log-probs.

    @REWARD_MODEL_LOSSES.register("mine")
    def compute_pairwise_loss_mine(gap): ...                         # [pairs] -> [pairs]

    @PREFERENCE_LOSSES.register("mine")
    def compute_my_loss(log_probs, ref_log_probs, beta): ...         # [pairs, 2] -> [pairs]

A reward model should score the chosen response of a pair above the rejected one: the gap is chosen
score - rejected score - margin.

The parameters of a preference loss name its inputs: `COLUMNS`, and keys of the configuration. It
returns one number per pair or row. A loss with the parameter `desirable` learns from labeled rows,
[rows]; any other loss learns from pairs. A loss with `ref_log_probs` needs a reference, unless
`reference_free` sets them to 0.

`measures` returns the loss and the metrics of every pair or row as columns, which
`workers.roles.rows` averages over the rows of a step, and `trainer.preference.step` over the
validation set.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from verl_like.registry import CallSignature, Registry, check_by_name, check_call

PairwiseLoss = Callable[[Tensor], Tensor]

REWARD_MODEL_LOSSES: Registry[PairwiseLoss] = Registry(
    "reward-model loss",
    partial(check_call, call=CallSignature("gap")),
    "gap [pairs] -> losses [pairs]",
)
"""Names for `loss` of a reward model's training.

    @REWARD_MODEL_LOSSES.register("squared")
    def compute_squared_loss(gap):
        return (1 - gap).square()

The gap is chosen score - rejected score - margin.
"""


@REWARD_MODEL_LOSSES.register("log_sigmoid")
def compute_pairwise_loss_log_sigmoid(gap: Tensor) -> Tensor:
    """-log sigmoid(gap), the negative log-likelihood of the Bradley-Terry model.

    Source: InstructGPT, arXiv 2203.02155, equation 1
    """
    return -logsigmoid(gap)


@REWARD_MODEL_LOSSES.register("log_exp")
def compute_pairwise_loss_log_exp(gap: Tensor) -> Tensor:
    """log(1 + exp(-gap)): the same function as `log_sigmoid`, written differently.

    Source: the LogExpLoss of ColossalAI's chat application
    """
    return softplus(-gap)


def get_pairwise_loss(name: str) -> PairwiseLoss:
    """Return the loss registered under this name, or your function by its dotted path."""
    return REWARD_MODEL_LOSSES.look_up(name)


def compute_reward_loss(
    loss: PairwiseLoss, scores: Tensor, margins: Tensor, center_coef: float
) -> Tensor:
    """Return the loss [pairs] of `scores` [pairs, 2] and `margins` [pairs].

    `center_coef` times the square of the sum of a pair's scores is added, to pull scores toward
    zero.

    Source: the margin is from Llama 2, arXiv 2307.09288, equation 2; the centering is from arXiv
    2312.09244, equation 2
    """
    chosen, rejected = scores.unbind(dim=1)
    losses = loss(chosen - rejected - margins)
    return losses + center_coef * (chosen + rejected) ** 2 if center_coef else losses


def rank_accuracy(scores: Tensor) -> Tensor:
    """Return 1 for each pair whose chosen score is higher, 0.5 for a tie, otherwise 0."""
    gap = scores[:, 0] - scores[:, 1]
    return (gap > 0).to(scores.dtype) + 0.5 * (gap == 0)


PreferenceLoss = Callable[..., Tensor]

PREFERENCE_LOSSES: Registry[PreferenceLoss] = Registry(
    "preference loss", check_by_name, "(<columns and settings by name>) -> losses [pairs]"
)
"""Names for `loss` of preference training.

    @PREFERENCE_LOSSES.register("logistic")
    def compute_logistic_loss(log_probs, ref_log_probs, beta):
        ratios = log_probs - ref_log_probs              # [pairs, 2]: chosen, rejected
        return -torch.nn.functional.logsigmoid(beta * (ratios[:, 0] - ratios[:, 1]))

A parameter's name says what it gets: a column, such as `log_probs` or `num_tokens`, or a key of the
recipe, such as `beta`.
"""
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


LABELED_COLUMNS = ("desirable", "mismatched_kl", "label_share")
"""Columns that only labeled rows have. `label_share` is the fraction of the batch's rows with the
same label as the row.
"""
SFT_LENGTH = "sft_length"
"""Column of pairs with `sft_agg_mode=token-mean`: the mean length of the batch's chosen responses,
so that the mean over pairs is a mean over tokens.
"""


def measures(columns: Mapping[str, Tensor], settings: Any) -> dict[str, Tensor]:
    """Return columns by name, [pairs] or [rows]; only `loss` has a gradient."""
    if settings.reference_free:
        columns = {**columns, "ref_log_probs": torch.zeros_like(columns["log_probs"])}
    if "desirable" in columns:
        return _row_measures(columns, settings)
    return _pair_measures(columns, settings)


def rewards(columns: Mapping[str, Tensor], settings: Any) -> Tensor:
    """Return the reward that the loss implies for each response.

    It is beta times the log-ratio to the reference, or for a loss that does not read
    `ref_log_probs`, beta times the log-prob per token. For a loss without beta, beta is 1.
    """
    log_probs = columns["log_probs"].detach()
    takes_beta = "beta" in parameters_of(PREFERENCE_LOSSES.look_up(settings.loss))
    beta = settings.beta if takes_beta else 1.0
    if "ref_log_probs" in columns:
        return beta * (log_probs - columns["ref_log_probs"])
    return beta * per_token(log_probs, columns["num_tokens"])


def _pair_measures(columns: Mapping[str, Tensor], settings: Any) -> dict[str, Tensor]:
    """Return the loss and the metrics of each pair."""
    log_probs, num_tokens = columns["log_probs"], columns["num_tokens"]
    loss = compute_losses(settings.loss, columns, settings)
    if settings.sft_coef:
        length = columns.get(SFT_LENGTH, num_tokens[:, 0])
        loss = loss - settings.sft_coef * per_token(log_probs[:, 0], length)

    shown = _shown(columns, settings)
    margin = gap(shown["rewards"])
    measured = {
        "loss": loss,
        "rewards/margin": margin,
        "rewards/accuracy": (margin > 0).to(loss),
        "lengths/mean": num_tokens.mean(dim=1),
    }
    if "ref_log_probs" in columns and not settings.reference_free:
        measured["kl/row"] = (log_probs.detach() - columns["ref_log_probs"]).mean(dim=1)
    for name, of_sides in shown.items():
        measured[f"{name}/chosen"], measured[f"{name}/rejected"] = of_sides.unbind(dim=1)
    return measured


def _row_measures(columns: Mapping[str, Tensor], settings: Any) -> dict[str, Tensor]:
    """Return the loss and the metrics of each labeled response."""
    is_good = columns["desirable"] != 0
    of_labels = {}
    for name, of_rows in _shown(columns, settings).items():
        # so that its mean over all rows is its mean over the rows with this label
        of_label = of_rows / columns["label_share"]
        of_labels[f"{name}/chosen"] = of_label * is_good
        of_labels[f"{name}/rejected"] = of_label * ~is_good

    log_ratio = columns["log_probs"].detach() - columns["ref_log_probs"]
    is_right = (log_ratio > columns["mismatched_kl"]) == is_good
    return {
        "loss": compute_losses(settings.loss, columns, settings),
        "rewards/margin": of_labels["rewards/chosen"] - of_labels["rewards/rejected"],
        "rewards/accuracy": is_right.to(log_ratio),
        "lengths/mean": columns["num_tokens"],
        "desirable": is_good.to(log_ratio),
        "kl/row": log_ratio,
        "kl/mismatched": columns["mismatched_kl"],
        **of_labels,
    }


def _shown(columns: Mapping[str, Tensor], settings: Any) -> dict[str, Tensor]:
    """Return the columns that are reported separately for chosen and rejected responses."""
    return {
        "rewards": rewards(columns, settings),
        "log_probs": columns["log_probs"].detach(),
        "lengths": columns["num_tokens"],
    }
