"""An asynchronous run as in ColossalChat's scripts: their formulas, and a reward model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.runs import FEW_ROWS, calls, lines
from tests.trainer.async_training.test_run import TWO_STEPS, ledger_of, run_async

NUM_SAMPLES = 2 * 4 * 2


@pytest.fixture(scope="module")
def legacy(tiny_dir: Path, classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of one generator, one trainer and a reward model on the trainer's pool."""
    model = f"reward.list=[{{name: model, kind: model, path: '{classifier}'}}]"
    settings = ("algorithm=coati_legacy", model, TWO_STEPS, *FEW_ROWS)
    return run_async(tiny_dir, tmp_path_factory.mktemp("legacy"), *settings)


def test_the_maths_of_colossalchat_trains_on_all_that_was_made(legacy: Path) -> None:
    kept = ledger_of(legacy)
    assert kept["generators"]["0"]["made"] == kept["generators"]["0"]["trained"] == NUM_SAMPLES
    assert kept["trainers"] == {"0": NUM_SAMPLES}
    assert min(kept["versions"]) == "1", "what generators have before the first prompt"
    for line in lines(legacy):
        assert line["actor/grad_norm"] > 0
        assert line["critic/grad_norm"] > 0
        for end in ("min", "max"):  # every token's return is the whole reward of its response
            rewards = line[f"critic/rewards/{end}"]
            assert line[f"critic/returns/{end}"] == pytest.approx(rewards, abs=1e-5)
        assert abs(line["critic/advantages/mean"]) > 1e-4, "nothing whitens them"


def test_a_reward_model_scores_on_the_trainers_pool(legacy: Path) -> None:
    scored = calls(legacy, "compute_rm_score")
    assert len(scored) == 2
    trainers = {event["args"]["pid"] for event in calls(legacy, "update_actor")}
    assert {event["args"]["pid"] for event in scored} == trainers
    texts = [(legacy / "rollouts" / f"{step}.jsonl").read_text() for step in (1, 2)]
    scores = [json.loads(row)["score"] for text in texts for row in text.splitlines()]
    assert len(scores) == NUM_SAMPLES
    assert len(set(scores)) > NUM_SAMPLES / 2, "a model of random weights, not a rule of 0 and 1"
