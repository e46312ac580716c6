"""Properties of every estimator: its twin, empty rows, and unchanged inputs."""

import inspect

import numpy as np
import pytest
import torch

from tests.trainer.ppo.advantages.plain_python import INDEX, NAMES, ROWS, WIDTH, whole_batch
from tests.trainer.ppo.advantages.twins import SETTINGS, TWINS, Case
from trainer.ppo.advantage_inputs import columns_read, compute_advantage, named_rewards
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS, needs_groups
from verl_like.errors import BatchError

EVERY_SETTING = [(name, settings) for name in TWINS for settings in SETTINGS.get(name, [{}])]


def arguments_of(name, batch, settings):
    """Return the driver's arguments for an estimator, in the batch's own precision."""
    taken = inspect.signature(ADVANTAGE_ESTIMATORS[name]).parameters
    arguments = {key: batch.batch[key] for key in columns_read(name) if key in taken}
    if "index" in taken:
        arguments["index"] = INDEX
    if "named_rewards" in taken:
        arguments["named_rewards"] = named_rewards(batch, NAMES).double()
    if "truncated" in settings:
        settings = settings | {"truncated": torch.tensor(settings["truncated"])}
    defaults = {"gamma": 1.0, "lam": 1.0} if name == "gae" else {}
    return defaults | arguments | settings


def case_of(batch, settings):
    columns = batch.batch
    return Case(
        rewards=columns["token_level_rewards"].tolist(),
        values=columns["values"].tolist(),
        mask=columns["response_mask"].tolist(),
        old_log_probs=columns["old_log_probs"].tolist(),
        sum_pi_squared=columns["sum_pi_squared"].tolist(),
        step_ends=columns["step_ends"].tolist(),
        baselines=columns["reward_baselines"].tolist(),
        named=named_rewards(batch, NAMES).double().T.tolist(),
        settings=settings,
    )


def test_every_estimator_has_a_twin():
    assert set(TWINS) == set(ADVANTAGE_ESTIMATORS)


@pytest.mark.parametrize("only_one_score", [False, True])
@pytest.mark.parametrize(("name", "settings"), EVERY_SETTING)
def test_every_estimator_equals_its_twin(columns, name, settings, only_one_score):
    rewards, values, mask = columns
    if only_one_score:
        rewards = torch.where(torch.arange(ROWS)[:, None] == 4, rewards, 0.0)
    batch = whole_batch(rewards, values, mask)
    results = ADVANTAGE_ESTIMATORS[name](**arguments_of(name, batch, settings))
    for result, plain in zip(results, TWINS[name](case_of(batch, settings)), strict=True):
        torch.testing.assert_close(result, torch.tensor(plain, dtype=torch.float64))


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_every_estimator_keeps_its_inputs_and_accepts_float32(columns, name):
    rewards, values, mask = columns
    batch = whole_batch(rewards.float(), values.float(), mask)
    before = {key: batch.batch[key].clone() for key in batch.batch.keys()}  # noqa: SIM118
    compute_advantage(batch, name, gdpo_reward_keys=NAMES, bootstrap_truncated=True)
    assert all(torch.equal(batch.batch[key], column) for key, column in before.items())
    assert batch.batch["advantages"].dtype == batch.batch["returns"].dtype == torch.float32
    assert (batch.batch["advantages"][mask == 0] == 0).all()


# to gdpo, a nan is a reward that the function did not return
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", sorted(set(ADVANTAGE_ESTIMATORS) - {"gdpo"}))
def test_nan_and_infinite_rewards_are_rejected_with_their_sample(columns, name, bad):
    batch = whole_batch(*columns)
    reads = columns_read(name)
    column = "token_level_rewards" if "token_level_rewards" in reads else "token_level_scores"
    batch.batch[column][4, 0] = bad
    with pytest.raises(BatchError, match=rf"{column} is nan or infinite in 1 of 7.*uid b"):
        compute_advantage(batch, name)


@pytest.mark.parametrize("score", [0.1, 1 / 3, 1e6 + 0.1])
@pytest.mark.parametrize(
    "name", [name for name, estimator in ADVANTAGE_ESTIMATORS.items() if needs_groups(estimator)]
)
def test_groups_of_equal_scores_give_exactly_zero(name, score):
    mask = torch.ones(ROWS, WIDTH, dtype=torch.int64)
    rewards = torch.zeros(ROWS, WIDTH)
    rewards[:, -1] = score
    batch = whole_batch(rewards, torch.zeros(ROWS, WIDTH), mask)
    batch.batch["step_ends"] = rewards != 0
    batch.batch["old_log_probs"] = batch.batch["old_log_probs"].float()
    batch.non_tensor_batch["uid"] = np.array(["x", "y", "x", "y", "x", "x", "y"], dtype=object)
    batch = compute_advantage(batch, name, gdpo_reward_keys=["seq_reward"])
    assert (batch.batch["advantages"] == 0).all()
