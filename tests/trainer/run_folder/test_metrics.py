"""Metrics of a step and of a validation, beside their definitions."""

import itertools

import numpy as np
import pytest
import torch

from trainer.run_folder.metrics import (
    bootstrap_metric,
    calc_maj_val,
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    process_validation_metrics,
    reduce_metrics,
)
from verl_like.batch.protocol import DataProto
from verl_like.errors import BatchError, MissingColumnError


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


def test_reduction_goes_by_the_last_word_of_a_name():
    expected = {
        "loss": 3.0,
        "x/max": 6.0,
        "x/min": 1.0,
        "grad_max": 6.0,
        "lr_min": 1.0,
        "max_len/mean": 3.0,
        "global_seqlen/minmax_diff": 3.0,
        "admin": 3.0,
        "climax": 3.0,
    }
    assert reduce_metrics(dict.fromkeys(expected, [1.0, 2.0, 6.0])) == expected


def test_memory_peaks_take_their_highest():
    assert reduce_metrics({"perf/max_memory_allocated_gb": [1, 3]}) == {
        "perf/max_memory_allocated_gb": 3.0
    }


def test_reduction_takes_numbers_of_any_kind():
    assert reduce_metrics({"a": [torch.tensor(1.0), np.float32(2), 3], "b": 4}) == {
        "a": 2.0,
        "b": 4.0,
    }


def test_a_metric_without_values_is_refused():
    with pytest.raises(BatchError, match="no values"):
        reduce_metrics({"a": []})


def test_data_metrics_have_verls_names_and_meanings(batch):
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
    returns, values = (
        batch.batch["returns"][inside].double(),
        batch.batch["values"][inside].double(),
    )
    expected["critic/vf_explained_var"] = 1 - (returns - values).var().item() / (
        returns.var().item() + 1e-5
    )
    assert metrics == pytest.approx(expected)


def test_without_a_critic_nothing_is_said_of_values(batch):
    metrics = compute_data_metrics(
        batch.select([name for name in batch.batch.keys() if name != "values"]), False
    )
    assert "critic/score/mean" in metrics
    assert not any("values" in name or "vf_" in name for name in metrics)
    with pytest.raises(MissingColumnError, match="values"):
        compute_data_metrics(
            batch.select([name for name in batch.batch.keys() if name != "values"])
        )


def test_a_batch_of_empty_responses_has_finite_metrics(batch):
    batch.batch["attention_mask"][:, 3:] = 0
    batch.batch["response_mask"][:] = 0
    metrics = compute_data_metrics(batch)
    assert np.isfinite(list(metrics.values())).all()
    assert metrics["response/aborted_ratio"] == 1.0


def test_timing_is_per_response_token_for_generation_and_per_token_for_the_rest(batch):
    metrics = compute_timing_metrics(batch, {"gen": 3.0, "update_actor": 6.0, "step": 9.0})
    assert metrics == pytest.approx(
        {
            "timing_s/gen": 3.0,
            "timing_s/update_actor": 6.0,
            "timing_s/step": 9.0,
            "timing_per_token_ms/gen": 500.0,
            "timing_per_token_ms/update_actor": 500.0,
        }
    )


def test_throughput_counts_all_tokens_per_second_and_device(batch):
    assert compute_throughout_metrics(batch, {"step": 2.0}, n_gpus=3) == {
        "perf/total_num_tokens": 12,
        "perf/time_per_step": 2.0,
        "perf/throughput": 2.0,
    }


# --------------------------------------------------------------------------------------- validation


def test_the_majority_vote_gives_the_first_value_of_the_winner():
    data = [{"pred": p, "val": v} for p, v in (("B", 0.1), ("A", 0.9), ("A", 0.7))]
    assert calc_maj_val(data, "pred", "val") == 0.9
    assert calc_maj_val(data[:2], "pred", "val") == 0.1


def naive_bootstrap(data, size, reduce_fn, seed):
    state = np.random.RandomState(seed)
    results = [
        reduce_fn([data[i] for i in state.choice(len(data), size=size, replace=True)])
        for _ in range(1000)
    ]
    return np.mean(results), np.std(results)


def test_the_bootstrap_draws_as_verl_does_and_leaves_numpys_global_state_alone():
    data = [0.5, 1.0, 4.0, 2.0, 3.0]
    before = np.random.get_state()[1].copy()
    ours = bootstrap_metric(data, 3, [np.max, np.min], seed=7)
    assert ours == [naive_bootstrap(data, 3, np.max, 7), naive_bootstrap(data, 3, np.min, 7)]
    assert (np.random.get_state()[1] == before).all()


def test_validation_metrics_equal_their_definitions():
    sources = ["x"] * 10 + ["y"]
    uids = ["p"] * 5 + ["q"] * 5 + ["r"]
    scores = [0.0, 1.0, 0.5, 1.0, 0.0, 1.0, 0.25, 0.0, 0.0, 1.0, 0.75]
    preds = ["a", "b", "a", "c", "c", "a", "a", "b", "b", "d", "a"]
    result = process_validation_metrics(sources, uids, {"reward": scores, "pred": preds}, seed=3)
    assert set(result) == {"x", "y"}
    assert set(result["x"]) == {"reward"}
    assert result["y"]["reward"] == {"mean@1": 0.75}
    prompts = [scores[:5], scores[5:10]]
    expected = {
        "mean@5": np.mean([np.mean(prompt) for prompt in prompts]),
        "std@5": np.mean([np.std(prompt) for prompt in prompts]),
    }
    for n, (name, reduce_fn) in itertools.product(
        (2, 4, 5), {"best": np.max, "worst": np.min}.items()
    ):
        pairs = [naive_bootstrap(prompt, n, reduce_fn, 3) for prompt in prompts]
        expected[f"{name}@{n}/mean"], expected[f"{name}@{n}/std"] = np.mean(pairs, axis=0)
    for n in (2, 4, 5):
        votes = [
            [{"val": v, "pred": p} for v, p in zip(scores[part], preds[part], strict=True)]
            for part in (slice(5), slice(5, 10))
        ]
        pairs = [
            naive_bootstrap(vote, n, lambda draw: calc_maj_val(draw, "pred", "val"), 3)
            for vote in votes
        ]
        expected[f"maj@{n}/mean"], expected[f"maj@{n}/std"] = np.mean(pairs, axis=0)
    assert result["x"]["reward"] == pytest.approx(expected)


def test_without_predictions_there_is_no_majority():
    result = process_validation_metrics(["x"] * 2, ["p"] * 2, {"acc": [1, 0]})
    assert set(result["x"]["acc"]) == {
        "mean@2",
        "std@2",
        "best@2/mean",
        "best@2/std",
        "worst@2/mean",
        "worst@2/std",
    }
