"""The steps of `trainer.critic_warmup` leave the actor and its learning rate unchanged."""

from __future__ import annotations

from pathlib import Path

from tests.integration.recording import RecordingTrainer
from tests.integration.runs import FEW_ROWS, lines, overrides
from trainer import load_config, run


def test_only_the_critic_trains_in_the_warm_up(tiny_dir: Path, tmp_path: Path) -> None:
    settings = (
        "trainer.backend=local",
        "placement=colocate",
        "algorithm.use_kl_in_reward=false",
        "trainer.critic_warmup=1",
        "trainer.total_training_steps=3",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=linear",
        *FEW_ROWS,
    )
    run(load_config(overrides(tiny_dir, tmp_path, *settings)), RecordingTrainer)

    history = RecordingTrainer.last.history
    actors = [frozenset(step["actor"]) for step in history]
    assert actors[0] == actors[1]
    assert len(set(actors)) == 3
    assert len({frozenset(step["critic"]) for step in history}) == 4
    assert [line.get("actor/lr") for line in lines(tmp_path)] == [None, 1e-3, 5e-4]
