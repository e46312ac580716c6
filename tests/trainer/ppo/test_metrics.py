"""Metrics of a step against their definitions."""

import numpy as np
import pytest
import torch

from trainer.ppo.metrics import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
)
from verl_like.batch.protocol import DataProto
from verl_like.errors import MissingColumnError


@pytest.fixture
def batch():
    """Prompts of 2, 1 and 3 tokens (of at most 3), responses of 4, 2 and 0 (of at most 4)."""
    attention_mask = torch.tensor(
        [[0, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0, 0]]
    )
    mask = attention_mask[:, 3:]
    torch.manual_seed(0)
    columns = {name: torch.randn(3, 4) for name in ("advantages", "returns", "values")}
    scores = torch.tensor([[0, 0, 0, 1.0], [0, 3.0, 0, 0], [9.0, 0, 0, 0]])
    columns |= {"token_level_scores": scores, "token_level_rewards": scores - 0.5 * mask}
    return DataProto.from_dict(
        tensors={
            "attention_mask": attention_mask,
            "response_mask": mask,
            "responses": mask * 7,
            **columns,
        }
    )


def test_data_metrics_have_verls_names_and_definitions(batch):
    metrics = compute_data_metrics(batch)
    inside = batch.batch["response_mask"].bool()
    expected = {
        "critic/score/mean": 2.0,  # the third row has no response
        "critic/score/max": 3.0,
        "critic/score/min": 1.0,
        "critic/rewards/mean": (1 - 2 + 3 - 1) / 2,
        "critic/rewards/max": 2.0,
        "critic/rewards/min": -1.0,
        "response_length/mean": 2.0,
        "response_length/max": 4.0,
        "response_length/min": 0.0,
        "response_length/clip_ratio": 1 / 3,
        "response_length_non_aborted/mean": 3.0,
        "response_length_non_aborted/max": 4.0,
        "response_length_non_aborted/min": 2.0,
        "response_length_non_aborted/clip_ratio": 1 / 2,
        "response/aborted_ratio": 1 / 3,
        "prompt_length/mean": 2.0,
        "prompt_length/max": 3.0,
        "prompt_length/min": 1.0,
        "prompt_length/clip_ratio": 1 / 3,
    }
    for name in ("advantages", "returns", "values"):
        column = batch.batch[name][inside]
        for reduction in ("mean", "max", "min"):
            expected[f"critic/{name}/{reduction}"] = getattr(column, reduction)().item()
    returns, values = (batch.batch[name][inside].double() for name in ("returns", "values"))
    expected["critic/vf_explained_var"] = 1 - (returns - values).var().item() / (
        returns.var().item() + 1e-5
    )
    assert metrics == pytest.approx(expected)


def test_without_a_critic_there_are_no_value_metrics(batch):
    without_values = batch.select([name for name in batch.batch.keys() if name != "values"])
    metrics = compute_data_metrics(without_values, False)
    assert "critic/score/mean" in metrics
    assert not any("values" in name or "vf_" in name for name in metrics)
    with pytest.raises(MissingColumnError, match="values"):
        compute_data_metrics(without_values)


def test_a_batch_of_empty_responses_has_finite_metrics(batch):
    batch.batch["attention_mask"][:, 3:] = 0
    batch.batch["response_mask"][:] = 0
    metrics = compute_data_metrics(batch)
    assert np.isfinite(list(metrics.values())).all()
    assert metrics["response/aborted_ratio"] == 1.0


def test_only_generation_is_timed_per_response_token(batch):
    metrics = compute_timing_metrics(batch, {"gen": 3.0, "update_actor": 6.0, "step": 9.0})
    expected = {
        "timing_s/gen": 3.0,
        "timing_s/update_actor": 6.0,
        "timing_s/step": 9.0,
        "timing_per_token_ms/gen": 500.0,
        "timing_per_token_ms/update_actor": 500.0,
    }
    assert metrics == pytest.approx(expected)


def test_throughput_counts_all_tokens_per_second_and_device(batch):
    assert compute_throughout_metrics(batch, {"step": 2.0}, n_gpus=3) == {
        "perf/total_num_tokens": 12,
        "perf/time_per_step": 2.0,
        "perf/throughput": 2.0,
    }


def test_without_entropies_the_metric_is_the_surprise_of_sampled_tokens(batch):
    inside = batch.batch["response_mask"].bool()
    batch.batch["rollout_log_probs"] = torch.linspace(-3, -1, 12).view(3, 4)
    surprise = -batch.batch["rollout_log_probs"][inside].double().mean().item()
    assert compute_data_metrics(batch)["actor/entropy"] == pytest.approx(surprise)
    batch.batch["entropys"] = torch.full((3, 4), 0.5)
    assert compute_data_metrics(batch)["actor/entropy"] == 0.5


def test_the_standard_error_of_the_score_counts_a_prompt_once():
    scores = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 9.0])
    batch = DataProto.from_dict(
        tensors={
            "attention_mask": torch.tensor([[1, 1]] * 5 + [[1, 0]]),
            "response_mask": torch.tensor([[1]] * 5 + [[0]]),
            "responses": torch.ones(6, 1, dtype=torch.int64),
            **{name: scores[:, None] for name in ("token_level_scores", "token_level_rewards")},
            **{name: torch.zeros(6, 1) for name in ("advantages", "returns")},
        },
        non_tensors={"uid": np.array(["a", "a", "b", "b", "c", "c"], dtype=object)},
    )
    error = compute_data_metrics(batch, use_critic=False)["critic/score/standard_error"]
    assert error == pytest.approx(np.std([0.5, 1.0, 0.0], ddof=1) / 3**0.5)
