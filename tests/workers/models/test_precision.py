"""The types of weights, passes and rollouts: their choice, and the computation in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.workers.samples import make_batch, started, tiny_config
from tests.workers.stand_ins import TiedModel
from verl_like.errors import ConfigError
from workers.config import ActorRolloutRefConfig, ModelConfig, RolloutConfig
from workers.models.causal_lm import Float32Linear
from workers.models.precision import Precision, computing_in, precision_of, rollout_dtype
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.roles.reference import ReferenceWorker

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("device", "dtype", "compute", "expected"),
    [
        ("cpu", "float32", None, (FLOAT32, FLOAT32)),
        ("cuda", "float32", None, (FLOAT32, BFLOAT16)),
        ("cuda", "float32", "float32", (FLOAT32, FLOAT32)),
        ("cpu", "float32", "bfloat16", (FLOAT32, BFLOAT16)),
        ("cpu", "bfloat16", None, (BFLOAT16, BFLOAT16)),
        ("cuda", "bfloat16", None, (BFLOAT16, BFLOAT16)),
    ],
)
def test_masters_are_float32_and_passes_on_cuda_bfloat16_by_default(
    device: str, dtype: str, compute: str | None, expected: tuple[torch.dtype, torch.dtype]
) -> None:
    model = ModelConfig(dtype=dtype, compute_dtype=compute)
    assert precision_of(model, device) == Precision(*expected)
    policy = ActorRolloutRefConfig(model=model, rollout=RolloutConfig())
    assert rollout_dtype(policy, device) == expected[1]
    policy.rollout.dtype = "float32"
    assert rollout_dtype(policy, device) == FLOAT32


def test_passes_wider_than_the_weights_are_rejected() -> None:
    with pytest.raises(
        ConfigError, match="wider than the weights .*Set actor_rollout_ref.model.dtype=float32"
    ):
        precision_of(ModelConfig(dtype="bfloat16", compute_dtype="float32"), "cuda")


def test_weights_are_cast_for_a_pass_and_gradients_cast_back() -> None:
    model = TiedModel(0)
    weights = dict(model.named_parameters())
    with computing_in(model, BFLOAT16):
        assert model.embed.weight is model.head.weight
        assert {weight.dtype for weight in model.parameters()} <= {BFLOAT16}
        model.head(model.embed(torch.tensor([0, 1]))).float().sum().backward()
    assert all(own is weights[name] for name, own in model.named_parameters())
    assert model.embed.weight.grad is not None
    assert model.embed.weight.grad.dtype == FLOAT32


def test_weights_are_the_masters_again_after_an_error() -> None:
    layer = nn.Linear(2, 2)
    weight = layer.weight
    with pytest.raises(RuntimeError, match="shapes"), computing_in(layer, BFLOAT16):
        layer(torch.zeros(1, 3, dtype=BFLOAT16))
    assert layer.weight is weight


def test_frozen_weights_have_the_type_of_passes_and_equal_scores(
    tiny_dir: Path,
) -> None:
    config, batch = tiny_config(tiny_dir), make_batch(6)
    config.actor_rollout_ref.model.compute_dtype = "bfloat16"
    actor, reference = started(ActorWorker, config, 1), started(ReferenceWorker, config)
    assert {weight.dtype for weight in reference.engine.module.parameters()} == {BFLOAT16}
    own = actor.compute_log_prob(batch)[0].batch["old_log_probs"]
    assert own.dtype == FLOAT32
    assert torch.equal(reference.compute_ref_log_prob(batch).batch["ref_log_prob"], own)


def test_values_are_not_rounded_to_bfloat16(tiny_dir: Path) -> None:
    config = tiny_config(tiny_dir, ppo_mini_batch_size=8)
    config.actor_rollout_ref.model.compute_dtype = "bfloat16"
    critic = started(CriticWorker, config, 3)
    critic.update_critic(make_batch(8))
    values = critic.compute_values(make_batch(8)).batch["values"]
    assert values.dtype == FLOAT32
    assert not torch.equal(values.to(BFLOAT16).float(), values)
    assert isinstance(critic.engine.module.score, Float32Linear)
