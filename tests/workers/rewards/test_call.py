"""Reward functions are called by keyword; a signature that cannot be filled is rejected."""

from __future__ import annotations

from typing import Any

import pytest

from verl_like.errors import ConfigError
from workers.rewards.call import RewardCall
from workers.rewards.outcome import ScoreOutcome
from workers.rewards.process import Calls
from workers.rewards.scorer import FunctionSpec

SAMPLE = {"data_source": "s", "solution_str": "four", "ground_truth": "4", "uid": "0-0"}


def in_any_order(ground_truth: str, solution_str: str, weight: float = 1.0) -> str:
    return f"{solution_str} is {ground_truth} x {weight}"


def returns_a_list(response: str) -> list[float]:
    return list(map(float, response))


def lengths_plus_truths(solution_strs: list[str], ground_truths: list[str]) -> list[float]:
    return [
        len(text) + float(truth) for text, truth in zip(solution_strs, ground_truths, strict=True)
    ]


def one_score_too_few(solution_strs: list[str]) -> list[float]:
    return [0.0] * (len(solution_strs) - 1)


def score_batch(function: Any, samples: list[Any]) -> list[ScoreOutcome]:
    return Calls(RewardCall.of(function, {}), FunctionSpec(deadline=1.0)).score_batch(samples)


ROW = {**SAMPLE, "raw_prompt": "2 + 2", "answer": "5", "response": "the data's own"}


@pytest.mark.parametrize(
    ("function", "kwargs", "columns", "expected"),
    [
        (in_any_order, {"weight": 2.0}, [], "four is 4 x 2.0"),
        (lambda **fields: sorted(fields), {"bonus": 1}, [], sorted([*ROW, "bonus"])),
        (
            lambda prompt, response, answer: (prompt, response, answer),
            {},
            ["answer"],
            ("2 + 2", "four", "5"),
        ),
        (
            lambda prompt, response, **row: (prompt, response, row["answer"]),
            {},
            ["answer"],
            ("2 + 2", "four", "5"),
        ),
        (lambda response, completions: completions, {}, ["completions"], 3),
    ],
)
def test_parameters_are_filled_by_name(
    function: Any, kwargs: dict[str, Any], columns: list[str], expected: Any
) -> None:
    row = {**ROW, "completions": 3} if "completions" in columns else ROW
    assert RewardCall.of(function, kwargs, columns)(row) == expected


def test_a_batch_function_gets_columns_as_lists() -> None:
    call = RewardCall.of(
        lambda prompts, num_tokens, responses, answer: [prompts, num_tokens, responses, answer],
        {},
        ["answer"],
    )
    row = {**SAMPLE, "num_tokens": 1}
    rows = [{**row, "raw_prompt": "p", "answer": "4"}, {**row, "raw_prompt": "q"}]
    assert call.whole_batch(rows) == [["p", "q"], [1, 1], ["four", "four"], ["4", None]]


def test_a_ground_truth_that_no_row_has_is_optional() -> None:
    call = RewardCall.of(lambda response, ground_truth=None: ground_truth, {}, has_truth=False)
    assert call(SAMPLE) is None
    assert RewardCall.of(in_any_order, {"ground_truth": "4"}, has_truth=False)(SAMPLE)


def test_plural_parameters_get_the_whole_batch() -> None:
    assert RewardCall.of(lengths_plus_truths, {}).takes_batches
    outcomes = score_batch(lengths_plus_truths, [SAMPLE, {**SAMPLE, "solution_str": "a"}])
    assert outcomes == [(8.0, {}, None), (5.0, {}, None)]


def test_a_trl_reward_function_gets_trls_arguments() -> None:
    def of_trl(completions: list[Any], answer: list[str], **kwargs: Any) -> list[Any]:
        return list(
            zip(completions, answer, kwargs["prompts"], kwargs["ground_truth"], strict=True)
        )

    chat = [{"role": "user", "content": "2 + 2"}]
    rows = [{**SAMPLE, "raw_prompt": "p", "answer": "4"}, {**SAMPLE, "raw_prompt": chat}]
    call = RewardCall.of(of_trl, {}, ["answer"])
    message = {"role": "assistant", "content": "four"}
    assert call.takes_batches
    assert call.whole_batch(rows) == [("four", "4", "p", "4"), ([message], None, chat, "4")]
    fewer = RewardCall.of(lambda completions: completions, {})
    assert fewer.reads == ["completions", "raw_prompt", "solution_str"]


def test_a_batch_with_too_few_scores_fails() -> None:
    outcomes = score_batch(one_score_too_few, [SAMPLE] * 3)
    reason = "ValueError: the reward function received 3 samples, but returned 2 scores"
    assert outcomes == [(None, {}, reason)] * 3


@pytest.mark.parametrize(
    ("function", "columns", "has_truth", "words"),
    [
        (lambda solution: 0.0, [], True, "function <lambda> has an unknown parameter 'solution'"),
        (lambda solution_str, /: 0.0, [], True, "positional-only parameter 'solution_str'"),
        (lambda solution_strs, ground_truth: 0.0, [], True, "parameter 'ground_truth'"),
        (returns_a_list, [], True, "returns a list.*, but it is called on one sample"),
        (
            lambda response, topic: 0.0,
            ["answer", "level"],
            True,
            r"'topic'.*the rows' columns answer, level,",
        ),
        (
            in_any_order,
            ["answer"],
            False,
            r"parameter ground_truth, .*the rows' columns: answer\)",
        ),
        (lambda topic: 0.0, [], False, "solution_str, extra_info"),
        (3, [], True, "the reward is 3, an object of type int"),
    ],
)
def test_a_function_that_cannot_be_called_is_rejected(
    function: Any, columns: list[str], has_truth: bool, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        RewardCall.of(function, {}, columns, has_truth)
