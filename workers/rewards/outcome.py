"""Check the result of a reward function, a server or a reward process for one sample.

This module does not import torch, because it runs in reward processes, which start often.
"""

from __future__ import annotations

import json
import math
from numbers import Real
from typing import Any, SupportsFloat

Steps = list[tuple[int, float]]
"""The steps of a response: the token at which each ends, and its score."""
Outcome = tuple[float | None, dict[str, Any], str | None]
"""A score, or None after a failure; other numbers, `pred` and steps; an error, or None.

With a score, the text is not an error: it names entries that are ignored.
"""
STEPS = "step_scores"
"""Key of a result for the scores of the response's steps; lists under other keys are ignored."""
VOTE = "pred"
"""Key of a result for the sample's answer, a text for the majority vote over a prompt's samples."""
FULL_REWARD = 1.0
"""The least score of a success."""


def is_success(score: float) -> bool:
    """Return True for the full reward, even if a sum of rewards falls short by rounding."""
    return score > FULL_REWARD - 1e-6


LATE = "passed its deadline"
NO_REWARD = (
    ". Return a number, a dict with a number as 'score', or (for a function with batch parameters "
    "such as solution_strs) a list of these"
)
"""End of the error for a result without a number."""
IGNORED = " cannot be written as JSON and is ignored. Return a number, for a tensor its .item()"
"""End of the note about entries that are ignored."""
LARGEST_SCORE = 3.4028234e38
"""Largest score that is finite in float32, in which a batch stores scores."""


def read_outcome(result: Any) -> Outcome:
    """Return the outcome for a function's result: a finite number, or a dict with one as "score".

    With step scores, "score" is optional. Raise a ValueError for other results.
    """
    extras = dict(result) if isinstance(result, dict) else {"score": result}
    steps = read_steps(extras.pop(STEPS, None))
    score = extras.pop("score", 0.0 if steps else None)
    try:
        number = float(score) if isinstance(score, SupportsFloat) else None
    except (TypeError, ValueError, RuntimeError):  # arrays and tensors of several numbers
        number = None
    if number is None:
        raise ValueError(f"the reward function returned {result!r:.200}{NO_REWARD}")
    if not is_finite(number):
        raise ValueError(
            f"the reward function returned {result!r:.200}. Return a number that is finite in "
            "float32, or a dict with one as 'score'"
        )

    checked: dict[str, Any] = {}
    ignored = []
    for name, value in extras.items():
        if isinstance(value, Real):
            checked[str(name)] = float(value)
        elif name != VOTE and not is_json(value):
            ignored.append(f"{name!r} ({type(value).__name__})")
    if VOTE in extras:
        checked[VOTE] = str(extras[VOTE])
    if steps:
        checked[STEPS] = steps
    note = f"{', '.join(ignored)}{IGNORED}" if ignored else None
    return number, checked, note


def is_json(value: Any) -> bool:
    """Return True if JSON can write the value."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def read_steps(steps: Any) -> Steps:
    """Check step scores: pairs [token, score] of a token index from 0 and a finite score."""
    pairs = [(int(token), float(score)) for token, score in steps or []]
    for token, score in pairs:
        if token < 0 or not is_finite(score):
            raise ValueError(
                f"{STEPS} has [{token}, {score}]. Each entry must be [token, score]: a token index "
                "of 0 or more, and a score that is finite in float32"
            )
    return pairs


def is_finite(score: float) -> bool:
    """Return True if the number is finite in float32."""
    return math.isfinite(score) and abs(score) <= LARGEST_SCORE


def read_answer(answer: Any) -> Outcome:
    """Return the outcome in a process's answer; ValueError if it is invalid."""
    try:
        score, extras, error = answer
        if score is None:
            return None, {}, str(error)
        note = None if error is None else str(error)
        if not extras and type(score) is float and is_finite(score):  # fast path
            return score, {}, note
        return *read_outcome({**extras, "score": score})[:2], note
    except (TypeError, ValueError) as err:
        raise ValueError(f"returned an invalid reply ({err})") from err
