"""What a rollout engine's decoding gets wrong, found out on a tiny stand-in of a model's class.

    proof = DecodingProof(judge, "with a cache")
    reason = proof.what_is_wrong(config, longest)      # empty: it is right for rows so long

Classes are many and their caches and masks differ, so none is believed. What was found out about a
config is kept, for rows of any length that pass the same limits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from workers.models.stand_in import MODEL_ERRORS, ConfigByContent, reach, stand_in

LONGEST = "{longest}"
"""In a text: the tokens of the run's longest row."""


@dataclass(frozen=True)
class DecodingProof:
    """A way of decoding, and how it is judged."""

    judge: Callable[[Any], str]
    """Stand-in -> what is wrong, with `LONGEST` in it; an empty text if nothing is."""
    way: str
    """How it decodes, in words, for a class that fails so: "with a cache"."""

    def what_is_wrong(self, config: Any, longest: int) -> str:
        """With such a model, on rows of up to `longest` tokens; nothing is an empty text."""
        attention = "eager" if config._attn_implementation == "eager" else "sdpa"
        key = ConfigByContent.whole(config)
        reason = _what_is_wrong(self, key, attention, reach(config, longest))
        return reason.replace(LONGEST, str(longest))


@functools.lru_cache(maxsize=64)
def _what_is_wrong(
    proof: DecodingProof, config: ConfigByContent, attention: str, longest: int
) -> str:
    try:
        model = stand_in(config.config, attention, longest)
    except MODEL_ERRORS as error:
        return f"there is no small model of its class to prove it on ({_first_line(error)})"
    try:
        return proof.judge(model)
    except MODEL_ERRORS as error:
        what = f"{type(error).__name__}: {_first_line(error)}"
        return f"a small model of its class fails {proof.way} ({what})"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
