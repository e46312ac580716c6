"""Metrics of a validation against their definitions."""

import itertools

import numpy as np
import pytest

from trainer.ppo.validation import process_validation_metrics


def majority(draw):
    """Return the first value of the most frequent vote; ties go to the first seen."""
    votes = [item["pred"] for item in draw]
    winner = max(dict.fromkeys(votes), key=votes.count)
    return next(item["val"] for item in draw if item["pred"] == winner)


def naive_bootstrap(data, size, reduce_fn, seed):
    state = np.random.RandomState(seed)
    results = [
        reduce_fn([data[i] for i in state.choice(len(data), size=size, replace=True)])
        for _ in range(1000)
    ]
    return np.mean(results), np.std(results)


def test_validation_metrics_equal_their_definitions():
    sources = ["x"] * 10 + ["y"]
    uids = ["p"] * 5 + ["q"] * 5 + ["r"]
    scores = [0.0, 1.0, 0.5, 1.0, 0.0, 1.0, 0.25, 0.0, 0.0, 1.0, 0.75]
    preds = ["a", "b", "a", "c", "c", "a", "a", "b", "b", "d", "a"]
    before = np.random.get_state()[1].copy()
    result = process_validation_metrics(sources, uids, {"reward": scores, "pred": preds}, seed=3)
    assert (np.random.get_state()[1] == before).all(), "numpy's global state is unchanged"
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
        pairs = [naive_bootstrap(vote, n, majority, 3) for vote in votes]
        expected[f"maj@{n}/mean"], expected[f"maj@{n}/std"] = np.mean(pairs, axis=0)
    assert result["x"]["reward"] == pytest.approx(expected)
