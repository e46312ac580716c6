"""The listings that READMEs and papers print: every line has an answer, and the pages show it."""

from __future__ import annotations

from typing import Any

import pytest

from tests import ROOT
from tests.trainer.migrate.words import migrated
from trainer.config.compose import load_config
from trainer.migrate.listing import NOT_KNOWN
from trainer.migrate.systems import RECIPES

LISTINGS = ROOT / "docs" / "data" / "listings"
PYTHON = {"split_placement": "verl", "makers_and_trainers": "coati", "chatgpt": "chatgpt"}
SHELL = {"num_makers": 2, "num_trainers": 1, "total_steps": 6, "update_steps": 2, "train_epochs": 3}


def listing(name: str) -> str:
    return (LISTINGS / f"{name}.txt").read_text(encoding="utf-8")


def composed(system: str, text: str) -> Any:
    done = migrated(system, text)
    return load_config([word.replace("$", "") for word in done.overrides()], RECIPES[done.program])


@pytest.mark.parametrize("name", PYTHON)
def test_every_line_of_a_listing_has_an_answer(name: str) -> None:
    done = migrated(PYTHON[name], listing(name))
    assert [line for line, here in done.lines if here == NOT_KNOWN] == []
    code = [line.strip() for line in listing(name).splitlines()]
    said = [line for line in code if any(map(str.isalpha, line)) and not line.startswith("#")]
    assert [line for line, _ in done.lines] == said


def test_the_readme_of_split_placement_is_placement_split() -> None:
    config = composed("verl", listing("split_placement"))
    assert config.resource_pool_spec == {"actor_rollout_ref_pool": [4], "critic_pool": [4]}
    assert config.role_mapping["critic"] == "critic_pool"


def test_the_listing_of_makers_and_trainers_is_a_detached_run() -> None:
    done = migrated("coati", listing("makers_and_trainers"))
    assert done.program == "detached"
    assert done.settings["detached.makers"] == "$num_makers"
    assert done.settings["trainer.total_training_steps"] == "$((total_steps * train_epochs))"
    values = "\n".join(f"{name} = {value}" for name, value in SHELL.items())
    config = composed("coati", f"{values}\n{listing('makers_and_trainers')}")
    detached = config.detached
    assert (detached.makers, detached.trainers, detached.score_on) == (2, 1, "maker")
    assert (detached.update_steps, detached.train_epochs) == (2, 3)
    assert config.trainer.total_training_steps == 18


def test_numbers_in_the_call_are_the_settings() -> None:
    names = "total_steps, update_steps, train_epochs"
    text = listing("makers_and_trainers").replace(names, "4, 2, 1")
    done = migrated("coati", text)
    assert done.settings["trainer.total_training_steps"] == "4"
    assert done.settings["detached.update_steps"] == "2"


@pytest.mark.parametrize(
    ("theirs", "strategy"),
    [
        ("ColossalAIStrategy()", "fsdp"),
        ("ColossalAIStrategy(stage=2)", "shard_grad_op"),
        ("DDPStrategy()", "ddp"),
        ("NaiveStrategy()", "single"),
    ],
)
def test_the_listing_of_chatgpt_is_ppo(theirs: str, strategy: str) -> None:
    text = listing("chatgpt").replace("= ColossalAIStrategy()", f"= {theirs}")
    config = composed("chatgpt", text)
    policy = config.actor_rollout_ref
    assert (policy.model.path, policy.actor.strategy) == ("gpt2", strategy)
    assert (policy.actor.optim.lr, config.critic.optim.lr) == (5e-6, 5e-6)
    assert (config.reward_model.enable, config.data.train_files) == (True, "dataset")


def test_a_page_with_fences_is_read_by_its_code_and_unknown_lines_are_told() -> None:
    page = f"# Usage\n\n  ```python\n  x = mystery()\n{listing('chatgpt')}```\nMore text.\n"
    lines = dict(migrated("chatgpt", page).lines)
    assert lines["x = mystery()"] == NOT_KNOWN
    assert not {"# Usage", "More text."} & lines.keys()


def test_the_command_of_the_paper_s_appendix_has_a_pool_for_each_role() -> None:
    config = composed("openrlhf", listing("train_ppo_ray"))
    assert config.resource_pool_spec["rollout_pool"] == [8, 8]
    assert len(config.resource_pool_spec) == 5
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == 4
    done = migrated("openrlhf", listing("train_ppo_ray"))
    told = "\n".join([*done.renamed, *done.joined])
    flags = [word for word in listing("train_ppo_ray").split() if word.startswith("--")][1:]
    assert [flag for flag in flags if flag not in told] == []


def test_the_page_of_openrlhf_has_both_commands() -> None:
    page = (ROOT / "docs" / "coming_from_openrlhf.md").read_text(encoding="utf-8")
    assert listing("train_ppo_ray").rstrip() in page
    assert migrated("openrlhf", listing("train_ppo_ray")).command() in page
