"""The driver of `examples/grpo_from_scratch.py` computes what `verl-like ppo` computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import load
from tests.integration.runs import lines
from trainer import load_config, run

example = load("examples/grpo_from_scratch.py")
TEXTS = [f"{number} plus {number % 3}" for number in range(6)]


@pytest.fixture(scope="module")
def by_hand(tiny_dir: Path) -> list[dict[str, float]]:
    metrics: list[dict[str, float]] = example.train(str(tiny_dir / "model"), "local", TEXTS)
    return metrics


@pytest.mark.long
def test_the_numbers_are_those_of_a_run(
    by_hand: list[dict[str, float]], tiny_dir: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    settings = {
        "actor_rollout_ref.model.path": str(tiny_dir / "model"),
        "data.train_files": str(rows),
        "data.shuffle": False,
        "data.train_batch_size": len(TEXTS),
        "data.max_prompt_length": example.PROMPT_TOKENS,
        "data.max_response_length": example.RESPONSE_TOKENS,
        "reward": f"{example.__file__}:reward",
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": example.NUM_SAMPLES,
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "trainer.backend": "local",
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": example.NUM_STEPS,
        "trainer.default_local_dir": str(tmp_path / "run"),
    }
    run(load_config(settings))
    steps = lines(tmp_path / "run")
    assert [step["actor/grad_norm"] for step in steps] == [step["grad_norm"] for step in by_hand]
    rewards = [step["critic/score/mean"] for step in steps]
    assert rewards == pytest.approx([step["reward"] for step in by_hand], rel=1e-6)


@pytest.mark.long
@pytest.mark.ray
def test_ray_gives_the_numbers_of_local_processes(
    ray_session: None, by_hand: list[dict[str, float]], tiny_dir: Path
) -> None:
    assert example.train(str(tiny_dir / "model"), "ray", TEXTS) == by_hand


def test_it_fits_on_a_screen() -> None:
    assert len(Path(example.__file__).read_text().splitlines()) <= 100
