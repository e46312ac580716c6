"""The loss and the metrics of every pair or row, as columns to average.

`workers.roles.preference` averages the columns over the rows of a step, and
`trainer.preference.step` over the validation set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from workers.losses.preference.registry import (
    PREFERENCE_LOSSES,
    compute_losses,
    gap,
    parameters_of,
    per_token,
)

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
        return _of_rows(columns, settings)
    return _of_pairs(columns, settings)


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


def _of_pairs(columns: Mapping[str, Tensor], settings: Any) -> dict[str, Tensor]:
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


def _of_rows(columns: Mapping[str, Tensor], settings: Any) -> dict[str, Tensor]:
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
