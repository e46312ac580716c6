"""The README of the asynchronous example goes through ColossalChat's listing name by name."""

from __future__ import annotations

import re

import pytest

from tests import ROOT

NAMES = """
env_info_makers local_rank rank world_size num_makers master_port maker_port master_addr
model_fn get_actor_from_args get_critic_from_args get_reward_model_from_args
experience_holder_refs ExperienceMakerHolder num_gpus max_concurrency
detached_trainer_name_list target_trainers env_info_maker
env_info_trainers num_trainers trainer_port trainer_model_fn
trainer_refs DetachedPPOTrainer experience_maker_holder_name_list target_makers env_info_trainer
data_loader_fn DataLoader dataset wait_tasks workingloop num_steps experience_steps
fit total_steps update_steps train_epochs
""".split()
"""What the code of `Distributed PPO Training on Stage 3` defines, calls and passes."""
CALLS = [
    "actor, critic, reward model, initial model",
    "ExperienceMakerHolder.options(",
    'name=f"maker_{i}"',
    'detached_trainer_name_list=[f"trainer_{x}" for x in target_trainers(...)]',
    "DetachedPPOTrainer.options(",
    'name=f"trainer{i}"',
    'experience_maker_holder_name_list=[f"maker{x}" for x in target_makers(...)]',
    "model_fn = trainer_model_fn()",
    "return = torch.utils.data.DataLoader(",
    "workingloop.remote(data_loader_fn(),",
    "num_steps=experience_steps",
    "fit.remote(total_steps, update_steps, train_epochs)",
    "ray.get(wait_tasks)",
]
"""As they stand there: the page quotes them, slips included."""


@pytest.fixture(scope="module")
def section() -> str:
    text = (ROOT / "examples" / "async" / "README.md").read_text(encoding="utf-8")
    _, _, rest = text.partition("## Makers and trainers\n")
    return rest.partition("\n## ")[0]


def test_every_name_of_the_listing_has_a_word(section: str) -> None:
    found = set(re.findall(r"\w+", section))
    assert [name for name in NAMES if name not in found] == []


@pytest.mark.parametrize("call", CALLS)
def test_the_listing_is_quoted_as_it_stands(call: str, section: str) -> None:
    assert call in section


def test_the_makers_of_the_listing_score_and_have_weights_from_version_1(section: str) -> None:
    assert "`async_training.score_on=generator` reproduces ColossalChat's structure" in section
    assert "as version 1 before the first prompt" in section
    assert "version 0" not in section
