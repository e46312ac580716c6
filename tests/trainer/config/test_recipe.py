"""A recipe of a few lines, with its own schema and YAML, composes like PPO."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from trainer import PPOConfig, load_config
from trainer.config.schema import Recipe, RunConfig, placement_presets
from verl_like.config_key import ReadWhen, config_field
from verl_like.errors import ConfigError

TAUGHT = ReadWhen("`taught`", lambda config, _: config.taught, "nobody teaches")


@dataclass(kw_only=True)
class ToyConfig(RunConfig):
    never_read: ClassVar[dict[str, tuple[str, ...]]] = {"no toy stops": ("trainer.stop_at",)}
    width: int = config_field(4, above=0)
    taught: bool = config_field(True)
    teacher_width: int = config_field(4, above=0, read_when=TAUGHT)


def no_teacher(config: Any) -> dict[str, str]:
    return {} if config.taught else {"teacher": "taught is false"}


def teacher_is_wide(config: ToyConfig) -> None:
    if config.teacher_width < config.width:
        raise ConfigError(f"teacher_width={config.teacher_width} is below width={config.width}.")


TOY = Recipe(
    name="toy",
    schema=ToyConfig,
    config_dir=Path(__file__).parent / "toy",
    config_name="toy_trainer",
    placements=placement_presets({"learner_pool": ["learner"], "teacher_pool": ["teacher"]}),
    inactive_roles=no_teacher,
    checks=(teacher_is_wide,),
)
NEEDED = ["trainer.cls=toy.Trainer", "trainer.n_gpus_per_node=4"]


def load(*overrides: str) -> ToyConfig:
    return load_config([*NEEDED, *overrides], TOY)


def test_a_recipe_has_its_own_keys_and_the_keys_of_every_run() -> None:
    config = load("width=8", "trainer.seed=3")
    assert isinstance(config, ToyConfig)
    assert (config.width, config.teacher_width, config.trainer.seed) == (8, 8, 3)
    assert not hasattr(config, "actor_rollout_ref")


@pytest.mark.parametrize(
    ("preset", "pools"),
    [
        ("colocate", {"global_pool": [4]}),
        ("split", {"learner_pool": [2], "teacher_pool": [2]}),
        ("teacher_first", {"teacher_pool": [2], "learner_pool": [2]}),
    ],
)
def test_presets_place_the_roles_of_a_recipe(preset: str, pools: dict[str, list[int]]) -> None:
    config = load(f"placement={preset}")
    assert config.resource_pool_spec == pools
    assert set(config.role_mapping) == {"learner", "teacher"}


def test_an_inactive_role_leaves_its_devices_to_the_others() -> None:
    config = load("placement=split", "taught=false")
    assert config.resource_pool_spec == {"learner_pool": [4]}
    assert config.role_mapping == {"learner": "learner_pool"}
    assert config.role_workers == {"learner": "toy.Learner"}


def test_a_role_gets_no_class_of_another_recipe() -> None:
    recipe = Recipe(
        "toy", ToyConfig, TOY.config_dir, "toy_trainer", placement_presets({"pool": ["critic"]})
    )
    with pytest.raises(ConfigError, match="role 'critic' has no worker class. Set role_workers"):
        load_config(["trainer.cls=toy.Trainer", "~role_workers"], recipe)


def test_recipes_may_be_composed_in_turn() -> None:
    ppo = ["data.train_files=x", "actor_rollout_ref.model.path=y", "trainer.n_gpus_per_node=2"]
    for _ in range(2):
        assert set(load("placement=split").role_mapping) == {"learner", "teacher"}
        config = load_config([*ppo, "placement=split"])
        assert isinstance(config, PPOConfig)
        assert set(config.role_mapping) == {"actor_rollout", "critic"}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("data.train_files=x", "All keys: verl-like toy --cfg all"),
        ("width=0", "width=0: it must be above 0"),
        ("teacher_width=2", "teacher_width=2 is below width=4"),
        ("+role_mapping.critic=global_pool", "is not a role of this command (learner, teacher)"),
        ("~role_mapping.teacher ~role_workers.teacher", "role 'teacher' is on no pool"),
        ("~role_workers.teacher", "role 'teacher' has no worker class. Set role_workers.teacher="),
        ("trainer.cls=", "trainer.cls is empty: set the dotted path"),
    ],
)
def test_a_recipe_gets_every_check(overrides: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*overrides.split())
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "notice"),
    [
        ("taught=false teacher_width=9", "teacher_width has no effect: nobody teaches"),
        ("trainer.stop_at={a:1}", "trainer.stop_at.a has no effect: no toy stops"),
        (
            "taught=false role_workers.teacher=toy.Own",
            "role_workers.teacher has no effect: this run has no role 'teacher'",
        ),
    ],
)
def test_keys_that_a_recipe_does_not_read_have_a_notice(
    overrides: str, notice: str, caplog: pytest.LogCaptureFixture
) -> None:
    load(*overrides.split())
    assert notice in caplog.text
