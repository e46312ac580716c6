"""Every preference loss next to a twin in plain Python, a hand-computed value and its slope."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from workers.losses.preference import (
    COLUMNS,
    PREFERENCE_LOSSES,
    compute_losses,
    measures,
    parameters_of,
)

SETTINGS = SimpleNamespace(
    beta=0.3,
    label_smoothing=0.2,
    simpo_gamma=0.5,
    orpo_lambda=0.7,
    desirable_weight=1.5,
    undesirable_weight=0.5,
    sft_coef=0.0,
    reference_free=False,
)
ON_PAIRS = [name for name in PREFERENCE_LOSSES if name != "kto"]


def pairs(count: int = 7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    log_probs = -20 * torch.rand(count, 2, generator=generator, dtype=torch.float64) - 0.5
    noise = torch.randn(count, 2, generator=generator, dtype=torch.float64)
    num_tokens = torch.randint(1, 9, (count, 2), generator=generator).double()
    columns = {"log_probs": log_probs, "ref_log_probs": log_probs + noise}
    margin = torch.rand(count, generator=generator, dtype=torch.float64)
    return columns | {"num_tokens": num_tokens, "margin": margin}


def rows(count: int = 7) -> dict[str, Tensor]:
    of_pairs = pairs(count)
    del of_pairs["margin"]
    columns = {name: column[:, 0] for name, column in of_pairs.items()}
    columns["desirable"] = torch.arange(count) % 3 != 0
    columns["mismatched_kl"] = torch.full((count,), 0.4, dtype=torch.float64)
    return columns


def columns_of(name: str) -> dict[str, Tensor]:
    return rows() if name == "kto" else pairs()


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def odds(p: float) -> float:
    return p / (1 - p)


def smoothed(x: float) -> float:
    return -0.8 * log_sigmoid(x) - 0.2 * log_sigmoid(-x)


def dpo(w: float, r: float, ref_w: float, ref_r: float, *counts: float) -> float:
    return smoothed(0.3 * ((w - ref_w) - (r - ref_r)) - counts[-1])


def ipo(w: float, r: float, ref_w: float, ref_r: float, *counts: float) -> float:
    num_w, num_r, _ = counts
    return ((w - ref_w) / num_w - (r - ref_r) / num_r - 1 / 0.6) ** 2


def hinge(w: float, r: float, ref_w: float, ref_r: float, *counts: float) -> float:
    return max(0.0, 1 + counts[-1] - 0.3 * ((w - ref_w) - (r - ref_r)))


def simpo(w: float, r: float, ref_w: float, ref_r: float, *counts: float) -> float:
    num_w, num_r, margin = counts
    return smoothed(0.3 / num_w * w - 0.3 / num_r * r - 0.5 - margin)


def orpo(w: float, r: float, ref_w: float, ref_r: float, *counts: float) -> float:
    num_w, num_r, _ = counts
    ratio = odds(math.exp(w / num_w)) / odds(math.exp(r / num_r))
    return -w / num_w - 0.7 * log_sigmoid(math.log(ratio))


TWINS: dict[str, Callable[..., float]] = {
    "dpo": dpo,
    "ipo": ipo,
    "hinge": hinge,
    "simpo": simpo,
    "orpo": orpo,
}


@pytest.mark.parametrize("name", ON_PAIRS)
def test_a_loss_of_pairs_matches_plain_python(name: str) -> None:
    columns = pairs()
    for number, loss in enumerate(compute_losses(name, columns, SETTINGS).tolist()):
        sides = ("log_probs", "ref_log_probs", "num_tokens")
        of_pair = [x for column in sides for x in columns[column][number].tolist()]
        twin = TWINS[name](*of_pair, float(columns["margin"][number]))
        assert loss == pytest.approx(twin, rel=1e-9)


def test_kto_matches_plain_python() -> None:
    columns = rows()
    for number, loss in enumerate(compute_losses("kto", columns, SETTINGS).tolist()):
        reward = float(columns["log_probs"][number] - columns["ref_log_probs"][number]) - 0.4
        good = bool(columns["desirable"][number])
        weight = 1.5 if good else 0.5
        value = weight / (1 + math.exp(-0.3 * (reward if good else -reward)))
        assert loss == pytest.approx(weight - value, rel=1e-9)


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_the_gradient_of_a_preference_loss_matches_finite_differences(name: str) -> None:
    columns = columns_of(name)

    def of_log_probs(log_probs: Tensor) -> Tensor:
        return compute_losses(name, columns | {"log_probs": log_probs}, SETTINGS)

    assert torch.autograd.gradcheck(of_log_probs, columns["log_probs"].requires_grad_())


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_extreme_log_ratios_stay_finite(name: str, gap: float) -> None:
    columns = {name: column[:1].float() for name, column in columns_of(name).items()}
    low, high = torch.tensor(-1e4), torch.tensor(0.0)
    best = high if gap > 0 else low
    if name == "kto":
        columns |= {"log_probs": best[None], "ref_log_probs": (low + high - best)[None]}
    else:
        sides = torch.stack([best, low + high - best])[None]
        columns |= {"log_probs": sides, "ref_log_probs": sides.flip(1)}
    columns["log_probs"] = columns["log_probs"].clone().requires_grad_()

    losses = compute_losses(name, columns, SETTINGS)
    losses.sum().backward()
    assert losses.isfinite().all()
    assert columns["log_probs"].grad.isfinite().all()


def test_the_parameters_of_a_loss_are_columns_or_settings() -> None:
    for name, loss in PREFERENCE_LOSSES.items():
        unknown = {*parameters_of(loss)} - {*COLUMNS} - {*vars(SETTINGS)}
        assert unknown == set(), name
    without = [n for n, x in PREFERENCE_LOSSES.items() if "ref_log_probs" not in parameters_of(x)]
    assert sorted(without) == ["orpo", "simpo"]


def settings_of(name: str, **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(SETTINGS), "loss": name, **changes})


def test_measures_of_pairs_by_hand() -> None:
    columns = {
        "log_probs": torch.tensor([[-2.0, -6.0], [-4.0, -1.0]]),
        "ref_log_probs": torch.tensor([[-3.0, -5.0], [-4.0, -3.0]]),
        "num_tokens": torch.tensor([[2.0, 4.0], [1.0, 1.0]]),
        "margin": torch.zeros(2),
    }
    values = {name: value.tolist() for name, value in measures(columns, settings_of("dpo")).items()}
    assert values["rewards/chosen"] == pytest.approx([0.3, 0.0])
    assert values["rewards/rejected"] == pytest.approx([-0.3, 0.6])
    assert values["rewards/margin"] == pytest.approx([0.6, -0.6])
    assert values["rewards/accuracy"] == [1, 0]
    assert values["kl/row"] == [0, 1]
    assert values["lengths/mean"] == [3, 1]
    assert values["log_probs/rejected"] == [-6, -1]

    with_sft = measures(columns, settings_of("dpo", sft_coef=2.0))["loss"].tolist()
    assert with_sft == pytest.approx([values["loss"][0] + 2 * 1, values["loss"][1] + 2 * 4])
    # chosen responses of 2 and 1 tokens: the mean over the pairs is the mean over 3 tokens
    columns["sft_length"] = torch.full((2,), 1.5)
    over_tokens = measures(columns, settings_of("dpo", sft_coef=2.0))["loss"].mean().item()
    assert over_tokens == pytest.approx(sum(values["loss"]) / 2 + 2 * (2 + 4) / 3)


def test_reference_free_is_a_reference_of_zeros() -> None:
    columns = pairs()
    del columns["ref_log_probs"]
    values = measures(columns, settings_of("dpo", reference_free=True))
    zeros = {"ref_log_probs": torch.zeros(7, 2).double()}
    expected = measures(columns | zeros, settings_of("dpo"))
    del expected["kl/row"]
    assert values.keys() == expected.keys()
    for name, column in values.items():
        assert column.equal(expected[name]), name


def test_without_a_reference_a_reward_uses_the_log_prob_per_token() -> None:
    columns = {
        "log_probs": torch.tensor([[-2.0, -6.0]]),
        "num_tokens": torch.tensor([[2.0, 4.0]]),
        "margin": torch.zeros(1),
    }
    values = measures(columns, settings_of("simpo"))
    assert float(values["rewards/margin"]) == pytest.approx(0.3 * 0.5)
    assert float(measures(columns, settings_of("orpo"))["rewards/margin"]) == pytest.approx(0.5)
    assert "kl/row" not in values


def test_means_of_a_label_are_over_its_rows() -> None:
    columns = rows()
    good = columns["desirable"]
    columns["label_share"] = torch.where(good, good.double().mean(), (~good).double().mean())
    values = measures(columns, settings_of("kto"))
    rewards = 0.3 * (columns["log_probs"] - columns["ref_log_probs"])
    assert float(values["rewards/chosen"].mean()) == pytest.approx(float(rewards[good].mean()))
    assert float(values["rewards/rejected"].mean()) == pytest.approx(float(rewards[~good].mean()))
    margin = float(rewards[good].mean() - rewards[~good].mean())
    assert float(values["rewards/margin"].mean()) == pytest.approx(margin)
    expected = [bool((r > 0.3 * 0.4) == g) for r, g in zip(rewards, good, strict=True)]
    assert values["rewards/accuracy"].tolist() == [float(x) for x in expected]
