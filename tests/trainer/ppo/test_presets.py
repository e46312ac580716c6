"""`algorithm=<preset>`: files that set what a paper sets, all of it read; own keys win."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.runs import lines, overrides
from trainer import load_config, run
from trainer.config.keys import read
from trainer.config.unused_keys import unused_keys
from trainer.ppo.recipe import PPO
from verl_like.errors import ConfigError

NEEDED = ("data.train_files=x", "actor_rollout_ref.model.path=y", "trainer.backend=local")
PRESETS = PPO.preset_names("algorithm")


def settings_of(preset: str, group: str = "algorithm") -> dict[str, Any]:
    """The dotted keys of a preset's file."""
    text = (PPO.config_dir / group / f"{preset}.yaml").read_text(encoding="utf-8")
    return dict(flat(yaml.safe_load(text), ""))


def flat(tree: dict[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found = []
    for name, value in tree.items():
        inner = flat(value, f"{prefix}{name}.") if isinstance(value, dict) else None
        found += inner or [(f"{prefix}{name}", value)]
    return found


@pytest.mark.parametrize("preset", PRESETS)
def test_all_that_a_preset_sets_is_read(preset: str) -> None:
    config = load_config([*NEEDED, f"algorithm={preset}"])
    for key, value in settings_of(preset).items():
        expected = config.data.train_batch_size if value == "${data.train_batch_size}" else value
        assert read(config, key) == expected, key

    unused = [name for names in unused_keys(config).values() for name in names]
    covered = [name for name in settings_of(preset) if f"{name}.".startswith(tuple(unused))]
    assert not [name for name in unused if name in covered]


def test_keys_of_the_command_win() -> None:
    config = load_config([*NEEDED, "actor_rollout_ref.rollout.n=4", "algorithm=dapo"])
    assert config.actor_rollout_ref.rollout.n == 4
    assert config.algorithm.filter_groups.enable


def test_gspo_clips_where_ratios_of_sequences_are() -> None:
    actor = load_config([*NEEDED, "algorithm=gspo"]).actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (3e-4, 4e-4)
    assert actor.loss_agg_mode == "seq-mean-token-mean"


def test_an_unknown_preset_lists_the_nearest_and_all() -> None:
    with pytest.raises(ConfigError, match="there are cispo, dapo, .*Did you mean 'dapo'"):
        load_config([*NEEDED, "algorithm=dappo"])
    with pytest.raises(ConfigError, match="there are colocate, split, standalone.*'split'"):
        load_config([*NEEDED, "placement=splitt"])


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_twenty_steps_raise_the_reward(preset: str, tiny_dir: Path, tmp_path: Path) -> None:
    settings = [f"algorithm={preset}", "trainer.total_training_steps=20", "trainer.backend=local"]
    settings += ["data.train_batch_size=16", "actor_rollout_ref.rollout.n=8"]
    settings += ["actor_rollout_ref.actor.optim.lr=3e-3"]
    mini_batch = "actor_rollout_ref.actor.ppo_mini_batch_size"
    if mini_batch not in settings_of(preset):
        settings.append(f"{mini_batch}=8")

    own = ("actor_rollout_ref.rollout.n", "algorithm.use_kl_in_reward", mini_batch)
    own += ("critic.",) if preset != "ppo" else ()
    base = [o for o in overrides(tiny_dir, tmp_path) if not o.startswith(own)]
    run(load_config([*base, *settings]))

    scores = [line["critic/score/mean"] for line in lines(tmp_path)]
    assert len(scores) == 20
    assert sum(scores[-5:]) / 5 > sum(scores[:5]) / 5 + 0.02, scores
