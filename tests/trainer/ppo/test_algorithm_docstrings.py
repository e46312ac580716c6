"""Every algorithm documents its formula, what to watch and its source, and is in the docs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import workers.losses  # noqa: F401
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from workers.losses.registry import POLICY_LOSSES
from workers.losses.value import compute_value_loss

ALGORITHMS: list[Callable[..., Any]] = [
    *dict.fromkeys([*ADVANTAGE_ESTIMATORS.values(), *POLICY_LOSSES.values()]),
    compute_value_loss,
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.__name__)
def test_docstrings_have_formula_watch_and_source(algorithm: Callable[..., Any]) -> None:
    paragraphs = inspect.cleandoc(algorithm.__doc__ or "").split("\n\n")
    assert [paragraph.partition(": ")[0] for paragraph in paragraphs[-2:]] == ["Watch", "Source"]
    assert len(paragraphs) > 2
    assert re.search(r"`[\w/.<>]+`", paragraphs[-2]), "a metric or key to look at"
