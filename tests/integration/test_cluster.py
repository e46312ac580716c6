"""A run on a cluster of several nodes: the code that is shipped, and a missing shared folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import ROOT
from trainer import PPOTrainer, load_config
from trainer.config.user_modules import modules_of_the_user
from trainer.ppo.config import PPOConfig
from trainer.preference.recipe import DPO
from trainer.preference.step import PreferenceTrainer
from verl_like.errors import PlacementError

PAGE = ROOT / "docs" / "cluster.md"


@pytest.mark.long
@pytest.mark.ray
def test_a_node_that_does_not_see_the_run_folder_is_named(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_like.backends.ray import cluster, cluster_nodes

    nodes = cluster_nodes()
    cluster.require_shared_folder(tmp_path, nodes)
    assert list(tmp_path.iterdir()) == []
    assert len(cluster.nodes_without_path(tmp_path / "not there", nodes)) == 1
    monkeypatch.setattr(cluster, "nodes_without_path", lambda path, nodes: ["10.0.0.7 (abc)"])
    with pytest.raises(
        PlacementError, match=r"default_local_dir=.* is not visible on 10\.0\.0\.7 \(abc\)"
    ):
        cluster.require_shared_folder(tmp_path, nodes)
    assert list(tmp_path.iterdir()) == []


def load(*overrides: str) -> PPOConfig:
    return load_config(
        ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model", *overrides]
    )


def test_the_command_of_the_page_composes() -> None:
    page = PAGE.read_text(encoding="utf-8").replace(" \\\n", " ")
    (command,) = re.findall(r"^verl-like ppo (ray\.address.*)$", page, re.M)
    config = load(*command.split())
    assert config.ray.address == "auto"
    assert config.resource_pool_spec == {"actor_rollout_ref_pool": [8], "critic_pool": [8]}


def test_only_the_user_s_modules_are_sent_to_other_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = "def mine(**columns): ...\ndef of_pairs(log_probs): ..."
    (tmp_path / "my_losses.py").write_text(losses, encoding="utf-8")
    (tmp_path / "my_roles").mkdir()
    (tmp_path / "my_roles" / "__init__.py").write_text("", encoding="utf-8")
    (tmp_path / "my_optimizers.py").write_text("from torch.optim import SGD", encoding="utf-8")
    (tmp_path / "my_games.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    config = load(
        "actor_rollout_ref.actor.policy_loss.loss_mode=my_losses.mine",
        "+role_workers.critic=my_roles.critics.MyCritic",
        "+role_workers.rollout=workers.roles.rollout.RolloutWorker",
        "actor_rollout_ref.actor.optim.optimizer=torch.optim.SGD",
        "+critic.optim.optimizer=my_optimizers.SGD",
        "environment=my_games:Chess:7",
        "environment.tools=[../tools.py:search]",
    )
    assert modules_of_the_user(PPOTrainer.recipe.worker_code(config)) == [
        str(tmp_path / "my_roles"),
        str(tmp_path / "my_losses.py"),
        str(tmp_path / "my_optimizers.py"),
        str(tmp_path / "my_games.py"),
    ]
    assert modules_of_the_user(PPOTrainer.recipe.worker_code(load())) == []
    pairs = load_config(["data.train_files=x", "model.path=model", "loss=my_losses.of_pairs"], DPO)
    assert "my_losses.of_pairs" in PreferenceTrainer.recipe.worker_code(pairs)
