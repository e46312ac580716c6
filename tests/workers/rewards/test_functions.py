from __future__ import annotations

import subprocess
import sys

import pytest

from verl_like.errors import ConfigError
from workers.rewards.functions import check_rules, default_compute_score, gsm8k_flexible


@pytest.mark.parametrize(("text", "score"), [("aaaa", 1.0), ("b a ", 0.25), ("", 0.0)])
def test_tiny_letters_scores_the_fraction_of_right_characters(text: str, score: float) -> None:
    assert default_compute_score("verl_like/tiny_letters", text, "a") == score


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("so it is\n#### 42", "42", 1.0),
        ("#### 7, no:\n#### 42", "42", 1.0),
        ("#### 42, no:\n#### 7", "42", 0.0),
        ("#### 1,234", "1234", 1.0),
        ("#### -3", "-3", 1.0),
        ("the answer is 42", "42", 0.0),
        ("####42", "42", 0.0),
        ("#### 42.", "42", 0.0),
        ("#### 42" + " " * 400, "42", 0.0),
    ],
)
def test_gsm8k_reads_the_last_marked_number_strictly(text: str, truth: str, score: float) -> None:
    assert default_compute_score("openai/gsm8k", text, truth) == score


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("so it is 42.", "42", 1.0),
        ("7 apples, #### 1,234 in all", "1234", 1.0),
        ("42, or rather 7", "42", 0.0),
        ("it is -3.0", "-3", 1.0),
        ("5 - 3 = 2", "2", 1.0),
        ("no number", "42", 0.0),
    ],
)
def test_flexible_gsm8k_compares_the_last_number(text: str, truth: str, score: float) -> None:
    assert gsm8k_flexible("openai/gsm8k", text, truth) == score


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        (r"so the answer is \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"thus \boxed{2\sqrt{3}}.", r"\sqrt{12}", 1.0),
        (r"thus \boxed{x^2+1}", "x^2-1", 0.0),
        ("I do not know", "3", 0.0),
    ],
)
def test_math_compares_values_not_characters(text: str, truth: str, score: float) -> None:
    pytest.importorskip("math_verify")
    assert default_compute_score("lighteval/MATH", text, truth) == score


THOUGHT = r"<think>\n2 + 2\n</think> so \boxed{4}"


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        (THOUGHT, "4", 1.0),
        (THOUGHT, "5", 0.1),
        (r"so \boxed{4}", "4", 0.9),
        (r"\boxed{3}, no: \boxed{\frac{8}{2}}", "4", 0.9),
        ("so 4", "4", 0.0),
    ],
)
def test_geometry_scores_the_boxed_answer_and_the_form(text: str, truth: str, score: float) -> None:
    pytest.importorskip("math_verify")
    assert default_compute_score("hiyouga/geometry3k", text, truth) == score


@pytest.mark.parametrize(
    ("text", "truth", "acc"),
    [
        ("Answer: 34", "34", 1.0),
        ("Answer: 7\nno\nanswer : 34", "34", 1.0),
        (r"Answer: \boxed{34}", "34", 1.0),
        ("Answer: $1,234$", "1234", 1.0),
        ("Answer: 7, or 34", "34", 0.0),
        (r"so \boxed{34}", "34", 1.0),
        (r"\boxed{34}" + " " * 400, "34", 0.0),
        ("34", "34", 0.0),
    ],
)
def test_dapo_scores_the_last_answer_with_plus_or_minus_one(
    text: str, truth: str, acc: float
) -> None:
    pytest.importorskip("math_verify")
    expected = {"score": 2 * acc - 1, "acc": acc}
    assert default_compute_score("math_dapo", text, truth) == expected


def test_math_without_its_package_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.rewards.functions.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'verl-like\[math\]'"):
        check_rules(["openai/gsm8k", "lighteval/MATH"])
    with pytest.raises(ConfigError, match=r"pip install 'verl-like\[math\]'"):
        check_rules(["hiyouga/geometry3k"])


def test_the_rules_load_without_torch() -> None:
    code = "import sys, workers.rewards.functions; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
