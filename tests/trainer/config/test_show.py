"""`--cfg job` prints equivalent YAML, with every field's rule next to its key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from trainer.config.compose import compose_tree, known_settings
from trainer.config.keys import leaf_keys
from trainer.config.settings import keys_of
from trainer.config.show import annotated_yaml, left_out_of
from trainer.ppo.recipe import PPO


def shown(*overrides: str, resolve: bool = False) -> tuple[str, dict]:
    PPO.load_registries()
    tree = compose_tree(known_settings(overrides, PPO), PPO)
    text = annotated_yaml(tree, PPO.schema, resolve)
    return text, OmegaConf.to_container(tree, resolve=resolve)


@pytest.mark.parametrize("resolve", [False, True])
def test_the_yaml_is_read_back_as_the_composed_tree(resolve: bool) -> None:
    text, tree = shown(
        "role_mapping.judge=global_pool",
        "trainer.stop_at={critic/score/mean:0.9}",
        "data.train_files=[a.parquet,b c.parquet]",
        "trainer.experiment_name='two words: # no comment'",
        "actor_rollout_ref.model.path=x",
        resolve=resolve,
    )
    assert yaml.safe_load(text) == tree
    assert ("${" in text) is not resolve


def test_the_sections_that_most_runs_set_come_first() -> None:
    sections = ["data", "actor_rollout_ref", "critic", "reward", "algorithm", "trainer"]
    assert [*yaml.safe_load(shown()[0])][: len(sections)] == sections


def test_unread_keys_are_left_out_and_counted() -> None:
    overrides = known_settings(["algorithm=grpo"], PPO)
    tree = compose_tree(overrides, PPO)
    whole = OmegaConf.to_yaml(tree)
    left_out = left_out_of(tree, keys_of(overrides), PPO)
    text = annotated_yaml(tree, PPO.schema, left_out=left_out)
    assert "grad_clip: 1.0" in text
    assert "cliprange_value" not in text
    assert "distillation" not in text
    assert text.endswith(f"# {len(left_out)} more keys have no effect in this run; see --cfg all\n")
    assert OmegaConf.to_yaml(tree) == whole


def test_the_yaml_is_shown_without_a_module_that_fails_to_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_losses.py").write_text("print('hello')\nraise RuntimeError('no')\n")
    monkeypatch.syspath_prepend(tmp_path)
    loss = "actor_rollout_ref.actor.policy_loss.loss_mode=broken_losses.mine"
    overrides = known_settings([loss], PPO)
    assert left_out_of(compose_tree(overrides, PPO), keys_of(overrides), PPO) == set()
    assert capsys.readouterr().out == ""


def test_every_rule_of_a_field_is_next_to_its_key() -> None:
    text, _ = shown()
    text = re.sub(r"\n *# ", " ", text)
    for key in leaf_keys(PPO.schema):
        if key.describe_rules:
            assert key.describe_rules in text, key.name


def test_comments_are_wrapped_at_100_columns() -> None:
    PPO.load_registries()
    tree = compose_tree(known_settings([], PPO), PPO)
    lines = annotated_yaml(tree, PPO.schema, meanings=True).splitlines()
    assert [line for line in lines if len(line) > 100] == []
    first = lines.index("      # Name of the policy loss.")
    last = lines.index("      loss_mode: vanilla")
    assert last - first > 2
    assert all(line.startswith("      # ") for line in lines[first:last])


def test_all_keys_include_those_of_nested_sections_with_their_meanings() -> None:
    PPO.load_registries()
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    tree = compose_tree(known_settings([f"{fsdp}.param_offload=true"], PPO), PPO)
    text = annotated_yaml(tree, PPO.schema, meanings=True)
    assert yaml.safe_load(text) == OmegaConf.to_container(tree)
    lines = [line.strip() for line in text.splitlines()]
    for key in leaf_keys(PPO.schema):
        for option in leaf_keys(key.rules.options) if key.rules.options else ():
            assert [line for line in lines if re.match(rf"(# )?'?{option.leaf}'?:", line)]
    for line in ("param_offload: true", "# param_offload: null", "# memory_gib: "):
        place = next(place for place, text in enumerate(lines) if text.startswith(line))
        assert re.match("# [A-Z]", lines[place - 1]), lines[place - 1]
