"""An asynchronous run as in ColossalChat's scripts: their formulas, and a reward model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import FEW_ROWS, calls, lines
from tests.trainer.async_training.test_run import TWO_STEPS, ledger_of, run_async

NUM_SAMPLES = 2 * 4 * 2


def test_the_formulas_of_colossalchat_train_on_all_samples(
    tiny_dir: Path, classifier: Path, tmp_path: Path
) -> None:
    """Two steps of one generator, one trainer and a reward model on the trainer's pool."""
    model = f"reward.list=[{{name: model, kind: model, path: '{classifier}'}}]"
    settings = ("algorithm=coati_legacy", model, TWO_STEPS, *FEW_ROWS)
    legacy = run_async(tiny_dir, tmp_path, *settings)
    ledger = ledger_of(legacy)
    assert ledger["generators"]["0"]["made"] == ledger["generators"]["0"]["trained"] == NUM_SAMPLES
    assert ledger["trainers"] == {"0": NUM_SAMPLES}
    assert min(ledger["versions"]) == "1", "the generators have weights before the first prompt"
    for line in lines(legacy):
        assert line["actor/grad_norm"] > 0
        assert line["critic/grad_norm"] > 0
        for end in ("min", "max"):  # every token's return is the whole reward of its response
            rewards = line[f"critic/rewards/{end}"]
            assert line[f"critic/returns/{end}"] == pytest.approx(rewards, abs=1e-5)
        assert abs(line["critic/advantages/mean"]) > 1e-4, "nothing whitens them"

    scored = calls(legacy, "compute_rm_score")
    assert len(scored) == 2
    trainers = {event["args"]["pid"] for event in calls(legacy, "update_actor")}
    assert {event["args"]["pid"] for event in scored} == trainers
    scores = [row["score"] for step in (1, 2) for row in lines(legacy, f"rollouts/{step}.jsonl")]
    assert len(scores) == NUM_SAMPLES
    assert len(set(scores)) > NUM_SAMPLES / 2, "a model of random weights, not a rule of 0 and 1"
