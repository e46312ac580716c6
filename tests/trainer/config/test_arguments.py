"""`args`: the arguments of a loss, an estimator or an optimizer, by the signature of each."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from trainer import load_config
from trainer.ppo.advantage_inputs import estimate_advantages
from trainer.ppo.config import PPOConfig
from verl_like import DataProto
from verl_like.errors import ConfigError
from workers.config import critic_optim
from workers.training.optim import build_optimizer

LOSS = "actor_rollout_ref.actor.policy_loss"
OWN_LOSS = """
from typing import Annotated

from verl_like.config_key import KeyRules


def scaled(*, beta: Annotated[float, KeyRules(above=0)] = 0.1, label="x", **columns):
    return columns["log_prob"].sum() * beta, {}
"""


def load(*settings: str) -> PPOConfig:
    needed = (
        "data.train_files=x",
        "actor_rollout_ref.model.path=y",
        "algorithm.adv_estimator=grpo",
    )
    return load_config([*needed, "actor_rollout_ref.rollout.n=2", *settings])


def arguments(*settings: str) -> dict[str, object]:
    return load(*settings).actor_rollout_ref.actor.policy_loss.args


OWN_ESTIMATOR = """
def tempered(token_level_rewards, response_mask, *, temperature: float = 1.0, passes: int = 1):
    advantages = token_level_rewards * response_mask / temperature
    return advantages, advantages
"""
OPTIM = "actor_rollout_ref.actor.optim"
USE_SGD = f"{OPTIM}.optimizer=torch.optim.SGD"


@pytest.mark.parametrize("name", ["policy_loss.dro_beta", "policy_loss.args.dro_beta"])
def test_a_loss_has_arguments_by_our_name_and_verl_s(name: str) -> None:
    dro = (f"{LOSS}.loss_mode=dro", f"actor_rollout_ref.actor.{name}=2")
    assert arguments(*dro) == {"dro_beta": 2}


def test_an_argument_of_another_loss_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    settings = (f"{LOSS}.loss_mode=sapo", f"{LOSS}.args={{tau_pos: 2, dro_beta: 1}}")
    assert arguments(*settings) == {"tau_pos": 2}
    assert f"note: {LOSS}.args.dro_beta has no effect: the policy loss" in caplog.text


def test_the_loss_of_a_bypass_gets_no_arguments_of_another_loss() -> None:
    bypass = "algorithm.rollout_correction.bypass_mode=true"
    reinforce = "algorithm.rollout_correction.loss_type=reinforce"
    dro = (f"{LOSS}.loss_mode=dro", f"{LOSS}.args.dro_beta=2")
    assert arguments(*dro, bypass, reinforce) == {}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "args.dro_betta=1",
            r"no key '.*args.dro_betta'\. .* accepts dro_beta\. Did you mean 'dro",
        ),
        ("args.dro_beta=0", r"args\.dro_beta=0: it must be above 0"),
        ("args.dro_beta=much", r"args\.dro_beta=much: it takes a number"),
        ("dro_betta=1", r"Did you mean '.*policy_loss\.args\.dro_beta'"),
    ],
)
def test_a_wrong_argument_is_rejected(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(f"{LOSS}.loss_mode=dro", f"{LOSS}.{setting}")


def test_a_custom_loss_has_arguments(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("own") / "own_losses.py"
    path.write_text(OWN_LOSS, encoding="utf-8")
    chosen = f"{LOSS}.loss_mode='{path}:scaled'"
    assert arguments(chosen, f"{LOSS}.args={{beta: 0.2, label: y}}") == {"beta": 0.2, "label": "y"}
    with pytest.raises(ConfigError, match="accepts beta, label"):
        load(chosen, f"{LOSS}.args.gamma=1")


def test_a_custom_estimator_has_arguments(tmp_path: Path) -> None:
    path = tmp_path / "own_estimators.py"
    path.write_text(OWN_ESTIMATOR, encoding="utf-8")
    chosen = f"algorithm.adv_estimator='{path}:tempered'"
    algorithm = load(chosen, "algorithm.args.temperature=0.5").algorithm
    columns = {"token_level_rewards": torch.ones(1, 2), "response_mask": torch.ones(1, 2)}
    batch = estimate_advantages(DataProto.from_dict(columns), algorithm)
    assert batch.batch["advantages"].tolist() == [[2.0, 2.0]]

    with pytest.raises(ConfigError, match=r"algorithm\.args\.passes=0\.5: it takes a whole number"):
        load(chosen, "algorithm.args.passes=0.5")
    with pytest.raises(
        ConfigError, match="accepts temperature, passes. Did you mean 'temperature'"
    ):
        load(chosen, "algorithm.args.temprature=0.5")


def test_an_optimizer_has_arguments_by_its_constructor() -> None:
    config = load(USE_SGD, f"{OPTIM}.args.momentum=0.9").actor_rollout_ref.actor.optim
    optimizer = build_optimizer(torch.nn.Linear(1, 1), config)
    assert optimizer.defaults["momentum"] == 0.9
    with pytest.raises(ConfigError, match=r"optim\.args\.nesterov=1: it takes true or false"):
        load(USE_SGD, f"{OPTIM}.args.nesterov=1")


def test_the_critic_inherits_arguments_of_the_actor_s_optimizer() -> None:
    gae = ("algorithm.adv_estimator=gae", "critic.model.path=z")
    config = load(*gae, USE_SGD, f"{OPTIM}.args.momentum=0.9")
    assert critic_optim(config).args == {"momentum": 0.9}
    config = load(*gae, USE_SGD, f"{OPTIM}.args.momentum=0.9", "critic.optim.optimizer=AdamW")
    build_optimizer(torch.nn.Linear(1, 1), critic_optim(config))
    config = load(*gae, "critic.optim.args.amsgrad=true")
    assert critic_optim(config).args == {"amsgrad": True}
