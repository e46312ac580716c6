"""Rule rewards: pure functions of strings, one per data source, torch-free so that a spawned process starts fast.

`default_compute_score` is what the driver calls for every sample when the config names no function of the user's own.
A reward function takes `(data_source, solution_str, ground_truth, extra_info)` and returns a float, or a dict whose
`"score"` is the reward and whose other numbers are logged. A new rule is one function and one line in `REWARDS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

RewardFunction = Callable[[str, str, Any, Mapping[str, Any] | None], "float | dict[str, Any]"]

GSM8K_TAIL_CHARS = 300
"""An answer stands at the end; only this many last characters of a solution are searched."""

_GSM8K_ANSWER = re.compile(r"#### (-?[\d.,]+)")


def tiny_letters(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """Share of the solution's characters that equal the ground truth letter; an empty solution scores 0."""
    return solution_str.count(ground_truth) / len(solution_str) if solution_str else 0.0


def gsm8k(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> float:
    """1 when the last `#### number` of the solution, without commas, is the ground truth to the character."""
    answers = _GSM8K_ANSWER.findall(solution_str[-GSM8K_TAIL_CHARS:])
    return float(bool(answers) and answers[-1].replace(",", "") == str(ground_truth))


REWARDS: dict[str, RewardFunction] = {
    "verl_like/tiny_letters": tiny_letters,
    "openai/gsm8k": gsm8k,
}


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float | dict[str, Any]:
    """The score of one solution by the rule of its data source; an unknown source is refused with the known ones."""
    rule = REWARDS.get(data_source)
    if rule is None:
        from verl_like.errors import ConfigError, nearest  # here, so that the rules themselves load without torch

        raise ConfigError(
            f"no rule reward for data_source {data_source!r}; known: {', '.join(sorted(REWARDS))}."
            f"{nearest(data_source, REWARDS)} Use one of these names in the data, or add a function to REWARDS."
        )
    return rule(data_source, solution_str, ground_truth, extra_info)
