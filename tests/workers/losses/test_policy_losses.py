"""Every policy loss next to a twin in plain Python, and over micro-batches."""

from __future__ import annotations

import math
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers.losses.plain_python import (
    CONFIG,
    ROWS,
    WIDTH,
    Columns,
    Rows,
    aggregate,
    denominators,
    tokens_of,
)
from tests.workers.losses.twins import SURROGATES, TWINS
from verl_like.errors import ConfigError
from workers.config import LOSS_AGG_MODES, ActorConfig
from workers.losses.registry import (
    POLICY_LOSSES,
    clip_widths,
    get_policy_loss,
    traits_of,
)

CHOOSING = [name for name, loss in POLICY_LOSSES.items() if traits_of(loss).choose_tokens]
"""Losses that choose tokens of a mini-batch; `test_covariance_losses.py` has their twins."""
BY_TOKEN = [name for name in POLICY_LOSSES if name not in CHOOSING]


def test_every_policy_loss_has_a_twin() -> None:
    assert set(TWINS) == set(BY_TOKEN)
    assert set(CHOOSING) == {"clip_cov", "kl_cov"}


def naive_losses(name: str, batch: Columns) -> Rows:
    """Return a policy loss's token losses by its twin, under CONFIG's clip ranges."""
    columns = (
        tokens_of(batch[column], batch["response_mask"])
        for column in ("old_log_prob", "log_prob", "advantages")
    )
    return TWINS[name](list(zip(*columns, strict=True)), low=0.2, high=0.3, c=1.5)


def policy_inputs(batch: Columns, rows: slice = slice(None)) -> Columns:
    names = ("old_log_prob", "log_prob", "advantages", "response_mask")
    return {name: batch[name][rows] for name in names}


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", BY_TOKEN)
def test_policy_losses_equal_their_twins_with_and_without_weights(
    batch: Columns, name: str, mode: str
) -> None:
    losses = naive_losses(name, batch)
    weights = tokens_of(batch["weights"], batch["response_mask"])
    weighted = [
        [weight * loss for weight, loss in zip(*row, strict=True)]
        for row in zip(weights, losses, strict=True)
    ]
    for expected, columns in ((losses, {}), (weighted, {"rollout_is_weights": batch["weights"]})):
        loss, _ = POLICY_LOSSES[name](
            **policy_inputs(batch), **columns, loss_agg_mode=mode, config=CONFIG
        )
        assert loss.item() == pytest.approx(aggregate(expected, mode))


def chosen_tokens(batch: Columns, name: str) -> Columns:
    """Return the driver's choice of tokens; nothing for a loss without a choice."""
    inside = batch["response_mask"].bool()
    return {"chosen_tokens": inside & (batch["advantages"] > 0.5)} if name in CHOOSING else {}


def summed_over_cuts(batch: Columns, name: str, mode: str, cuts: list[int]) -> Columns:
    """Return the loss, its metrics and the gradient, summed over micro-batches of `cuts` rows."""
    leaf = batch["log_prob"].clone().requires_grad_()
    chosen = chosen_tokens(batch, name)
    total, start = {"loss": torch.zeros(())}, 0
    for size in cuts:
        inputs = policy_inputs(batch | {"log_prob": leaf}, slice(start, start + size))
        extra = denominators(batch["response_mask"])
        extra |= {key: column[start : start + size] for key, column in chosen.items()}
        loss, metrics = POLICY_LOSSES[name](**inputs, loss_agg_mode=mode, config=CONFIG, **extra)
        loss.backward()
        for key, value in {"loss": loss.detach(), **metrics}.items():
            total[key] = total.get(key, 0) + value
        start += size
    assert leaf.grad is not None
    return total | {"gradient": leaf.grad}


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_loss_gradient_and_metrics_do_not_depend_on_the_cut(
    batch: Columns, name: str, mode: str
) -> None:
    whole = summed_over_cuts(batch, name, mode, [ROWS])
    assert all(torch.isfinite(value).all() for value in whole.values())
    assert (whole["gradient"][batch["response_mask"] == 0] == 0).all()
    assert whole["gradient"].abs().sum() > 0
    for cuts in ([1] * ROWS, [4, 2]):
        for key, value in summed_over_cuts(batch, name, mode, cuts).items():
            message = partial("{}: {}".format, key)
            torch.testing.assert_close(value, whole[key], check_dtype=False, msg=message)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_batch_that_is_all_masked_has_zero_loss_and_zero_gradient(
    batch: Columns, name: str, mode: str
) -> None:
    leaf = batch["log_prob"].clone().requires_grad_()
    inputs = policy_inputs(
        batch | {"log_prob": leaf, "response_mask": torch.zeros(ROWS, WIDTH, dtype=torch.int64)}
    )
    loss, metrics = POLICY_LOSSES[name](**inputs, loss_agg_mode=mode, config=CONFIG)
    loss.backward()
    assert loss == 0
    assert (leaf.grad == 0).all()
    assert all(value == 0 for value in metrics.values())


@pytest.mark.parametrize("name", BY_TOKEN)
def test_on_policy_every_loss_has_the_policy_gradient(batch: Columns, name: str) -> None:
    mask = batch["response_mask"]
    leaf = batch["old_log_prob"].clone().requires_grad_()
    inputs = policy_inputs(batch | {"log_prob": leaf})
    # one advantage per row, as in GSPO's paper
    inputs["advantages"] = batch["advantages"][:, :1].expand(-1, WIDTH).nan_to_num()
    loss, metrics = POLICY_LOSSES[name](**inputs, loss_agg_mode="token-mean")
    loss.backward()
    torch.testing.assert_close(leaf.grad, -inputs["advantages"] * mask / mask.sum())
    assert metrics["actor/ppo_kl"] == 0


@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES) - set(SURROGATES)))
def test_the_gradient_matches_finite_differences(batch: Columns, name: str) -> None:
    inputs = policy_inputs(batch) | chosen_tokens(batch, name)
    log_prob = inputs.pop("log_prob").nan_to_num().requires_grad_()

    def loss_of(log_prob: Tensor) -> Tensor:
        return POLICY_LOSSES[name](log_prob=log_prob, **inputs, config=CONFIG)[0]

    assert torch.autograd.gradcheck(loss_of, [log_prob])


@pytest.mark.parametrize("name", SURROGATES)
def test_the_gradient_with_fixed_weights_matches_finite_differences(
    batch: Columns, name: str
) -> None:
    mask, step = batch["response_mask"], 1e-6
    leaf = batch["log_prob"].clone().requires_grad_()
    loss, _ = POLICY_LOSSES[name](
        **policy_inputs(batch | {"log_prob": leaf}), loss_agg_mode="token-sum", config=CONFIG
    )
    loss.backward()

    columns = [
        tokens_of(batch[column], mask) for column in ("old_log_prob", "log_prob", "advantages")
    ]
    rows = list(zip(*columns, strict=True))
    for row, t in mask.nonzero().tolist():
        number = int(mask[row, :t].sum())
        change = []
        for moved in (step, -step):
            new = [list(values) for values in columns[1]]
            new[row][number] += moved
            change.append(sum(map(sum, SURROGATES[name](rows, new, low=0.2, high=0.3, c=1.5))))
        assert leaf.grad[row, t].item() == pytest.approx(
            (change[0] - change[1]) / (2 * step), rel=1e-5, abs=1e-8
        )


def test_vanilla_reports_verls_metrics(batch: Columns) -> None:
    _, metrics = POLICY_LOSSES["vanilla"](**policy_inputs(batch), config=CONFIG)
    inside = batch["response_mask"].bool()
    log_ratio = (batch["log_prob"] - batch["old_log_prob"])[inside]
    ratio, advantages = log_ratio.exp(), batch["advantages"][inside]
    clipped = ((advantages > 0) & (ratio > 1.3)) | ((advantages < 0) & (ratio < 0.8))
    clipped_lower = (advantages < 0) & (ratio > 1.5)
    assert metrics["actor/ppo_kl"].item() == pytest.approx(-log_ratio.mean().item())
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(clipped.double().mean().item())
    assert metrics["actor/pg_clipfrac_lower"].item() == pytest.approx(
        clipped_lower.double().mean().item()
    )
    assert clipped.any()
    assert clipped_lower.any()


@pytest.mark.parametrize("name", ["cispo", "gspo", "geo_mean"])
def test_further_losses_report_the_fractions_of_clipped_tokens(batch: Columns, name: str) -> None:
    columns = (
        tokens_of(batch[column], batch["response_mask"])
        for column in ("old_log_prob", "log_prob", "advantages")
    )
    upper, lower = [], []
    for old, new, advantages in zip(*columns, strict=True):
        log_ratios = [b - a for a, b in zip(old, new, strict=True)]
        mean = sum(log_ratios) / max(len(log_ratios), 1)
        for token, advantage in zip(log_ratios, advantages, strict=True):
            ratio = math.exp(mean if name == "gspo" else token)
            rises = advantage > 0
            if name == "geo_mean":  # it clips log-ratios
                upper.append(rises and token > 0.3)
                lower.append(not rises and token < -0.2)
            elif name == "gspo":
                upper.append(ratio > 1.3 if rises else ratio < 0.8)
            else:
                upper.append(not 0.8 < ratio < 1.3)
    _, metrics = POLICY_LOSSES[name](**policy_inputs(batch), config=CONFIG)
    assert 0 < sum(upper) < len(upper)
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(sum(upper) / len(upper))
    assert metrics["actor/pg_clipfrac_lower"].item() == pytest.approx(sum(lower) / len(upper))


def test_clip_ratio_sets_both_sides() -> None:
    assert clip_widths(ActorConfig(clip_ratio=0.1)) == (0.1, 0.1)
    assert clip_widths(ActorConfig(clip_ratio=0.1, clip_ratio_high=0.3)) == (0.1, 0.3)
    assert clip_widths(ActorConfig(clip_ratio_low=0.2, clip_ratio_high=0.0)) == (0.2, 0.0)


def test_gspo_does_not_clamp_the_log_ratio_of_one_token() -> None:
    old, mask = torch.zeros(1, 4, dtype=torch.float64), torch.ones(1, 4, dtype=torch.int64)
    new = torch.tensor([[25.0, -24.0, -0.5, 0.0]], dtype=torch.float64)
    loss, _ = POLICY_LOSSES["gspo"](old, new, torch.ones(1, 4), mask, config=CONFIG)
    assert loss.item() == pytest.approx(-math.exp(0.5 / 4))


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_keeps_rare_tokens_that_ppo_clips_and_drops_likely_ones(name: str) -> None:
    probs = torch.tensor([[[0.001, 0.3, 0.3]], [[0.002, 0.9, 0.05]]], dtype=torch.float64)
    old, new = probs.log()
    new.requires_grad_()
    advantages = torch.tensor([[1.0, 1.0, -1.0]], dtype=torch.float64)
    loss, metrics = POLICY_LOSSES[name](old, new, advantages, torch.ones(1, 3), config=CONFIG)
    loss.backward()

    assert new.grad[0, 0] == pytest.approx(-1.5 / 3)  # the ratio is 2, cut at 1.5
    assert new.grad[0, 1:].tolist() == [0.0, 0.0]
    assert metrics["actor/pg_clipfrac"] == pytest.approx(2 / 3)


def test_policy_losses_are_found_by_name_or_dotted_path() -> None:
    assert get_policy_loss("gspo") is POLICY_LOSSES["gspo"]
    assert (
        get_policy_loss("workers.losses.policy.compute_policy_loss_cispo") is POLICY_LOSSES["cispo"]
    )
    with pytest.raises(ConfigError, match="unknown policy loss 'gpso'.*Did you mean 'gspo'"):
        get_policy_loss("gpso")


def test_a_user_s_loss_is_found_by_its_registered_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(POLICY_LOSSES, "_entries", dict(POLICY_LOSSES))

    @POLICY_LOSSES.register("my_loss")
    def my_loss(**columns: Tensor) -> tuple[Tensor, Columns]:
        return columns["log_prob"].sum(), {}

    assert get_policy_loss("my_loss") is my_loss
    assert traits_of(my_loss).keys_read is None


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_loss_reads_exactly_its_declared_keys(batch: Columns, name: str) -> None:
    class Recorded:
        """The actor's settings; it records which ones are read."""

        def __init__(self, settings: Any, section: str = "") -> None:
            self.settings, self.section = settings, section

        def __getattr__(self, key: str) -> Any:
            value = getattr(self.settings, key)
            if is_dataclass(value):
                return Recorded(value, f"{key}.")
            seen.add(self.section + key)
            return value

    seen: set[str] = set()
    POLICY_LOSSES[name](**policy_inputs(batch), config=Recorded(CONFIG))
    assert seen - {"policy_loss.args"} == set(traits_of(POLICY_LOSSES[name]).keys_read or ())
