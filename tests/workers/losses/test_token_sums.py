"""The protocol's losses against their formulas, token by token."""

from __future__ import annotations

import math

import pytest
import torch

from verl_like.errors import ConfigError
from workers.losses.token_sums import TOKEN_SUMS

Numbers = dict[str, float]


def brute_force(name: str, p: float, token: Numbers, s: float) -> float:
    """Return a token's loss, for log-prob p, its columns, and its row's ratio."""
    if name == "cross_entropy":
        return -p * token["weights"]
    q, a = token["logprobs"], token["advantages"]
    r = math.exp(p - q)
    low, high = token.get("clip_low_threshold", 0.8), token.get("clip_high_threshold", 1.2)
    clip = min(max(r, low), high)
    if name == "importance_sampling":
        return -r * a
    if name == "ppo":
        return -min(r * a, clip * a)
    if name == "cispo":
        return -clip * p * a
    if name == "dro":
        return -(p * a - 0.5 * 0.05 * (p - q) ** 2)
    return -min(s * a, min(max(s, low), high) * a)


def columns_of(name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def random() -> torch.Tensor:
        return torch.randn(3, 5, generator=generator, dtype=torch.float64)

    if name == "cross_entropy":
        return {"weights": random()}
    columns = {"logprobs": random() - 2, "advantages": random()}
    if name == "gspo":
        columns["sequence_ratio_mask"] = (random() > -0.5).double()
    return columns


@pytest.mark.parametrize("name", TOKEN_SUMS)
@pytest.mark.parametrize("per_token", [False, True])
def test_a_loss_and_its_gradient_match_the_formula(name: str, per_token: bool) -> None:
    loss, columns = TOKEN_SUMS[name], columns_of(name)
    if per_token and loss.optional_columns:
        columns["clip_low_threshold"] = torch.linspace(0.5, 0.9, 15).double().view(3, 5)
        columns["clip_high_threshold"] = torch.linspace(1.1, 3.0, 15).double().view(3, 5)
    generator = torch.Generator().manual_seed(4)
    p = torch.randn(3, 5, generator=generator, dtype=torch.float64) - 2
    log_probs = p.clone().requires_grad_()
    total = loss.of_tokens(log_probs, columns, loss.settings).sum()

    expected = 0.0
    for row in range(3):
        ratio = 1.0
        if name == "gspo":
            mask = columns["sequence_ratio_mask"][row]
            gaps = (p - columns["logprobs"])[row] * mask
            ratio = math.exp(float(gaps.sum() / mask.sum().clamp(min=1)))
        for place in range(5):
            token = {key: float(column[row, place]) for key, column in columns.items()}
            expected += brute_force(name, float(p[row, place]), token, ratio)
    assert float(total.detach()) == pytest.approx(expected, rel=1e-9)
    if name == "cispo":  # clip(r) has no gradient
        ratio = (p - columns["logprobs"]).exp()
        bounds = [columns.get(key, torch.tensor(value)) for key, value in loss.settings.items()]
        (slope,) = torch.autograd.grad(total, log_probs)
        assert torch.allclose(slope, -ratio.clamp(*bounds) * columns["advantages"])
    elif name != "gspo":
        assert torch.autograd.gradcheck(
            lambda p: loss.of_tokens(p, columns, loss.settings).sum(), log_probs
        )


def test_an_unlikely_token_without_advantage_adds_nothing() -> None:
    log_probs = torch.tensor([[-1.0]], requires_grad=True)
    columns = {"logprobs": torch.tensor([[-500.0]]), "advantages": torch.tensor([[0.0]])}
    total = TOKEN_SUMS["importance_sampling"].of_tokens(log_probs, columns, {}).sum()
    total.backward()
    assert float(total.detach()) == 0
    assert log_probs.grad is not None
    assert float(log_probs.grad) == 0


def test_an_unknown_setting_is_rejected_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'clip_low'; it has clip_low_threshold.*Did you mean"):
        TOKEN_SUMS["ppo"].checked("ppo", {"clip_low": 0.1})
    with pytest.raises(ConfigError, match="cross_entropy has no setting 'beta'; it has none"):
        TOKEN_SUMS["cross_entropy"].checked("cross_entropy", {"beta": 0.1})
    assert TOKEN_SUMS["dro"].checked("dro", {"beta": 0.1}) == {"beta": 0.1}
