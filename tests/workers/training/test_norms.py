"""Norms and directions of weights, for records."""

from __future__ import annotations

import pytest
import torch

from workers.training.norms import projection, signs


def test_a_projection_shows_a_change_that_the_norm_does_not() -> None:
    weight = torch.randn(48, 31, generator=torch.Generator().manual_seed(1))
    change = torch.randn(48, 31, generator=torch.Generator().manual_seed(2))
    change -= weight * (weight * change).sum() / weight.square().sum()
    other = weight + 1e-3 * change
    assert float(other.norm()) == pytest.approx(float(weight.norm()), rel=1e-6)
    assert projection(weight) != pytest.approx(projection(other), abs=1e-4)
    assert projection(3 * weight) == pytest.approx(projection(weight), abs=1e-6)
    assert projection(weight[0]) == pytest.approx(
        float(signs(31).double() @ weight[0].double() * signs(1)) / float(weight[0].norm()),
        abs=1e-6,
    )
