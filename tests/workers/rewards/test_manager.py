"""Rewards come from a separate process; a function that raises or hangs costs only its samples."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.forked import start_python
from trainer.ppo.config import PPOConfig
from verl_like.batch.columns import object_rows
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError
from verl_like.process import child
from workers.config import RewardConfig, RewardFunctionConfig, ScoringConfig
from workers.rewards import scorer
from workers.rewards.manager import RewardManager
from workers.rewards.scorer import FunctionSpec
from workers.rewards.weighted import Rewards, _with_rules_for, make_rewards

FUNCTIONS = """
import asyncio, os, time

async def odd_async(data_source, solution_str, ground_truth, extra_info, bonus):
    if ground_truth == "hang":
        await asyncio.sleep(60)
    await asyncio.sleep(0.1)
    return odd(data_source, solution_str, ground_truth, extra_info, bonus)

def odd(data_source, solution_str, ground_truth, extra_info, bonus):
    if ground_truth == "raise":
        raise RuntimeError("no such answer")
    if ground_truth == "hang":
        time.sleep(60)
    if ground_truth == "exit":
        os._exit(3)
    if ground_truth == "slow":
        time.sleep(0.04)
        return {"score": len(solution_str), "pid": os.getpid()}
    if ground_truth == "nan":
        return float("nan")
    if ground_truth == "nothing":
        return None
    if ground_truth == "steps":
        return {"score": 1.0, "step_scores": [[0, 0.5], (2, 0.0), [99, 0.25]]}
    if ground_truth == "only steps":
        return {"step_scores": [[1, 0.5]]}
    if ground_truth == "step before the first":
        return {"score": 1.0, "step_scores": [[-1, 0.5]]}
    if ground_truth == "extra":
        import numpy
        numbers = {"score": numpy.float32(2), "accuracy": 1, "share": numpy.float32(0.5)}
        return numbers | {"note": "not a number", "words": {"a"}, "one": numpy.zeros(1)}
    return float(len(solution_str)) + bonus
"""


@pytest.fixture(scope="module")
def managers(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a function that creates a manager, or returns the one with the same settings."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "odd_rewards.py").write_text(FUNCTIONS, encoding="utf-8")
    managers: dict[Any, RewardManager] = {}

    def make(
        name: str = "odd", deadline: float = 10.0, batch_deadline: float = 120.0, **settings: Any
    ) -> RewardManager:
        key = name, deadline, batch_deadline, *settings.items()
        if key not in managers:
            function = FunctionSpec("odd_rewards", name, {"bonus": 0.0}, deadline)
            scores = scorer.Scorer(function, batch_deadline)
            managers[key] = RewardManager(tokenizer, scores, **settings)
        return managers[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder), *sys.path])
        yield make
    for manager in managers.values():
        manager.close()


def rewards_of(tokenizer: Any, **settings: Any) -> Rewards:
    """Return the rewards of a configuration."""
    config = PPOConfig(data=None, trainer=None, reward=ScoringConfig(**settings))
    rows: Any = SimpleNamespace(
        data_sources={"verl_like/tiny_letters"}, columns=[], has_truth=True, has_open_asserts=False
    )
    return make_rewards(config, tokenizer, rows)


def make_batch(tokenizer: Any, solutions: list[str], truths: list[str]) -> DataProto:
    responses = torch.full((len(solutions), 8), tokenizer.pad_token_id)
    mask = torch.zeros_like(responses)
    for row, text in enumerate(solutions):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += [tokenizer.eos_token_id] * bool(text)
        responses[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        mask[row, : len(ids)] = 1
    return DataProto.from_dict(
        tensors={"responses": responses, "response_mask": mask},
        non_tensors={
            "uid": object_rows([f"{row}-0" for row in range(len(solutions))]),
            "data_source": object_rows(["s"] * len(solutions)),
            "reward_model": object_rows([{"ground_truth": truth} for truth in truths]),
            "extra_info": object_rows([{} for _ in solutions]),
        },
    )


def counts(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a scoring without its time, which is positive."""
    counted = dict(metrics)
    assert counted.pop("timing_s/reward") > 0
    return counted


def test_the_score_is_at_the_last_response_token(managers: Any, tokenizer: Any) -> None:
    batch = make_batch(tokenizer, ["ab", "abcd", ""], ["", "", ""])
    batch.batch["response_mask"][1, 1:3] = 0  # a tool's reply
    scored = managers().remote(batch).result()
    expected = torch.zeros(3, 8)
    expected[0, 2], expected[1, 4] = 2.0, scored.scores[1].sum()
    assert expected[1, 4] > 0
    assert torch.equal(scored.scores, expected)
    assert counts(scored.metrics) == {"reward/num_failed": 0.0, "reward/num_timed_out": 0.0}


@pytest.mark.parametrize(
    ("name", "truth"), [("odd", "nan"), ("odd", "nothing"), ("odd_async", "raise")]
)
def test_only_a_failing_sample_gets_the_score_on_failure(
    managers: Any, tokenizer: Any, name: str, truth: str
) -> None:
    batch = make_batch(tokenizer, ["a", "ab", "abc"], ["", truth, ""])
    scored = managers(name, score_on_failure=-1.0).remote(batch).result()
    assert scored.scores.sum(-1).tolist() == [1.0, -1.0, 3.0]
    assert counts(scored.metrics) == {"reward/num_failed": 1.0, "reward/num_timed_out": 0.0}
    (failure,) = scored.failures.values()
    assert failure.uid == "1-0"
    if truth == "raise":  # in a function that odd_async calls, too
        assert str(failure).endswith('line 12: raise RuntimeError("no such answer")')


def test_a_hanging_coroutine_ends_at_its_deadline(managers: Any, tokenizer: Any) -> None:
    batch = make_batch(tokenizer, ["a", "ab", "abc"], ["", "hang", ""])
    scored = managers("odd_async", deadline=0.6).remote(batch).result(timeout=20)
    assert scored.scores.sum(-1).tolist() == [1.0, 0.0, 3.0]
    assert counts(scored.metrics) == {"reward/num_failed": 1.0, "reward/num_timed_out": 1.0}


def test_many_hanging_samples_end_at_the_batch_deadline(managers: Any, tokenizer: Any) -> None:
    batch = make_batch(tokenizer, ["a"] * 5, ["hang"] * 5)
    manager = managers(deadline=60.0, batch_deadline=1.0)
    scored = manager.remote(batch).result(timeout=20)
    assert scored.metrics["reward/num_timed_out"] == 5.0


def test_errors_name_the_keys_of_one_reward_in_the_list(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"^reward.list\[0\]\.path=no_such_file\.py: there is no"):
        rewards_of(
            tokenizer, list=[RewardConfig(name="first", path="no_such_file.py", function="odd")]
        )


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def f(:", "broken.py, line 1: invalid syntax: def f"),
        ("import sys; sys.exit(2)", r"it ends the process, with sys.exit\(2\)"),
        (
            "from verl_like.process.sandbox import reject_nested_run as run\nrun()",
            "Put the lines that start a run under `if __name__ == '__main__':`",
        ),
        ("import os; os._exit(3)", "its process ended with exit code 3. Its output is above"),
    ],
)
def test_a_function_that_fails_to_load_is_rejected(
    tokenizer: Any, tmp_path: Path, code: str, words: str
) -> None:
    path = tmp_path / "broken.py"
    path.write_text(code, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        rewards_of(tokenizer, function=RewardFunctionConfig(path=str(path), name="f"))


def test_a_function_in_a_file_gets_its_keyword_arguments(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "odd_rewards.py"
    path.write_text(FUNCTIONS, encoding="utf-8")
    function = RewardFunctionConfig(path=str(path), name="odd", kwargs={"bonus": 0.5})
    with closing(rewards_of(tokenizer, function=function)) as rewards:
        future = rewards.launch(make_batch(tokenizer, ["ab"], [""]), lambda _: None)
        scores, _ = future.get()
    assert scores.batch["token_level_scores"].sum().item() == 2.5


def test_the_default_rule_is_left_out_next_to_a_reward_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def names(*sources: str) -> list[str]:
        rows: Any = SimpleNamespace(data_sources={*sources})
        rewards = [RewardConfig(name="rule"), RewardConfig(name="model", kind="model", path="rm")]
        return [reward.name for reward in _with_rules_for(rows, rewards)]

    assert names("mine") == ["model"]
    assert "no row's data_source has a rule" in capsys.readouterr().out
    assert names("mine", "verl_like/tiny_letters") == ["rule", "model"]
    assert capsys.readouterr().out == ""


def test_a_slow_batch_gets_more_processes(
    managers: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer, "ADD_PROCESS_EVERY_S", 0.2)
    monkeypatch.setattr(scorer, "usable_cores", lambda: 4)
    manager = managers(deadline=2.0)
    quick = manager.remote(make_batch(tokenizer, ["a"] * 20, [""] * 20)).result()
    assert quick.scores.sum() == 20
    truths = ["slow"] * 80
    truths[10], truths[30], truths[50] = "hang", "exit", "raise"
    solutions = ["a" * (1 + row % 7) for row in range(80)]
    scored = manager.remote(make_batch(tokenizer, solutions, truths)).result(timeout=30)
    expected = [
        0.0 if truth != "slow" else len(text) for text, truth in zip(solutions, truths, strict=True)
    ]
    assert scored.scores.sum(-1).tolist() == expected
    assert counts(scored.metrics)["reward/num_failed"] == 3.0
    assert counts(scored.metrics)["reward/num_timed_out"] == 1.0
    pids = scored.extras["pid"]
    assert len(set(pids[~np.isnan(pids)])) >= 4


def test_other_processes_score_if_one_does_not_start(
    managers: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scorer, "ADD_PROCESS_EVERY_S", 0.1)
    monkeypatch.setattr(scorer, "usable_cores", lambda: 2)
    manager = managers(deadline=3.0)
    manager.remote(make_batch(tokenizer, ["a"], [""])).result()
    monkeypatch.setattr(child, "_start_python", start_python)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    scored = manager.remote(make_batch(tokenizer, ["ab"] * 20, ["slow"] * 20)).result()
    assert scored.scores.sum(-1).tolist() == [2.0] * 20
    assert "a process of odd_rewards:odd could not be started" in caplog.text


def test_coroutines_run_concurrently(managers: Any, tokenizer: Any) -> None:
    manager = managers("odd_async")
    began = time.monotonic()
    manager.remote(make_batch(tokenizer, ["a"] * 40, [""] * 40)).result()
    assert time.monotonic() - began < 40 * 0.1


def test_step_scores_are_at_their_tokens(managers: Any, tokenizer: Any) -> None:
    truths = ["steps", "only steps", "", "step before the first"]
    batch = make_batch(tokenizer, ["abcd"] * 4, truths)
    mask = batch.batch["response_mask"]
    mask[0, 1] = 0  # a tool's token: the response's tokens are 0, 2, 3, …
    width, last = mask.shape[1], int(mask[1].sum()) - 1
    scored = managers().remote(batch).result()

    expected = torch.zeros(4, width)
    expected[0, 0], expected[0, last], expected[1, 1] = 0.5, 1.25, 0.5
    expected[2, last] = scored.scores[2, last]
    assert torch.equal(scored.scores, expected)
    ends = [row.nonzero().flatten().tolist() for row in scored.step_ends]
    assert ends == [[0, 3, last], [1], [last], [last]]
    assert scored.metrics["reward/num_failed"] == 1.0
    assert "step_scores" not in scored.extras


def test_other_numbers_of_the_function_become_columns(managers: Any, tokenizer: Any) -> None:
    scored = managers().remote(make_batch(tokenizer, ["a", "ab"], ["extra", ""])).result()
    assert scored.metrics["reward/accuracy/mean"] == 1.0
    np.testing.assert_array_equal(scored.extras["accuracy"], [1.0, np.nan])
    assert list(scored.extras) == ["accuracy", "share"]
    assert scored.metrics["reward/share/mean"] == 0.5
    assert scored.note.startswith("'words' (set), 'one' (ndarray) cannot be written as JSON")
    assert scored.metrics["reward/num_failed"] == 0.0
    assert scored.metrics["reward/num_ignored"] == 1.0


@pytest.mark.parametrize(("name", "slow_s"), [("odd", 60.0), ("odd_async", 0.1)])
def test_a_manager_closes_immediately_even_if_its_function_hangs(
    tokenizer: Any, managers: Any, monkeypatch: pytest.MonkeyPatch, name: str, slow_s: float
) -> None:
    monkeypatch.setattr(scorer, "ADD_PROCESS_EVERY_S", slow_s)
    monkeypatch.setattr(scorer, "usable_cores", lambda: 2)
    manager = managers(name, deadline=50.0 + slow_s)  # only this test uses it
    future = manager.remote(make_batch(tokenizer, ["a"] * 4, ["hang"] * 4))
    time.sleep(0.5)  # well within the calls
    began = time.monotonic()
    manager.close()
    assert time.monotonic() - began < 10.0
    assert counts(future.result().metrics)["reward/num_failed"] == 4
