"""The tracker for MLflow that a page prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.workers.agents.agents import load_from_page
from trainer.ppo.config import PPOConfig


def test_the_metrics_of_steps_arrive_in_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tmp_path.as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # without a server or a database
    config = PPOConfig()
    config = replace(config, trainer=replace(config.trainer, project_name="math"))
    tracker = load_from_page("logging.md", "class MLflow:")(config, 2)
    run = mlflow.active_run().info.run_id
    for step in (1, 2):
        tracker.write({"critic/score/mean": step / 2, "val-core/x/reward/mean@1": 1.0}, step)
    tracker.close()
    history = mlflow.MlflowClient().get_metric_history(run, "critic/score/mean")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 1.0)]
