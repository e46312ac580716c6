"""The reference follows the actor, at every placement and after a resume."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.integration.recording import RecordingTrainer
from tests.integration.runs import FEW_ROWS, numbers, overrides
from tests.workers.samples import with_doubled_head
from trainer import PPO, load_config, run
from trainer.ppo.memory import role_memories
from trainer.run_state import Metrics
from trainer.stubs import trace_step
from verl_like.config_key import replace_keys
from verl_like.errors import ConfigError

EVERY_SECOND = ("actor_rollout_ref.ref.update_every=2", "trainer.backend=local")
GRPO = ("algorithm.adv_estimator=grpo", *FEW_ROWS)
AVERAGE = "actor_rollout_ref.ref.ema_decay=0.5"
COUNT = "training/num_reference_updates"


class Recorded(RecordingTrainer):
    """Stores the weights' hash of actor and reference after each step."""

    def on_step_end(self, metrics: Metrics) -> None:
        roles = ("actor", "ref")
        self.history.append({role: set(self.groups[role].weights_checksum()) for role in roles})


def test_the_reference_follows_every_second_step(tiny_dir: Path, tmp_path: Path) -> None:
    settings = (*EVERY_SECOND, *GRPO, "placement=standalone", "trainer.n_gpus_per_node=3")
    run(load_config(overrides(tiny_dir, tmp_path, *settings)), Recorded)

    first, *_ = Recorded.last.history
    actor, ref = ([step[role] for step in Recorded.last.history[2::2]] for role in ("actor", "ref"))
    assert len(actor) == 3
    assert ref[0] == first["ref"] == first["actor"] != actor[0]
    assert ref[1] == actor[1] == ref[2] != actor[2]


def test_a_resume_restores_the_reference(tiny_dir: Path, tmp_path: Path) -> None:
    settings = (*EVERY_SECOND, *GRPO, AVERAGE, "placement=colocate", "trainer.save_freq=1")
    run(load_config(overrides(tiny_dir, tmp_path, *settings)))
    whole = numbers(tmp_path)
    assert [line.get(COUNT) for line in whole] == [None, 1.0, None]

    shutil.rmtree(tmp_path / "global_step_3")
    run(load_config(overrides(tiny_dir, tmp_path, *settings)))
    assert numbers(tmp_path) == whole


def test_a_separate_reference_scores_and_does_not_follow(tiny_dir: Path, tmp_path: Path) -> None:
    with_doubled_head(tiny_dir, tmp_path / "other")
    AutoTokenizer.from_pretrained(tiny_dir / "model").save_pretrained(tmp_path / "other")
    models = {"actor": tiny_dir / "model", "ref": tmp_path / "other"}
    keys = {
        "data.max_prompt_length": 16,
        "data.max_response_length": 16,
        "data.train_batch_size": 2,
        "actor_rollout_ref.model.lora_rank": 2,
        "algorithm.use_kl_in_reward": True,
        "trainer.logger": [],
    }
    prompts, folder = ["say a", "say b"], tmp_path / "run"
    ppo = PPO(models, prompts, lambda response: 1.0, save_to=folder, algorithm="grpo", **keys)
    assert "ref" in {memory.role for memory in role_memories(ppo.config(), "cpu")}
    assert abs(ppo.fit(steps=1).metrics[0]["actor/reward_kl_penalty"]) > 1e-3

    follows = [*EVERY_SECOND, f"actor_rollout_ref.ref.model.path={tmp_path}/other"]
    with pytest.raises(ConfigError, match="update_every=2 with .*ref.model.path=.*Leave one"):
        load_config(overrides(tiny_dir, tmp_path, *follows))


def test_the_graph_shows_the_update_of_the_reference(tiny_dir: Path, tmp_path: Path) -> None:
    config = load_config(overrides(tiny_dir, tmp_path, *EVERY_SECOND, "placement=colocate"))
    receives = ("sync", "ref.update_weights")
    assert receives in [node.key for node in trace_step(config)[0]]
    config = replace_keys(config, {"actor_rollout_ref.ref.update_every": None})
    assert receives not in [node.key for node in trace_step(config)[0]]


def test_a_reference_of_adapters_cannot_follow(tiny_dir: Path, tmp_path: Path) -> None:
    adapters = "actor_rollout_ref.model.lora_rank=4"
    with pytest.raises(ConfigError, match="lora_rank=4.*must not change.*Leave .*update_every"):
        load_config(overrides(tiny_dir, tmp_path, *EVERY_SECOND, adapters))
