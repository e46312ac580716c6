"""What holds for every estimator: empty rows, untouched inputs, its file and its names."""

import pytest
import torch

from tests.trainer.ppo.advantages.plain_python import ROWS, WIDTH, batch_of
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from trainer.ppo.compute_advantage import compute_advantage


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_empty_responses_give_zeros(name):
    mask = torch.zeros(ROWS, WIDTH, dtype=torch.int64)
    zeros = torch.zeros(ROWS, WIDTH)
    batch = batch_of(
        zeros, mask, values=torch.randn(ROWS, WIDTH), reward_baselines=torch.ones(ROWS)
    )
    batch = compute_advantage(batch, name)
    assert torch.equal(batch.batch["advantages"], zeros)
    assert torch.equal(batch.batch["returns"], zeros)


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_every_estimator_leaves_its_inputs_alone_and_works_on_float32(columns, name):
    rewards, values, mask = columns
    inputs = {"values": values.float(), "reward_baselines": torch.ones(ROWS)}
    batch = batch_of(rewards.float(), mask, **inputs)
    before = {key: batch.batch[key].clone() for key in batch.batch.keys()}  # noqa: SIM118
    compute_advantage(batch, name)
    assert all(torch.equal(batch.batch[key], column) for key, column in before.items())
    assert batch.batch["advantages"].dtype == batch.batch["returns"].dtype == torch.float32
    assert (batch.batch["advantages"][mask == 0] == 0).all()


def test_every_estimator_is_a_file_of_its_name():
    first_names = {}
    for name, estimator in ADVANTAGE_ESTIMATORS.items():
        first_names.setdefault(estimator, name)
    for estimator, name in first_names.items():
        assert estimator.__module__ == f"trainer.ppo.advantages.{name}"


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_verls_vectorized_names_are_the_same_estimators(name):
    assert ADVANTAGE_ESTIMATORS[f"{name}_vectorized"] is ADVANTAGE_ESTIMATORS[name]
