"""Rewards come from a process of their own; a function that raises or hangs costs its samples, never the step."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer.data import as_objects, load_tokenizer
from trainer.reward import RewardManager
from verl_like.errors import ConfigError
from verl_like.protocol import DataProto

FUNCTIONS = """
import os, time

def odd(data_source, solution_str, ground_truth, extra_info):
    if ground_truth == "raise":
        raise RuntimeError("no such answer")
    if ground_truth == "hang":
        time.sleep(60)
    if ground_truth == "exit":
        os._exit(3)
    if ground_truth == "nan":
        return float("nan")
    if ground_truth == "text":
        return "0.5"
    if ground_truth == "extra":
        return {"score": 2.0, "accuracy": 1, "note": "not a number"}
    return float(len(solution_str))
"""


@pytest.fixture(scope="module")
def tokenizer(tiny_dir: Path) -> Any:
    return load_tokenizer(str(tiny_dir / "model"))


@pytest.fixture
def managers(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "odd_rewards.py").write_text(FUNCTIONS, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    made = []

    def make(function: str = "odd_rewards.odd", **settings: Any) -> RewardManager:
        made.append(RewardManager(tokenizer, function, **settings))
        return made[-1]

    yield make
    for manager in made:
        manager.close()


def make_batch(tokenizer: Any, solutions: list[str], truths: list[str], width: int = 8, source: str = "s") -> DataProto:
    responses = torch.full((len(solutions), width), tokenizer.pad_token_id)
    mask = torch.zeros_like(responses)
    for row, text in enumerate(solutions):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] * bool(text)
        responses[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        mask[row, : len(ids)] = 1
    return DataProto.from_dict(
        tensors={"responses": responses, "response_mask": mask},
        non_tensors={
            "uid": as_objects([f"{row}-0" for row in range(len(solutions))]),
            "data_source": as_objects([source] * len(solutions)),
            "reward_model": as_objects([{"ground_truth": truth} for truth in truths]),
            "extra_info": as_objects([{} for _ in solutions]),
        },
    )


def test_the_score_stands_at_the_last_response_token(managers: Any, tokenizer: Any) -> None:
    scores = managers().remote(make_batch(tokenizer, ["ab", "abcd", ""], ["", "", ""])).get()
    expected = torch.zeros(3, 8)
    expected[0, 2], expected[1, 4] = 2.0, 4.0
    assert torch.equal(scores.batch["token_level_scores"], expected)
    assert scores.meta_info["reward_metrics"] == {"reward/num_failed": 0.0, "reward/num_timed_out": 0.0}


def test_the_default_rules_score_the_tiny_task(managers: Any, tokenizer: Any) -> None:
    manager = managers("workers.reward_functions.default_compute_score")
    batch = make_batch(tokenizer, ["aab", "c"], ["a", "a"], source="verl_like/tiny_letters")
    assert manager.remote(batch).get().batch["token_level_scores"].sum(-1).tolist() == pytest.approx([2 / 3, 0.0])


@pytest.mark.parametrize("truth", ["raise", "nan", "text", "exit"])
def test_a_failing_sample_gets_the_default_score_and_the_others_theirs(
    managers: Any, tokenizer: Any, truth: str, caplog: pytest.LogCaptureFixture
) -> None:
    scores = managers(default_score=-1.0).remote(make_batch(tokenizer, ["a", "ab", "abc"], ["", truth, ""])).get()
    assert scores.batch["token_level_scores"].sum(-1).tolist() == [1.0, -1.0, 3.0]
    assert scores.meta_info["reward_metrics"] == {"reward/num_failed": 1.0, "reward/num_timed_out": 0.0}
    assert "1-0" in caplog.text


def test_a_hanging_sample_is_killed_at_its_deadline(managers: Any, tokenizer: Any) -> None:
    manager = managers(sample_deadline=1.5)
    scores = manager.remote(make_batch(tokenizer, ["a", "ab", "abc"], ["", "hang", ""])).get(timeout=20)
    assert scores.batch["token_level_scores"].sum(-1).tolist() == [1.0, 0.0, 3.0]
    assert scores.meta_info["reward_metrics"] == {"reward/num_failed": 0.0, "reward/num_timed_out": 1.0}


def test_many_hanging_samples_end_at_the_batch_deadline(managers: Any, tokenizer: Any) -> None:
    manager = managers(sample_deadline=60.0, batch_deadline=1.0)
    scores = manager.remote(make_batch(tokenizer, ["a"] * 5, ["hang"] * 5)).get(timeout=20)
    assert scores.meta_info["reward_metrics"]["reward/num_timed_out"] == 5.0


@pytest.mark.parametrize("path", ["odd_rewards.even", "no_such_module.odd"])
def test_a_function_that_cannot_be_imported_is_refused_at_once(managers: Any, path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        managers(path)


def test_other_numbers_of_the_function_become_columns(managers: Any, tokenizer: Any) -> None:
    scores = managers().remote(make_batch(tokenizer, ["a", "ab"], ["extra", ""])).get()
    np.testing.assert_array_equal(scores.non_tensor_batch["reward_extra/accuracy"], [1.0, np.nan])
    assert list(scores.non_tensor_batch) == ["reward_extra/accuracy"]


def test_the_caller_does_not_wait(managers: Any, tokenizer: Any) -> None:
    future = managers(sample_deadline=0.3).remote(make_batch(tokenizer, ["a"], ["hang"]))
    assert not future.done()
    with pytest.raises(TimeoutError):
        future.get(timeout=0.05)


def test_batches_are_scored_in_the_order_they_came(managers: Any, tokenizer: Any) -> None:
    manager = managers()
    futures = [manager.remote(make_batch(tokenizer, ["a" * length], [""])) for length in range(1, 6)]
    assert [f.get().batch["token_level_scores"].sum().item() for f in futures] == [1.0, 2.0, 3.0, 4.0, 5.0]
