"""A pass computes only on the model's device.

torch's meta device simulates a GPU: it computes shapes, and rejects tensors of other devices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.gradients import loss_of
from tests.workers.samples import make_batch, started, tiny_config
from verl_like.batch.protocol import DataProto
from workers.losses.registry import POLICY_LOSSES, get_policy_loss
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.training.engine import INPUTS
from workers.training.microbatch import Rows, mini_batch

META = torch.device("meta")


@pytest.fixture(autouse=True)
def without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip transformers' check for packed position ids; meta tensors have no values."""
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda _: None)


def on_meta(worker: Any) -> Any:
    worker.engine.device = META
    worker.engine.module.to(META)
    worker.engine.cast = torch.bfloat16
    return worker


def batch_with_more() -> DataProto:
    """Return the batch with the columns that some losses read."""
    batch = make_batch(6)
    batch.batch["rollout_is_weights"] = torch.ones_like(batch.batch["advantages"])
    batch.batch["chosen_tokens"] = batch.batch["response_mask"].bool()
    return batch


def run_passes(worker: Any, names: list[str]) -> dict[str, torch.Tensor]:
    data = batch_with_more()
    rows = Rows.from_batch(data, (*INPUTS, *names))
    with worker.engine.running(worker.engine.optimizer):
        totals: dict[str, torch.Tensor] = worker.engine.run_passes(
            mini_batch(rows, 0, 1, None), loss_of(worker, data), None, [(rows.columns, len(data))]
        )
    return totals


@pytest.fixture(scope="module")
def actor(one_layer_dir: Path) -> ActorWorker:
    config = tiny_config(one_layer_dir, entropy_coeff=0.01, use_kl_loss=True, target_entropy=0.5)
    worker: ActorWorker = on_meta(started(ActorWorker, config, 10))
    return worker


def test_the_simulated_gpu_rejects_tensors_of_another_device() -> None:
    with pytest.raises(RuntimeError, match="not on the expected device"):
        torch.ones(3, device=META) * torch.ones(3)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_policy_loss_computes_on_the_model_s_device(actor: ActorWorker, name: str) -> None:
    actor.objective_settings.policy_loss = get_policy_loss(name)
    names = actor.objective(batch_with_more()).loss.columns
    totals = run_passes(actor, [*names, "rollout_is_weights"])
    assert {total.device for total in totals.values()} == {META}
    assert {weight.grad.device for weight in actor.engine.parameters()} == {META}


def test_a_value_loss_computes_on_the_model_s_device(one_layer_dir: Path) -> None:
    critic = on_meta(started(CriticWorker, tiny_config(one_layer_dir), 10))
    totals = run_passes(critic, ["values", "returns"])
    assert {total.device for total in totals.values()} == {META}
