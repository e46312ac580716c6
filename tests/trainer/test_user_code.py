"""User code that cannot be called is rejected by its key before a file is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainer import load_config, run
from trainer.async_training.recipe import ASYNC
from trainer.async_training.samplers import BatchSampler
from trainer.launch import check_trainer
from trainer.ppo import PPOTrainer
from trainer.ppo.advantage_inputs import check_columns
from trainer.run_folder.tracking import make_tracking
from verl_like.config_key import replace_keys
from verl_like.errors import ConfigError
from workers.config import WorkersConfig
from workers.rollout.build_engine import check_engine
from workers.rollout.hf import HFRolloutEngine

NEEDED = ["data.train_files=x", "actor_rollout_ref.model.path=y", "trainer.backend=local"]


def estimator_of_no_name(token_level_rewards, /, response_mask): ...
def estimator_of_strange_columns(rewards, response_mask): ...
def estimator_of_the_reference(ref_log_prob, response_mask): ...
def estimator_that_fits(token_level_rewards, old_log_probs, index, *_, gamma, mine=2, **__): ...


def loss_without_denominators(old_log_prob, log_prob, advantages, response_mask): ...
def schedule_of_nothing(): ...
def optimizer_that_asks(params, lr, momentum): ...
def tracker_of_one(config): ...
def order_of_another(count, epoch): ...
def tracker_of_nothing(config, total_steps):
    return object()


class SilentTracker:
    def __init__(self, config: Any, total_steps: int) -> None: ...

    def close(self) -> None: ...


class NarrowTracker(SilentTracker):
    def write(self, metrics: dict[str, float]) -> None: ...


class EmptySampler(BatchSampler):
    pass


class AskingSampler(BatchSampler):
    def __init__(self, size: int) -> None: ...

    def choose(self, view: Any) -> Any: ...


class NarrowSampler(BatchSampler):
    def choose(self) -> Any: ...


class BareEngine(HFRolloutEngine):
    def __init__(self, module: Any, limits: Any) -> None: ...


class NarrowEngine(HFRolloutEngine):
    def _advance(self) -> Any: ...


class OwnHook(PPOTrainer):
    def on_step_end(self) -> None: ...


class OwnStage(PPOTrainer):
    def score(self) -> Any: ...


class OwnStep(OwnStage):
    def step(self) -> dict[str, float]:
        return {}


class NarrowCallback:
    def on_step_end(self, metrics: dict[str, float]) -> None: ...


OPTIM = "actor_rollout_ref.actor.optim"


@pytest.mark.parametrize(
    ("key", "name", "words"),
    [
        ("algorithm.adv_estimator", "estimator_of_no_name", r"has .*\(token_level_rewards, /, "),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode",
            "loss_without_denominators",
            r"has .*\(old_log_prob, log_prob, advantages, response_mask\), but is called by name",
        ),
        (f"{OPTIM}.lr_scheduler_type", "schedule_of_nothing", "is called with .progress."),
        (f"{OPTIM}.optimizer", "optimizer_that_asks", "missing a required argument: 'momentum'"),
        ("trainer.logger", "tracker_of_one", r"is called with \(config, total_steps\)"),
        ("trainer.logger", "SilentTracker", r"has no write: a tracker has write\(metrics, step\)"),
        ("trainer.logger", "NarrowTracker", r"its write has .*\(self, metrics\)"),
    ],
)
def test_a_wrong_signature_is_rejected_with_its_key(key: str, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}'?:? .*{words}"):
        load_config([*NEEDED, f"{key}={__name__}.{name}"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("EmptySampler", "does not implement choose"),
        ("AskingSampler", "missing a required argument: 'size'"),
        ("NarrowSampler", r"its choose has .*\(self\), but is called with \(self, view\)"),
        ("estimator_that_fits", "is not a sampler class"),
    ],
)
def test_a_wrong_sampler_of_async_runs_is_rejected(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"async_training.sampler={__name__}.{name}.*{words}"):
        load_config([*NEEDED, f"async_training.sampler={__name__}.{name}"], ASYNC)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("BareEngine", r"has .*\(module, limits\), .* unexpected keyword argument 'decode'"),
        ("NarrowEngine", r"its _advance has .*\(self\)"),
    ],
)
def test_a_wrong_engine_is_rejected(name: str, words: str) -> None:
    config: WorkersConfig = load_config(NEEDED)
    policy = config.actor_rollout_ref
    rollout = replace(policy.rollout, name=f"{__name__}.{name}")
    config = replace_keys(config, {"actor_rollout_ref": replace(policy, rollout=rollout)})
    with pytest.raises(ConfigError, match=f"rollout.name={__name__}.{name}:? .*{words}"):
        check_engine(config, world_size=1)


def test_wrong_hooks_and_stages_of_a_trainer_are_rejected() -> None:
    check_trainer(PPOTrainer)
    check_trainer(OwnStep)  # its own step may call its stages differently
    with pytest.raises(ConfigError, match=r"its on_step_end has .*\(self\), .* \(self, metrics\)"):
        check_trainer(OwnHook)
    with pytest.raises(ConfigError, match=r"trainer.cls=.*OwnStage: its score has .*\(self\), "):
        check_trainer(OwnStage)


@pytest.mark.parametrize("callback", [NarrowCallback(), NarrowCallback])
def test_a_wrong_callback_is_rejected_before_all_other_checks(callback: object) -> None:
    with pytest.raises(ConfigError, match=r"NarrowCallback: its on_step_end has |is a class"):
        run(load_config(NEEDED), callbacks=[callback])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "estimator_of_strange_columns",
            "nothing fills the parameter 'rewards' of .* such as token_l",
        ),
        ("estimator_of_the_reference", "'ref_log_prob', which the role 'ref' writes"),
    ],
)
def test_an_estimator_that_needs_missing_columns_is_rejected(name: str, words: str) -> None:
    estimator = f"algorithm.adv_estimator={__name__}.{name}"
    with pytest.raises(ConfigError, match=words):
        run(load_config([*NEEDED, estimator]))
    # a worker of the user may write any column
    user_worker = "+role_workers.critic=my_roles.Critic", "algorithm.adv_estimator=gae"
    config = load_config([*NEEDED, *user_worker])
    config = replace_keys(config, {"algorithm.adv_estimator": f"{__name__}.{name}"})
    check_columns(config)


def test_a_tracker_function_that_returns_no_tracker_is_rejected(tmp_path: Path) -> None:
    folder = f"trainer.default_local_dir={tmp_path}"
    config = load_config([*NEEDED, f"trainer.logger={__name__}.tracker_of_nothing", folder])
    with (
        pytest.raises(ConfigError, match="what trainer.logger=.* makes has no write"),
        make_tracking(config, total_steps=1),
    ):
        pass


def test_a_wrong_sampler_of_prompts_is_rejected() -> None:
    from trainer.data.loader import epoch_order

    data = load_config([*NEEDED, f"data.sampler={__name__}.order_of_another"]).data
    with pytest.raises(ConfigError, match=r"data.sampler=.* has .*\(count, epoch\), but is called"):
        epoch_order(data, seed=1, num_prompts=4)
