"""Check how models of one config may run, before a faster way is used.

    support = Support.of(module.config)
    reason = support.why_not(rows_packed)       # "" means that it is correct

    def rows_packed(model) -> str: ...          # a proof: what is wrong on a small model

Model classes differ in masks, caches and heads, so a faster way is first tested on a small model of
the class, with random weights. A window, chunk or original length (`stand_in.LIMITS`) that the
run's longest row exceeds is at most 16 tokens there, so the rows of a proof must be longer than
that. Answers are cached.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.models.support.stand_in import MODEL_ERRORS, ConfigByContent, reach, stand_in

LONGEST = "{longest}"
"""Placeholder in a reason for the number of tokens of the run's longest row."""
NO_MODEL = "there is no small model of its class to prove it on"
"""Beginning of a reason if no test was possible."""
FAILS = "a small model of its class fails"
"""Beginning of a reason if the test raised an error."""


Proof = Callable[[Any], str]
"""Tests a way of computing on a small model; returns what is wrong with it, or ""."""


@dataclass(frozen=True)
class Support:
    """Decides how models with one config may run."""

    model_type: str
    """The model type, for messages."""
    config: Any
    """The model's config; its class is tested."""
    attention: str
    """The attention of the small model, on the CPU: eager or sdpa."""

    @classmethod
    def of(cls, config: Any, built_with: str = "") -> Support:
        """Return the support for a config, with this attention or by default the config's own."""
        is_eager = (built_with or config.get_text_config()._attn_implementation) == "eager"
        return cls(config.model_type, config, "eager" if is_eager else "sdpa")

    def why_not(self, proof: Proof, longest: int | None = None) -> str:
        """Return why the tested way is wrong for rows of up to `longest` tokens (None: of any
        length).

        The text is empty if the tested way is correct. An answer for one length is valid for all
        lengths that exceed the same limits.
        """
        within = None if longest is None else reach(self.config, longest)
        reason = _answer_of(proof, ConfigByContent.of(self.config), self.attention, within)
        return reason.replace(LONGEST, str(longest))


@functools.lru_cache(maxsize=256)
@torch.no_grad()
def _answer_of(proof: Proof, config: ConfigByContent, attention: str, longest: int | None) -> str:
    try:
        model = stand_in(config.config, attention, longest)
    except MODEL_ERRORS as error:
        return f"{NO_MODEL} ({_first_line(error)})"
    try:
        return proof(model)
    except MODEL_ERRORS as error:
        failure = f"{type(error).__name__}: {_first_line(error)}"
        return f"{FAILS} ({failure})"


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference relative to the norm of `expected`; inf for a NaN."""
    error = float((actual - expected).float().norm() / expected.float().norm())
    return error if error == error else torch.inf


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
