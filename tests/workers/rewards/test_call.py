"""Reward functions are called by keyword; a signature that cannot be filled is rejected."""

from __future__ import annotations

from typing import Any

import pytest

from verl_like.errors import ConfigError
from workers.rewards.call import RewardCall
from workers.rewards.outcome import Outcome
from workers.rewards.process import Calls, FunctionSpec

SAMPLE = {"data_source": "s", "solution_str": "four", "ground_truth": "4", "uid": "0-0"}


def in_any_order(ground_truth: str, solution_str: str, weight: float = 1.0) -> str:
    return f"{solution_str} is {ground_truth} x {weight}"


def with_every_field(**fields: Any) -> Any:
    return sorted(fields)


def of_a_batch(solution_strs: list[str], ground_truths: list[str]) -> list[float]:
    return [
        len(text) + float(truth) for text, truth in zip(solution_strs, ground_truths, strict=True)
    ]


def one_too_few(solution_strs: list[str]) -> list[float]:
    return [0.0] * (len(solution_strs) - 1)


def score_batch(function: Any, samples: list[Any]) -> list[Outcome]:
    return Calls(RewardCall.of(function, {}), FunctionSpec(deadline=1.0)).score_batch(samples)


def test_a_list_for_one_sample_is_rejected_at_the_start() -> None:
    def annotated(response: str) -> list[float]:
        return list(map(float, response))

    with pytest.raises(ConfigError, match=r"returns a list.*, but it is called on one sample"):
        RewardCall.of(annotated, {})
    assert RewardCall.of(of_a_batch, {}).takes_batches


def test_names_decide_not_places() -> None:
    assert RewardCall.of(in_any_order, {"weight": 2.0})(SAMPLE) == "four is 4 x 2.0"


def test_a_function_that_takes_any_keyword_sees_the_whole_row() -> None:
    assert RewardCall.of(with_every_field, {"bonus": 1})(SAMPLE) == [*sorted([*SAMPLE, "bonus"])]


def test_prompt_and_response_are_names_of_two_fields() -> None:
    sample = {**SAMPLE, "raw_prompt": "2 + 2", "answer": "four"}
    call = RewardCall.of(
        lambda prompt, response, answer: (prompt, response, answer), {}, ["answer"]
    )
    assert call(sample) == ("2 + 2", "four", "four")


def test_the_rest_of_a_row_goes_to_a_function_that_takes_any_keyword() -> None:
    sample = {**SAMPLE, "raw_prompt": "2 + 2", "answer": "4", "response": "the data's own"}
    call = RewardCall.of(lambda prompt, response, **row: (prompt, response, row), {}, ["answer"])
    prompt, response, row = call(sample)
    assert (prompt, response, row["answer"]) == ("2 + 2", "four", "4")


def test_a_function_of_responses_gets_columns_as_lists() -> None:
    call = RewardCall.of(
        lambda prompts, responses, answer: [prompts, responses, answer], {}, ["answer"]
    )
    rows = [{**SAMPLE, "raw_prompt": "p", "answer": "4"}, {**SAMPLE, "raw_prompt": "q"}]
    assert call.whole_batch(rows) == [["p", "q"], ["four", "four"], ["4", None]]


def test_a_column_that_only_some_data_has_fills_nothing() -> None:
    with pytest.raises(ConfigError, match=r"'topic'.*the rows' columns answer, level,"):
        RewardCall.of(lambda response, topic: 0.0, {}, ["answer", "level"])


def test_a_ground_truth_that_no_row_has_is_refused_with_the_columns_there_are() -> None:
    with pytest.raises(ConfigError, match=r"parameter ground_truth, .*the rows' columns: answer\)"):
        RewardCall.of(in_any_order, {}, ["answer"], has_truth=False)
    optional = RewardCall.of(lambda response, ground_truth=None: ground_truth, {}, has_truth=False)
    assert optional(SAMPLE) is None
    assert RewardCall.of(in_any_order, {"ground_truth": "4"}, has_truth=False)(SAMPLE)
    with pytest.raises(ConfigError, match="solution_str, extra_info"):
        RewardCall.of(lambda topic: 0.0, {}, has_truth=False)


def test_plurals_get_the_whole_batch() -> None:
    assert RewardCall.of(of_a_batch, {}).takes_batches
    outcomes = score_batch(of_a_batch, [SAMPLE, {**SAMPLE, "solution_str": "a"}])
    assert outcomes == [(8.0, {}, None), (5.0, {}, None)]


def test_a_reward_function_of_trl_gets_what_trl_passes() -> None:
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


def test_a_column_named_completions_is_no_mark_of_trl() -> None:
    call = RewardCall.of(lambda response, completions: completions, {}, ["completions"])
    assert call({**SAMPLE, "completions": 3}) == 3


def test_a_batch_with_a_score_too_few_fails_whole() -> None:
    outcomes = score_batch(one_too_few, [SAMPLE] * 3)
    assert outcomes == [(None, {}, "ValueError: it received 3 samples but returned 2 scores")] * 3


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda solution: 0.0, "the reward function has an unknown parameter 'solution'"),
        (lambda solution_str, /: 0.0, "'solution_str' is positional-only"),
        (lambda solution_strs, ground_truth: 0.0, "parameter 'ground_truth'"),
    ],
)
def test_a_parameter_that_nothing_fills_is_refused(function: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RewardCall.of(function, {})


def test_a_name_that_stands_for_no_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="the reward is 3, an object of type int"):
        RewardCall.of(3, {})
