"""Whether a fast path computes a class of models right, found out on a tiny stand-in of it.

    @Proof
    def packed_rows(model) -> str: ...                      # says what is wrong on a stand-in
    reason = packed_rows.what_is_wrong(config, attention)   # empty: it is right

Classes are many and their masks, caches and heads differ, so none is believed. A stand-in is short
of every window, chunk and original length of its rows, and its state is off its defaults. What was
found out about a config is kept.
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
"""In a judgement: the tokens of the run's longest row."""
NO_MODEL = "there is no small model of its class to prove it on"
"""How a reason begins where nothing could be tried."""


@dataclass(frozen=True)
class Proof:
    """A way to compute something, and how it is judged."""

    judge: Callable[[Any], str]
    """Stand-in -> what is wrong; an empty text if nothing is."""

    def what_is_wrong(self, config: Any, attention: str, longest: int | None = None) -> str:
        """With such a model, on rows of any length or of up to `longest` tokens.

        What is known of a length holds for all that pass the same limits.
        """
        within = None if longest is None else reach(config, longest)
        reason = _found(self, ConfigByContent.of(config), attention_of(attention), within)
        return reason.replace(LONGEST, str(longest))


def attention_of(built_with: str) -> str:
    """What a stand-in attends by on the CPU for a model that is built with this."""
    return "eager" if built_with == "eager" else "sdpa"


@functools.lru_cache(maxsize=256)
@torch.no_grad()
def _found(proof: Proof, config: ConfigByContent, attention: str, longest: int | None) -> str:
    try:
        model = stand_in(config.config, attention, longest)
    except MODEL_ERRORS as error:
        return f"{NO_MODEL} ({_first_line(error)})"
    try:
        return proof.judge(model)
    except MODEL_ERRORS as error:
        what = f"{type(error).__name__}: {_first_line(error)}"
        return f"a small model of its class fails ({what})"


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The size of the difference as a share of what is expected; inf for a NaN."""
    error = float((found - expected).float().norm() / expected.float().norm())
    return error if error == error else torch.inf


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
