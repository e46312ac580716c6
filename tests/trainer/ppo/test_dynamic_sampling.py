"""Groups of equal scores are replaced by further prompts, a bounded number of times."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainer.ppo.config import FilterGroupsConfig
from trainer.ppo.sampling import collect_groups, merge_attempts
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError


def drawn(
    scores: list[list[float]], attempt: int, **extras: list[float]
) -> tuple[DataProto, dict[str, float]]:
    """Return a draw with a row of `scores` for each prompt."""
    flat = [score for group in scores for score in group]
    uids = [f"{prompt}-{attempt}" for prompt, group in enumerate(scores) for _ in group]
    columns = {"uid": np.array(uids, dtype=object)}
    columns |= {f"reward_extra/{name}": np.array(values) for name, values in extras.items()}
    batch = DataProto.from_dict(
        tensors={"token_level_scores": torch.tensor([[score, 0.0] for score in flat])},
        non_tensors=columns,
    )
    return batch, {"reward/num_failed": 1.0, "reward/mean": float(attempt)}


def test_the_first_groups_of_different_scores_are_kept_in_order() -> None:
    draws = [[[0, 0], [0, 1], [1, 1]], [[1, 1], [1, 0], [0, 1]]]
    batch, _, metrics = collect_groups(
        lambda a: drawn(draws[a], a), 2, FilterGroupsConfig(enable=True)
    )
    assert batch.non_tensor_batch["uid"].tolist() == ["1-0", "1-0", "1-1", "1-1"]
    assert metrics == {
        "reward/num_failed": 2.0,
        "reward/mean": 0.5,
        "dynamic_sampling/num_gen_batches": 2.0,
        "dynamic_sampling/num_groups_sampled": 6.0,
        "dynamic_sampling/num_groups_of_equal_scores": 0.0,
    }


def test_equal_groups_fill_the_batch_after_the_last_draw(caplog: pytest.LogCaptureFixture) -> None:
    config = FilterGroupsConfig(enable=True, max_num_gen_batches=2)
    batch, _, metrics = collect_groups(lambda a: drawn([[0, 0], [a, 1]], a), 3, config)
    assert batch.non_tensor_batch["uid"].tolist() == ["1-0", "1-0", "0-0", "0-0", "0-1", "0-1"]
    assert metrics["dynamic_sampling/num_groups_of_equal_scores"] == 2.0
    assert "3 groups have equal values of seq_reward after 2 generated batches" in caplog.text


def test_groups_of_one_are_never_refilled() -> None:
    batch, _, metrics = collect_groups(
        lambda a: drawn([[1], [1]], a), 2, FilterGroupsConfig(enable=True)
    )
    assert len(batch) == 2
    assert metrics["dynamic_sampling/num_gen_batches"] == 1.0


def test_another_metric_of_the_reward_function_can_be_compared() -> None:
    config = FilterGroupsConfig(enable=True, metric="acc", max_num_gen_batches=1)
    batch, _, _ = collect_groups(lambda a: drawn([[0, 1], [0, 1]], a, acc=[1, 1, 0, 1]), 1, config)
    assert batch.non_tensor_batch["uid"].tolist() == ["1-0", "1-0"]
    with pytest.raises(
        ConfigError, match="metric=ac: choose seq_reward.*here: seq_reward, acc. Did you mean 'acc'"
    ):
        collect_groups(
            lambda a: drawn([[0, 1]], a, acc=[1, 1]),
            1,
            FilterGroupsConfig(enable=True, metric="ac"),
        )


def test_nan_scores_do_not_make_a_group_different() -> None:
    nan = float("nan")
    config = FilterGroupsConfig(enable=True, metric="acc", max_num_gen_batches=1)
    draw = [[0, 1], [0, 1], [0, 1], [0, 1]]
    acc = [nan, nan, nan, 1, nan, 0, 0, 1]
    batch, _, metrics = collect_groups(lambda a: drawn(draw, a, acc=acc), 2, config)
    assert batch.non_tensor_batch["uid"].tolist()[:2] == ["3-0", "3-0"]
    assert metrics["dynamic_sampling/num_groups_of_equal_scores"] == 1.0

    _, _, metrics = collect_groups(lambda a: drawn([[1], [1]], a, acc=[nan, 1]), 2, config)
    assert metrics["dynamic_sampling/num_groups_of_equal_scores"] == 1.0


def test_metrics_of_several_draws_are_merged_by_name() -> None:
    first = {"reward/num_failed": 1.0, "length/max": 5.0, "length/min": 2.0, "reward/mean": 1.0}
    second = {"reward/num_failed": 2.0, "length/max": 9.0, "length/min": 4.0, "reward/mean": 0.0}
    turns = {"agents/num_turns/mean": 2.0, "agents/num_turns/max": 3.0}
    assert merge_attempts([first | turns, second | turns]) == {
        **turns,
        "reward/num_failed": 3.0,
        "length/max": 9.0,
        "length/min": 2.0,
        "reward/mean": 0.5,
    }
