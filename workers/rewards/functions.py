"""Rule rewards: functions that score a response, chosen by the row's data source.

This module does not import torch, so that a reward process starts fast. `default_compute_score`
chooses the rule, for rewards without a function of yours. A rule has the parameters
`(data_source, solution_str, ground_truth, extra_info)` and returns a float, or a dict whose
`"score"` is the reward and whose other numbers are logged. To add a rule, write a function and add
a line to `REWARDS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any

from verl_like.errors import ConfigError, nearest
from workers.rewards.outcome import GIVE_REWARD

Info = Mapping[str, Any] | None
RewardFunction = Callable[[str, str, Any, Info], "float | dict[str, Any]"]

GSM8K_TAIL_CHARS = 300
"""Only this many characters at the end of a solution are searched for the answer."""

DAPO_TAIL_CHARS = 300

_DAPO_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_THOUGHT = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)
_GSM8K_ANSWER = re.compile(r"#### (-?[\d.,]+)")
_NUMBER = re.compile(r"(?<![\d.])-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def tiny_letters(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None
) -> float:
    """Return the fraction of the solution's characters that equal the ground truth letter.

    It is 0 for an empty solution.
    """
    return solution_str.count(ground_truth) / len(solution_str) if solution_str else 0.0


def gsm8k(data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None) -> float:
    """Return 1 if the last `#### number`, without commas, equals the ground truth text; else 0."""
    answers = _GSM8K_ANSWER.findall(solution_str[-GSM8K_TAIL_CHARS:])
    return float(bool(answers) and answers[-1].replace(",", "") == str(ground_truth))


def gsm8k_flexible(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None
) -> float:
    """Return 1 if the last number of the solution, marked or not, equals the ground truth; else 0.

    Select it with `reward=verl_like.rules:gsm8k_flexible`.
    """
    numbers = _NUMBER.findall(solution_str[-GSM8K_TAIL_CHARS:])
    if not numbers:
        return 0.0
    expected = float(str(ground_truth).replace(",", ""))
    return float(float(numbers[-1].replace(",", "")) == expected)


def math(data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None) -> float:
    r"""Return 1 if math-verify finds the ground truth as the solution's answer; else 0.

    math-verify reads a number after "the final answer is" first, then a `\boxed{}`.
    """
    from math_verify import parse, verify

    # no timeouts of math-verify: they use signals, which work only in main threads, and the
    # reward process has a deadline
    gold = parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=None)
    answer = parse(solution_str, parsing_timeout=None)
    return float(verify(gold, answer, timeout_seconds=None))


def geometry(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None
) -> float:
    r"""Return 0.9 for the right answer in the last `\boxed{}`, plus 0.1 for `<think>` tags."""
    boxed = solution_str.rfind("\\boxed{")
    is_right = boxed >= 0 and math(data_source, solution_str[boxed:], ground_truth)
    return 0.9 * bool(is_right) + 0.1 * bool(_THOUGHT.fullmatch(solution_str))


def dapo(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Info = None
) -> dict[str, float]:
    r"""Score 1 if the last line `Answer: ...`, or else the last `\boxed{}`, is right; else -1."""
    tail = solution_str[-DAPO_TAIL_CHARS:]
    answers = _DAPO_ANSWER.findall(tail)
    boxed = tail.rfind("\\boxed{")
    if not answers and boxed >= 0:
        answers = [tail[boxed:]]
    text = answers[-1] if answers else ""
    if answers and "\\boxed{" not in text:
        text = f"\\boxed{{{text.strip()}}}"
    acc = math(data_source, text, ground_truth)
    return {"score": 2 * acc - 1, "acc": acc}


def code(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Info = None,
    trust_programs: bool = False,
) -> dict[str, float]:
    """Run the program in the response; `score` is the fraction of tests that it passes."""
    from workers.rewards.code import run_tests

    return run_tests(
        data_source, solution_str, ground_truth, extra_info, trust_programs=trust_programs
    )


REWARDS: dict[str, RewardFunction] = {
    "verl_like/tiny_letters": tiny_letters,
    "openai/gsm8k": gsm8k,
    "lighteval/MATH": math,
    "DigitalLearningGmbH/MATH-lighteval": math,
    "HuggingFaceH4/MATH-500": math,
    "hiyouga/geometry3k": geometry,
    "math_dapo": dapo,
    "apps": code,
    "codecontests": code,
    "codeforces": code,
    "taco": code,
}


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    trust_programs: bool = False,
) -> float | dict[str, Any]:
    """Score one solution by the rule of its data source.

        default_compute_score("openai/gsm8k", "6 * 7 = 42 #### 42", "42")      # 1.0

    Args:
        data_source: a key of `REWARDS`, such as openai/gsm8k.
        solution_str: the response.
        ground_truth: the row's answer, in the form that the rule needs; for programs, the tests.
        extra_info: further columns of the row.
        trust_programs: accept asserts whose expected value the response's program could read.

    Returns:
        The score, or a dict with `score` and other numbers to log.

    Raises:
        ConfigError: `data_source` has no rule, or the asserts need `trust_programs`.
        ImportError: the rule needs a package that is missing.
    """
    if data_source not in REWARDS:
        check_rules([data_source])
    rule, sample = REWARDS[data_source], (data_source, solution_str, ground_truth, extra_info)
    return code(*sample, trust_programs) if rule is code else rule(*sample)


def check_rules(data_sources: Iterable[str]) -> None:
    """Reject data sources without a rule, or whose rule lacks its package."""
    for source in sorted(set(data_sources)):
        if source not in REWARDS:
            raise ConfigError(
                f"no reward rule for data_source {source!r}. {GIVE_REWARD}. The names that have "
                f"rules: {', '.join(sorted(REWARDS))}.{nearest(source, REWARDS)}"
            )
        if REWARDS[source] in (math, geometry, dapo) and find_spec("math_verify") is None:
            raise ConfigError(
                f"the rule for data_source {source!r} needs math-verify. Install it with: pip "
                "install 'verl-like[math]'"
            )
