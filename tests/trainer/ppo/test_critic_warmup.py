"""The first steps of `trainer.critic_warmup` leave the actor and its learning rate unchanged."""

from __future__ import annotations

from pathlib import Path

from tests.integration.recording import RecordingTrainer
from tests.integration.runs import lines, overrides
from trainer import load_config, run


def test_only_the_critic_moves_in_the_first_steps(tiny_dir: Path, tmp_path: Path) -> None:
    settings = (
        "trainer.backend=local",
        "placement=colocate",
        "algorithm.use_kl_in_reward=false",
        "trainer.critic_warmup=2",
        "trainer.total_training_steps=4",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=linear",
    )
    run(load_config(overrides(tiny_dir, tmp_path, *settings)), RecordingTrainer)

    history = RecordingTrainer.last.history
    actors = [frozenset(step["actor"]) for step in history]
    assert actors[0] == actors[1] == actors[2]
    assert len(set(actors)) == 3
    assert len({frozenset(step["critic"]) for step in history}) == 5
    assert [line.get("actor/lr") for line in lines(tmp_path)] == [None, None, 1e-3, 5e-4]
