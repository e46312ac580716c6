"""Models created by a function, and models of several roles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trainer import SFT, AsyncPPO
from trainer.api.inputs import models_by_role
from verl_like.errors import ConfigError

ROLES = ["actor", "critic", "reward_model"]
PROMPTS = [f"say {letter}" for letter in "abcdefgh"]


def make_actor() -> str:
    return "policy"


@pytest.mark.parametrize(
    ("model", "models"),
    [
        ("policy", {"actor": "policy"}),
        (make_actor, {"actor": "policy"}),
        ({"actor": "policy", "critic": "values"}, {"actor": "policy", "critic": "values"}),
    ],
)
def test_a_single_model_is_the_actor(model: Any, models: dict[str, str]) -> None:
    assert models_by_role(model, ROLES) == models


def returns_nothing() -> None:
    """A function whose author forgot to return the model."""


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda rank: "policy", "without arguments: missing.*'rank'.*actor, critic, reward"),
        (returns_nothing, "model=returns_nothing returned None. .*actor, critic, reward_model"),
        ({"actor": "policy", "critik": "values"}, "'critik'.*Did you mean 'critic'"),
        ({"critic": "values"}, "model has no actor; it has critic"),
        (lambda: ["a", "b"], r'of 2 items. Pass a dict from role to model: \{"actor": ...,'),
    ],
)
def test_an_invalid_model_is_rejected_with_the_roles(model: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        models_by_role(model, ROLES)
    assert "\n" not in str(caught.value)


def test_a_recipe_with_one_model_has_no_roles(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown role 'actor'. Roles with a model: model"):
        SFT({"actor": "policy"}, ["a"], save_to=tmp_path)


@pytest.mark.long
def test_models_of_an_async_run_may_come_from_a_function(tiny_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    def models() -> dict[str, Any]:
        torch.manual_seed(1)
        policy = AutoModelForCausalLM.from_pretrained(tiny_dir / "model")
        values = AutoModelForSequenceClassification.from_pretrained(
            tiny_dir / "model", num_labels=1
        )
        return {"actor": policy, "critic": values}

    run = AsyncPPO(
        models,
        PROMPTS,
        lambda response: float(len(response)),
        tokenizer=AutoTokenizer.from_pretrained(tiny_dir / "model"),
        save_to=tmp_path / "run",
        **{
            "data": {"train_batch_size": 4, "max_prompt_length": 16, "max_response_length": 4},
            "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
            "trainer.logger": [],
        },
    )
    assert run.settings["critic.model.path"] == str(tmp_path / "run" / "inputs" / "critic")
    (metrics,) = run.fit(steps=1).metrics
    assert metrics["async/staleness/max"] <= 1
