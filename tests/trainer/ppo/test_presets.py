"""`algorithm=<preset>`: a paper's settings. All of them are read, and a user's keys win."""

from __future__ import annotations

import pytest

from tests.conftest import load
from trainer import load_config
from trainer.config.keys import value_at
from trainer.config.unused_keys import unused_reason
from trainer.ppo.recipe import PPO
from verl_like.errors import ConfigError

NEEDED = ("data.train_files=x", "actor_rollout_ref.model.path=y", "trainer.backend=local")
CARDS = load("docs/cards.py")
PRESETS = PPO.preset_names("algorithm")


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_read_and_consistent(preset: str, caplog: pytest.LogCaptureFixture) -> None:
    left = [f"{key}=z" for key in CARDS.left_to_the_user("algorithm", preset)]
    config = load_config([*NEEDED, f"algorithm={preset}", *left])
    leaves = CARDS.preset_leaves("algorithm", preset)
    for key, value in leaves.items():
        if not str(value).startswith("${"):
            assert value_at(config, key) == value, key

    assert [key for key in leaves if unused_reason(config, key) is not None] == []
    assert [text for text in caplog.messages if text.startswith("warning ")] == []


@pytest.mark.parametrize("preset", ["rloo", "opo"])
def test_presets_without_a_ratio_make_one_update_per_step(preset: str) -> None:
    config = load_config([*NEEDED, f"algorithm={preset}", "data.train_batch_size=96"])
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 96


def test_dapo_penalizes_the_last_fifth_of_a_response() -> None:
    paper = load_config([*NEEDED, "algorithm=dapo", "data.max_response_length=20480"])
    assert paper.reward.overlong_penalty.enable
    assert paper.reward.overlong_penalty.len == 4096
    short = load_config([*NEEDED, "algorithm=dapo", "data.max_response_length=3"])
    assert short.reward.overlong_penalty.len == 1


def test_keys_of_the_command_override_a_preset() -> None:
    config = load_config([*NEEDED, "actor_rollout_ref.rollout.n=4", "algorithm=dapo"])
    assert config.actor_rollout_ref.rollout.n == 4
    assert config.algorithm.filter_groups.enable


def test_an_unknown_preset_lists_the_nearest_and_all_presets() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'dapo'.* Known: cispo, .*, dapo, "):
        load_config([*NEEDED, "algorithm=dappo"])
    with pytest.raises(ConfigError, match="Did you mean 'reinforce_plus_plus'"):
        load_config([*NEEDED, "algorithm=reinforce++"])
    with pytest.raises(ConfigError, match="'split'.* Known: colocate, split, standalone"):
        load_config([*NEEDED, "placement=splitt"])
