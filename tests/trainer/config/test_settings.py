"""Keywords become settings of a command line, which are read back as the same values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainer.config.settings import as_text, flat_settings, overrides_of, parse
from trainer.ppo.advantages.estimators import compute_grpo_outcome_advantage
from trainer.ppo.config import PPOConfig
from trainer.ppo.recipe import load_config
from verl_like.errors import ConfigError

TEXTS = st.text(st.sampled_from("ab'\"\\ {}[](),:=#%$é-./~\n1"), max_size=8)
NAMES = st.from_regex(r"[a-z][a-z_/]{0,5}", fullmatch=True).filter(
    lambda name: name not in ("true", "false", "null", "inf", "nan")
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@example("b\\\n")
@example("/é")
@example("it's \\'")
@settings(deadline=None, max_examples=20)
@given(VALUES)
def test_a_value_is_read_back_unchanged(value: Any) -> None:
    assert parse(f"key={as_text(value, 'key')}").value() == value


def test_sections_are_flattened_and_other_dicts_are_values() -> None:
    keywords = {
        "placement": "split",
        "actor_rollout_ref": {"rollout": {"n": 2}, "actor": {"optim": {"lr": 1e-5}}},
        "trainer": {"stop_at": {"critic/score/mean": 0.5}, "resume_from_path": None},
        "data.train_batch_size": 8,
        "role_workers": {"judge": Path("mine.Judge")},
    }
    assert overrides_of(flat_settings(PPOConfig, keywords)) == [
        "placement=split",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.optim.lr=1e-05",
        "trainer.stop_at={critic/score/mean: 0.5}",
        "trainer.resume_from_path=null",
        "data.train_batch_size=8",
        "role_workers={judge: mine.Judge}",
    ]


def test_an_object_without_a_text_form_is_rejected() -> None:
    with pytest.raises(
        ConfigError, match=r"data\.shuffle=<object .*: an object of type object cannot be the value"
    ):
        overrides_of({"data.shuffle": object()})


def test_a_function_of_a_module_is_written_as_its_path() -> None:
    assert overrides_of({"algorithm.adv_estimator": compute_grpo_outcome_advantage}) == [
        "algorithm.adv_estimator=trainer.ppo.advantages.estimators.compute_grpo_outcome_advantage"
    ]


def test_a_function_that_workers_cannot_import_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"adv_estimator=.*<lambda>: worker processes import it"):
        overrides_of({"algorithm.adv_estimator": lambda rewards: rewards})


def test_a_dict_is_a_configuration() -> None:
    nested = {
        "data": {"train_files": ["a", "b"], "train_batch_size": 64},
        "actor_rollout_ref.model.path": "m",
        "placement": "split",
        "trainer": {"n_gpus_per_node": 2},
    }
    as_text = [
        "data.train_files=[a,b]",
        "data.train_batch_size=64",
        "actor_rollout_ref.model.path=m",
        "placement=split",
        "trainer.n_gpus_per_node=2",
    ]
    assert load_config(nested) == load_config(as_text)
