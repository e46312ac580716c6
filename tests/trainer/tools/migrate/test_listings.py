"""Listings of other READMEs and papers become runs here."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from tests import ROOT
from tests.trainer.tools.migrate.words import composed, migrated
from trainer.config.compose import load_config
from trainer.tools.migrate.recorder import without_line_numbers
from trainer.tools.migrate.systems import RECIPES, migrate
from verl_like.errors import ConfigError

SHELL = {"num_makers": "2", "num_trainers": "1", "update_steps": "2", "train_epochs": "3"}
SHELL["((total_steps * train_epochs))"] = "18"
COMMAND = re.compile(r"^```text\n(verl-like (?:.|\n)*?)\n```", re.M)


def port(example: str) -> Any:
    """Return the run of the README's command; a variable is its value in `SHELL`, or its name."""
    command = COMMAND.search(
        (ROOT / "examples" / example / "README.md").read_text(encoding="utf-8")
    )
    assert command is not None
    words = shlex.split(command[1].replace("\\\n", " "))
    for variable, value in SHELL.items():
        words = [word.replace(f"${variable}", value) for word in words]
    return load_config([word.replace("$", "") for word in words[2:]], RECIPES[words[1]])


def test_split_placement_is_a_setting() -> None:
    config = port("split_placement")
    assert config.resource_pool_spec == {"actor_rollout_ref_pool": [4], "critic_pool": [4]}
    assert config.role_mapping["critic"] == "critic_pool"


def test_makers_and_trainers_are_an_async_run() -> None:
    config = port("async")
    async_training = config.async_training
    assert (async_training.generators, async_training.trainers, async_training.score_on) == (
        2,
        1,
        "generator",
    )
    assert (async_training.update_steps, async_training.train_epochs) == (2, 3)
    assert config.trainer.total_training_steps == 18
    assert (config.reward.model.enable, config.reward.function.weight) == (True, 0)


PAPER = """ray job submit -- python3 examples/train_ppo_ray.py \\
    --ref_num_nodes 1 --reward_num_nodes 1 --critic_num_nodes 1 --actor_num_nodes 1 \\
    --vllm_num_engines 4 --vllm_tensor_parallel_size 4 \\
    --pretrain meta-llama/Llama-2-70b-chat-hf \\
    --reward_pretrain meta-llama/Llama-2-70b-chat-hf --prompt_data Open-Orca/OpenOrca
"""
"""The command in the appendix of OpenRLHF's paper."""


def test_the_command_of_openrlhf_s_paper_has_a_pool_per_role() -> None:
    config = composed(migrated("openrlhf", PAPER))
    assert config.resource_pool_spec["rollout_pool"] == [8, 8]
    assert len(config.resource_pool_spec) == 5
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == 4


LISTING = """ray job submit -- python3 examples/train_ppo_ray.py \\
2 --ref_num_nodes 1 \\ # number of nodes (ref)
3 --reward_num_nodes 1 \\ # number of nodes (reward)
4 --critic_num_nodes 1 \\ # number of nodes (critic)
5 --actor_num_nodes 1 \\ # number of nodes (actor)
6 --vllm_num_engines 4 \\ # number of vLLM nodes
7 --vllm_tensor_parallel_size 4 \\ # vLLM tensor_parallel size
8 --pretrain meta-llama/Llama-2-70b-chat-hf \\ # pre-trained model name or path
9 --reward_pretrain meta-llama/Llama-2-70b-chat-hf \\ # reward model name or path
10 --prompt_data Open-Orca/OpenOrca # datasets name or path
"""
"""The same command on a page about OpenRLHF, which numbers and explains its lines."""


def test_a_listing_is_read_without_the_line_numbers_of_its_page() -> None:
    done = migrated("openrlhf", LISTING)
    assert done.settings == migrated("openrlhf", PAPER).settings
    assert done.notices == ["the line numbers of the page (up to 10) are left out"]
    assert without_line_numbers("a \\\n  2 b") == "a \\\nb"
    assert without_line_numbers("a \\\n  3 b") == "a \\\n  3 b"


def test_a_page_of_prose_is_called_a_page() -> None:
    with pytest.raises(ConfigError, match="this is a page of prose, not a script"):
        migrate("verl", str(ROOT / "README.md"))
