"""Rewards are summed by weight, optionally normalized, and a failure costs what is configured."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from trainer.ppo.config import PPOConfig
from trainer.ppo.filters import without_skipped
from verl_like.batch.protocol import DataProto
from verl_like.errors import RewardError, WorkerDiedError
from workers.config import OverlongPenaltyConfig, RewardConfig
from workers.rewards import weighted
from workers.rewards.manager import TermScores
from workers.rewards.outcome import MAX_KINDS, FailureLog, group_by_kind
from workers.rewards.weighted import (
    SKIPPED,
    Rewards,
    RewardTerm,
    overlong_punishment,
)

MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 1], [0, 0, 0]])


class ModelScores:
    """A reward model's finished future."""

    def __init__(self, scores: DataProto):
        self.scores = scores

    def get(self, timeout: float | None = None) -> DataProto:
        return self.scores

    def done(self) -> bool:
        return True


class FixedScores:
    """A manager with fixed scores; a NaN is a failed sample."""

    def __init__(self, sums: list[float], **extras: list[float]):
        self.sums, self.extras = torch.tensor(sums), extras

    def remote(self, batch: DataProto) -> Future[TermScores]:
        scores = torch.zeros(len(batch), 3)
        scores[:, 1] = self.sums.nan_to_num(0.0)
        ends = torch.zeros(scores.shape, dtype=torch.bool)
        ends[:, 1] = True
        failed = self.sums.isnan()
        extras = {name: np.array(values) for name, values in self.extras.items()}
        metrics = {"reward/num_failed": float(failed.sum()), "reward/num_timed_out": 0.0}
        failures = group_by_kind((str(row), "no") for row in failed.nonzero().flatten().tolist())
        scored: Future[TermScores] = Future()
        scored.set_result(TermScores(scores, ends, failed, failures, extras, metrics))
        return scored

    def close(self) -> None:
        pass


def batch() -> DataProto:
    return DataProto.from_dict({"response_mask": MASK}, {"uid": np.array(["a", "a", "a", "b"])})


def scores_of(*terms: RewardTerm, normalize: bool = True, overlong: Any = None) -> Any:
    def call_model(config: RewardConfig) -> ModelScores:
        return ModelScores(DataProto.from_dict({"rm_scores": torch.full((4, 3), config.weight)}))

    return Rewards(list(terms), overlong).launch(batch(), call_model, normalize).get()


def term(
    name: str,
    sums: list[float],
    extras: Any = None,
    max_failed_fraction: float = 1.0,
    **settings: Any,
) -> RewardTerm:
    manager: Any = FixedScores(sums, **(extras or {}))
    return RewardTerm(RewardConfig(name=name, **settings), manager, max_failed_fraction)


class NeverDone(Future[TermScores]):
    """A future that times out; `result` must not wait again after the wait of its caller."""

    def result(self, timeout: float | None = None) -> TermScores:
        assert timeout == 0
        return super().result(timeout)


class SlowManager:
    """A manager whose scores never arrive."""

    def remote(self, batch: DataProto) -> Future[TermScores]:
        return NeverDone()


def test_a_timeout_or_a_lost_worker_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def check(waiting_for: str) -> None:
        calls.append(waiting_for)
        if len(calls) == 2:
            raise WorkerDiedError(f"critic rank 0, idle during {waiting_for}: it ended")

    monkeypatch.setattr(weighted, "CHECK_S", 0.01)
    slow: Any = SlowManager()
    rewards = Rewards([RewardTerm(RewardConfig(name="judge"), slow)])
    scores = rewards.launch(batch(), lambda _: None, check=check)
    with pytest.raises(WorkerDiedError, match=r"idle during rewards \(judge\): it ended"):
        scores.get(timeout=5.0)
    with pytest.raises(TimeoutError):
        scores.get(timeout=0.02)


def test_the_sum_is_weighted_and_every_reward_is_logged() -> None:
    model = RewardTerm(RewardConfig(name="style", kind="model", weight=0.5), None)
    right = term("right", [1.0, 0.0, 1.0, 0.0], weight=2.0)
    scored, metrics = scores_of(right, model)
    sums = scored.batch["token_level_scores"].sum(-1)
    assert sums.tolist() == [2 + 0.75, 0.75, 2 + 0.75, 0.75]  # 3 positions of 0.5, times 0.5
    assert scored.non_tensor_batch["reward_extra/right_score"].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert metrics["reward/right_score/mean"] == 0.5
    assert metrics["reward/style_score/mean"] == 1.5
    assert metrics["reward/right/num_failed"] == 0.0


def test_metrics_and_columns_of_several_rewards_have_their_names() -> None:
    nan = float("nan")
    first = term("first", [nan, 1.0, 1.0, 1.0], {"acc": [1.0, 2.0, 3.0, 4.0]})
    second = term("second", [nan, nan, 1.0, 1.0], {"acc": [5.0, 6.0, 7.0, 8.0]})
    scored, metrics = scores_of(first, term("function", [1.0, 1.0, 1.0, nan]), second)
    failed = {name: value for name, value in metrics.items() if name.endswith("/num_failed")}
    assert failed == {
        "reward/num_failed": 4.0,
        "reward/first/num_failed": 1.0,
        "reward/second/num_failed": 2.0,
    }
    assert scored.non_tensor_batch["reward_extra/first/acc"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert scored.non_tensor_batch["reward_extra/second/acc"].tolist() == [5.0, 6.0, 7.0, 8.0]
    scored, _ = scores_of(first)
    assert set(scored.non_tensor_batch) == {"reward_extra/acc", "reward_extra/first_score"}


def test_normalized_scores_have_mean_0_and_std_1_except_in_validation() -> None:
    sums = [1.0, 3.0, float("nan"), 8.0]
    scored, _ = scores_of(term("a", sums, normalize=True))
    normalized_sums = scored.batch["token_level_scores"].double().sum(-1)
    valid = normalized_sums[[0, 1, 3]]
    assert valid.mean().item() == pytest.approx(0, abs=1e-6)
    assert valid.std(correction=0).item() == pytest.approx(1, abs=1e-6)
    assert normalized_sums[2] == 0
    plain, _ = scores_of(term("a", sums, normalize=True), normalize=False)
    assert plain.batch["token_level_scores"].sum(-1).tolist() == [1.0, 3.0, 0.0, 8.0]
    equal, _ = scores_of(term("a", [0.1] * 4, normalize=True))
    assert equal.batch["token_level_scores"].sum(-1).abs().max() < 1e-6


def test_a_failure_ends_the_run_if_on_failure_is_fail() -> None:
    judge = term("judge", [1.0, float("nan"), 0.0, 0.0], on_failure="fail")
    with pytest.raises(RewardError, match="reward 'judge' failed for 1 of 4 samples"):
        scores_of(judge)


@pytest.mark.parametrize("on_failure", ["score", "skip"])
def test_more_failures_than_max_failed_fraction_end_the_run(on_failure: str) -> None:
    nan = float("nan")
    rules: dict[str, Any] = {"on_failure": on_failure, "max_failed_fraction": 0.5}
    scores_of(term("judge", [nan, nan, 1.0, 1.0], **rules))
    with pytest.raises(RewardError, match=r"for 3 of 4 .*_fraction=0.5.*\n  0 and 2 more: no$"):
        scores_of(term("judge", [nan, nan, nan, 1.0], **rules))


def test_each_kind_of_failure_is_logged_once_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rewards = Rewards([term("judge", [float("nan"), 1.0, 1.0, 1.0])])
    for _ in range(3):
        rewards.launch(batch(), lambda _: None).get()
    rewards.close()
    first, totals = (record.getMessage() for record in caplog.records)
    assert "the reward 'judge' failed for 1 of 4 samples, which get the score 0" in first
    assert totals == "total failures of the reward 'judge':\n  0 and 2 more: no"


def test_only_some_kinds_of_failures_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog()
    for number in range(100):
        log.note("judge", 1, "get 0", group_by_kind([("0", f"words {number}")]))
    log.close()
    assert len(caplog.records) == MAX_KINDS + 2  # the others have one, and so have the totals
    assert "0 and 89 more: words 10" in caplog.text


def test_a_sum_that_is_infinite_in_float32_ends_the_run() -> None:
    huge = term("huge", [1.0, 3e38, 0.0, 0.0], weight=2.0)
    with pytest.raises(RewardError, match=r"scores of 1 of 4 samples are NaN or infinite.*uid a\."):
        scores_of(huge)


def test_a_skipped_sample_is_not_trained_and_moves_no_baseline() -> None:
    judge = term("judge", [1.0, float("nan"), 4.0, float("nan")], on_failure="skip")
    scored, metrics = scores_of(judge)
    assert metrics["reward/num_skipped"] == 2.0
    assert scored.batch["token_level_scores"].sum(-1).tolist() == [1.0, 2.5, 4.0, 0.0]
    assert scored.batch["token_level_scores"][1].tolist() == [0.0, 0.0, 2.5]
    assert scored.batch["step_ends"][:2].tolist() == [[False, True, False], [False, False, True]]

    trained = without_skipped(batch().union(scored), PPOConfig(), 1)[0]
    assert trained.batch["response_mask"].tolist() == [[1, 1, 0], [0, 0, 0], [1, 0, 1], [0, 0, 0]]
    assert scored.non_tensor_batch[SKIPPED].tolist() == [0.0, 1.0, 0.0, 1.0]


def test_the_mean_of_every_reward_leaves_out_skipped_samples() -> None:
    right = term("right", [1.0, 3.0, float("nan"), 5.0], on_failure="skip")
    _, metrics = scores_of(right, term("long", [1.0, 2.0, 30.0, 3.0]))
    assert metrics["reward/right_score/mean"] == 3.0
    assert metrics["reward/long_score/mean"] == 2.0
    _, metrics = scores_of(term("right", [float("nan")] * 4, on_failure="skip"))
    assert "reward/right_score/mean" not in metrics


def test_a_step_that_waits_for_a_reward_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weighted, "FIRST_MESSAGE_S", 0.02)
    monkeypatch.setattr(weighted, "CHECK_S", 0.01)
    manager: Any = SlowManager()
    rewards = Rewards([RewardTerm(RewardConfig(name="judge"), manager)])
    with pytest.raises(TimeoutError), caplog.at_level("WARNING"):
        rewards.launch(batch(), lambda _: None).get(timeout=0.2)
    (text,) = caplog.messages
    assert text.endswith("for the reward 'judge', which scores 4 samples (timeout_s=10 per sample)")


def test_overlong_responses_get_a_soft_penalty() -> None:
    buffer = OverlongPenaltyConfig(enable=True, len=4, penalty_factor=2.0)
    lengths = torch.tensor([0, 4, 5, 6, 8])
    mask = torch.arange(8) < lengths[:, None]
    assert overlong_punishment(mask, buffer).tolist() == [0.0, 0.0, -0.5, -1.0, -2.0]

    short = OverlongPenaltyConfig(enable=True, len=2, penalty_factor=1.0)
    scored, metrics = scores_of(term("function", [1.0] * 4), overlong=short)
    assert scored.batch["token_level_scores"].sum(-1).tolist() == [0.5, 0.0, 0.5, 1.0]
    assert scored.non_tensor_batch["reward_extra/overlong_reward"].tolist() == [-0.5, -1.0, -0.5, 0]
    assert metrics["reward/overlong_reward/mean"] == -0.5
