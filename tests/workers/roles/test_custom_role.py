from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.integration.runs import lines
from tests.workers.kept_ranks import run_kept
from tests.workers.samples import make_batch, own_chunk, started, tiny_config
from trainer import load_config
from trainer.launch import run as run_ppo

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "custom_role"


def learn(tiny_dir: Path, steps: int = 4) -> tuple[list[float], torch.Tensor]:
    """Return the metrics of some updates of the example's role on the same six rows."""
    spec = importlib.util.spec_from_file_location("verifier", FOLDER / "verifier.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    worker = started(module.VerifierWorker, tiny_config(tiny_dir))
    batch = make_batch(6)
    batch.batch["token_level_scores"] = (
        batch.batch["response_mask"] * (batch.batch["responses"] > 30) * 0.5
    )
    data = own_chunk(batch, worker.rank, worker.world_size)
    metrics = [worker.update_verifier(data) for _ in range(steps)]
    return [step["verifier/loss"] for step in metrics], worker.compute_verdicts(data).batch[
        "verdicts"
    ]


def test_a_user_s_role_learns_the_same_on_one_rank_and_on_two(tiny_dir: Path) -> None:
    losses, verdicts = learn(tiny_dir)
    assert losses[-1] < losses[0] - 0.01
    assert ((verdicts > 0) & (verdicts < 1)).all()
    for others, _ in run_kept(2, learn, tiny_dir):
        assert others == pytest.approx(losses, abs=1e-4)


def test_the_example_runs_by_overrides_of_the_configuration(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    config = load_config(
        [
            "trainer.backend=local",
            "trainer.cls=verifier.TrainerWithVerifier",
            "+role_workers.verifier=verifier.VerifierWorker",
            "+role_mapping.verifier=global_pool",
            f"actor_rollout_ref.model.path={tiny_dir}/model",
            f"data.train_files={tiny_dir}/train.parquet",
            f"trainer.default_local_dir={tmp_path}",
            "data.train_batch_size=8",
            "data.max_prompt_length=16",
            "data.max_response_length=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "trainer.total_training_steps=2",
            "trainer.logger=[]",
        ]
    )
    run_ppo(config)
    for line in lines(tmp_path)[-2:]:
        assert line["verifier/loss"] > 0
        assert 0 <= line["verifier/accuracy"] <= 1
