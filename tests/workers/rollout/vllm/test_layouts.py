"""An engine of two vLLM ranks next to an actor whose ranks share its model."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.integration.runs import lines, with_experts
from workers.config import ModelConfig
from workers.models.load import load_model
from workers.models.state import named_state
from workers.weights.full_weights import checksum_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


class Hashes:
    """A callback that stores the hashes of the actor's ranks and of the engine at sampling."""

    def __init__(self) -> None:
        self.actor: list[set[str]] = []
        self.engine: list[str] = []

    def on_sample_end(self, trainer: Any, batch: Any) -> None:
        self.actor.append(set(trainer.groups["actor"].weights_checksum(True)))
        self.engine.append(trainer.groups["rollout"].weights_checksum()[0])


def hashes_of(tiny: Path, model: str, folder: Path, *more: str) -> Hashes:
    """Return the hashes of a run of two steps on vLLM."""
    from trainer import load_config, run

    settings = [
        f"actor_rollout_ref.model.path={tiny}/{model}",
        f"critic.model.path={tiny}/{model}",
        f"data.train_files={tiny}/train.parquet",
        f"trainer.default_local_dir={folder}",
        *("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.kv_cache_gib=1"),
        *("trainer.backend=local", "placement=colocate", "trainer.total_training_steps=2"),
        *("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4"),
        *("data.max_prompt_length=16", "data.max_response_length=8", "trainer.logger=[]"),
    ]
    hashes = Hashes()
    run(load_config([*settings, *more]), callbacks=[hashes])
    assert all(line["training/rollout_probs_diff_max"] < 1e-3 for line in lines(folder))
    return hashes


@pytest.fixture(scope="module")
def tiny(make_tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = make_tiny.make(tmp_path_factory.mktemp("tiny"), hidden_size=128)
    with_experts(folder, folder / "experts")
    return folder


@pytest.mark.parametrize("axis", ["shard", "sp", "tp", "pp", "ep"])
def test_two_ranks_of_vllm_get_the_weights_of_actors_in_any_layout(
    axis: str, tiny: Path, tmp_path: Path
) -> None:
    model = "experts" if axis == "ep" else "model"
    axes = [f"{section}.parallel.{axis}=2" for section in ("actor_rollout_ref.actor", "critic")]
    split = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    hashes = hashes_of(tiny, model, tmp_path, "trainer.n_gpus_per_node=2", split, *axes)
    assert [{engine} for engine in hashes.engine] == hashes.actor
    whole = load_model(ModelConfig(path=f"{tiny}/{model}"), "token")
    assert hashes.engine[0] == checksum_of(named_state(whole)) != hashes.engine[1]
