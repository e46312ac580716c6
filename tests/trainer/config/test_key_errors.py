"""A setting with an unknown key or a wrong value is rejected with the valid values."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import overrides
from trainer import load_config
from trainer.config.key_errors import no_such_key
from trainer.data.config import DataConfig
from trainer.data.files import check_files
from trainer.sft.recipe import SFT
from verl_like.errors import ConfigError, VerlLikeError

REFUSED = [
    ("epochs=3", "there is no key 'epochs'. Did you mean .* or 'trainer.total_epochs'"),
    (
        "reward.list={name: a}",
        "'reward.list.name'. reward.list has no keys below it; it takes a list",
    ),
    ("trainer.seed.step=2", "trainer.seed has no keys below it; it takes a whole number"),
    ("reward.list=[a]", r"^reward.list=\[a\]: .*str is not .*; it takes a list of sections.$"),
    ("reward_model.sample_timeout_s=1", "no key 'reward_model.sample_timeout_s'.*reward.timeout_s"),
    ("temprature=1", "Did you mean 'actor_rollout_ref.rollout.temperature' or "),
    ("reward.list=[{name: a, weight: x}]", ": weight: it takes a number.$"),
    ("trainer.stop_at={reward: high}", r"reward: high\}: it takes \{metric: value\}.$"),
    ("trainer.seed=x", "^trainer.seed=x: it takes a whole number, 0 or more.$"),
    ("trainer.dry_run=yess", "^trainer.dry_run=yess: it takes true, false.$"),
    ("trainer.stop_at=reward>0.8", "reward>0.8 cannot be read as a setting.*Quote a text"),
    ("trainer.seed=1,2", "^trainer.seed=1,2: several values are a sweep. Add --multirun"),
    ("~trainer", "^~trainer: this section cannot be removed"),
    ("resource_pool_spec.global_pool=[0]", r"^resource_pool_spec.global_pool=\[0\]: a pool needs"),
]


@pytest.mark.parametrize(("setting", "words"), REFUSED, ids=[setting for setting, _ in REFUSED])
def test_errors_name_the_key(tiny_dir: Path, tmp_path: Path, setting: str, words: str) -> None:
    with pytest.raises(VerlLikeError, match=words):
        load_config(overrides(tiny_dir, tmp_path, "trainer.backend=local", setting))


def test_the_hint_for_recipe_names_a_preset_of_this_recipe() -> None:
    assert no_such_key("recipe", SFT).endswith("chosen by placement, as in placement=split.")


def test_a_folder_in_the_place_of_a_file_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    with pytest.raises(
        ConfigError, match=r"train_files: .* is a folder, which contains rows.jsonl"
    ):
        check_files(DataConfig(train_files=str(tmp_path)))
