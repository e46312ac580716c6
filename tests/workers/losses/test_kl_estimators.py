"""The KL estimators next to their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from verl_like.errors import ConfigError
from workers.losses.kl import kl_penalty

KL_FORMULAS = {
    "kl": lambda x: x,
    "k1": lambda x: x,
    "abs": abs,
    "mse": lambda x: x * x / 2,
    "k2": lambda x: x * x / 2,
    "low_var_kl": lambda x: math.exp(-x) - 1 + x,
    "k3": lambda x: math.exp(-x) - 1 + x,
    "k3_unclamped": lambda x: math.exp(-x) - 1 + x,
    "k3_swapped": lambda x: math.exp(x) - 1 - x,
}


@pytest.mark.parametrize("name", KL_FORMULAS)
def test_kl_estimates_equal_their_formulas_and_plus_has_k2_s_gradient(name: str) -> None:
    logprob = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -1.0, -0.5], dtype=torch.float64)
    expected = [
        KL_FORMULAS[name](a - b) for a, b in zip(logprob.tolist(), reference.tolist(), strict=True)
    ]
    assert kl_penalty(logprob, reference, name).tolist() == pytest.approx(expected)
    straight = kl_penalty(logprob, reference, f"{name}+")
    assert straight.tolist() == pytest.approx(expected)
    straight.sum().backward()
    torch.testing.assert_close(logprob.grad, (logprob - reference).detach())


def test_k3_is_clamped() -> None:
    assert kl_penalty(torch.tensor([-1e4]), torch.tensor([0.0]), "k3").item() == 10.0
    far = torch.tensor([-6.0], requires_grad=True)
    unclamped = kl_penalty(far, torch.tensor([0.0]), "k3_unclamped")
    assert unclamped.item() == pytest.approx(math.exp(6) - 7)  # as in TRL 1.16
    unclamped.backward()
    assert far.grad.item() == pytest.approx(1 - math.exp(6))


@pytest.mark.parametrize("name", ["full", "k4+", "low_var"])
def test_an_unknown_kl_estimator_is_rejected_with_the_list(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown KL estimator .* Known: kl, k1, abs"):
        kl_penalty(torch.zeros(1), torch.zeros(1), name)
