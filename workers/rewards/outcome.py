"""What a reward function, a server or a reward process says of one sample, checked.

Nothing here imports torch: it runs in reward processes, which start often.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Real
from typing import Any

Steps = list[tuple[int, float]]
"""(token of the response, score) of every step."""
Outcome = tuple[float | None, dict[str, Any], str | None]
"""Score (None: failed), the other numbers of the function, `pred` and steps, what went wrong."""
STEPS = "step_scores"
"""The one list that is kept: scores of the response's steps, at the tokens where they end."""
VOTE = "pred"
"""The one text that is kept: a sample's answer, for the majority of a prompt's samples."""
LATE = "passed its deadline"
PLACE = "\n    at {}, line {}"
"""How the text of an error ends whose line of the user's code is known."""
LARGEST_SCORE = 3.4028234e38
"""Scores are float32 in a batch: what is larger would be infinite there."""


def read_outcome(result: Any) -> Outcome:
    """What the function returned: a finite number, or a dict with one; all else is refused.

    Beside scores of steps there need be none.
    """
    extras = dict(result) if isinstance(result, dict) else {"score": result}
    steps = read_steps(extras.pop(STEPS, None))
    score = extras.pop("score", 0.0 if steps else None)
    if isinstance(score, str) or score is None or not is_finite(float(score)):
        raise ValueError(
            f"the reward function returned {result!r:.200}; a number that is finite in float32, "
            "or a dict with one as 'score'"
        )

    kept: dict[str, Any] = {}
    for name, value in extras.items():
        if isinstance(value, Real):
            kept[str(name)] = float(value)
    if VOTE in extras:
        kept[VOTE] = str(extras[VOTE])
    if steps:
        kept[STEPS] = steps
    return float(score), kept, None


def read_steps(steps: Any) -> Steps:
    """[token, score] pairs, checked: tokens count from 0 in the response, scores are finite."""
    pairs = [(int(token), float(score)) for token, score in steps or []]
    for token, score in pairs:
        if token < 0 or not is_finite(score):
            raise ValueError(
                f"{STEPS} has [{token}, {score}]; pairs of a token's number, from 0, and a score "
                "that is finite in float32"
            )
    return pairs


def is_finite(score: float) -> bool:
    """Whether it is a finite number in float32, too."""
    return math.isfinite(score) and abs(score) <= LARGEST_SCORE


def read_answer(answer: Any, asked: Collection[int]) -> tuple[int, Outcome]:
    """(number of a sample, outcome) as a reward process answered; a ValueError if it is none."""
    try:
        number, (score, extras, error) = answer
        if number not in asked:
            raise ValueError(f"nobody has asked for sample {number!r:.40}")
        if score is None:
            return number, (None, {}, str(error))
        if not extras and type(score) is float and is_finite(score):  # as most are
            return number, (score, {}, None)
        return number, read_outcome({**extras, "score": score})
    except (TypeError, ValueError) as err:
        raise ValueError(f"gave an answer of another form ({err})") from err
