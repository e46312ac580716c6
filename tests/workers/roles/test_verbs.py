"""A driver that calls the four verbs gets the weights and numbers of `update_actor`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.verl_like.groups import start
from tests.workers.samples import make_batch, started, tiny_config
from verl_like.batch.protocol import DataProto
from verl_like.errors import BatchError, ConfigError
from workers.config import OptimConfig
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.roles.reference import ReferenceWorker
from workers.training.optim import OptimStepSettings

NUM_ROWS, MINI_BATCH, NUM_EPOCHS = 8, 4, 2
OPTIM = OptimConfig(lr=1e-3, lr_warmup_steps=1, lr_scheduler_type="linear")


HALVES = slice(0, 3), slice(3, NUM_ROWS)


def config_of(folder: Path, **actor: Any) -> Any:
    settings = {"optim": OPTIM, "entropy_coeff": 0.01, "use_kl_loss": True, **actor}
    return tiny_config(folder, ppo_mini_batch_size=MINI_BATCH, ppo_epochs=NUM_EPOCHS, **settings)


@pytest.fixture
def groups(one_layer_dir: Path) -> Iterator[list[Any]]:
    """Two groups of an actor, of one process each."""
    roles = {"actor": (ActorWorker, (config_of(one_layer_dir),))}
    with ExitStack() as stack:
        yield [stack.enter_context(start("local", roles, [1])) for _ in range(2)]


def drive(group: Any, batch: DataProto) -> list[float]:
    """Do the update of `update_actor` by verbs, from outside."""
    norms = []
    count = len(batch) // MINI_BATCH
    for step in range(NUM_EPOCHS * count):
        mini_batch = batch[step % count :: count]
        group.forward_backward(mini_batch, "policy")
        is_last = step == NUM_EPOCHS * count - 1
        (metrics,) = group.optim_step(OptimStepSettings(ends_update=is_last))
        norms.append(metrics["grad_norm"])
    return norms


def test_the_verbs_give_the_weights_of_update_actor(groups: list[Any]) -> None:
    composed, driven = groups
    for group in groups:
        group.init_model(3)
    for seed in (0, 1):
        batch = make_batch(NUM_ROWS, seed)
        metrics = composed.update_actor(batch).get()
        norms = drive(driven, batch)
        assert metrics["actor/grad_norm"] == [sum(norms) / len(norms)]
        assert composed.weights_checksum() == driven.weights_checksum()
    scored = driven.forward(make_batch(NUM_ROWS), ("log_probs", "entropys"))
    expected = composed.compute_log_prob(make_batch(NUM_ROWS)).batch
    assert torch.equal(scored.padded("log_probs"), expected.padded("old_log_probs"))
    assert torch.equal(scored.padded("entropys"), expected.padded("entropys"))


def test_chunks_of_a_mini_batch_add_up_to_its_loss_and_gradient(one_layer_dir: Path) -> None:
    full, chunked = (started(CriticWorker, config_of(one_layer_dir), 1) for _ in range(2))
    batch = make_batch(NUM_ROWS)
    outputs, metrics = full.forward_backward(batch, "value")
    counts = {"num_rows": NUM_ROWS, "num_tokens": int(batch.batch["response_mask"].sum())}
    halves = [chunked.forward_backward(batch[rows], "value", counts) for rows in HALVES]
    values = torch.cat([half.batch.padded("values") for half in halves])
    torch.testing.assert_close(values, outputs.padded("values"))
    losses = [half.metrics["vf_loss"] for half in halves]
    assert sum(losses) == pytest.approx(metrics["vf_loss"], rel=1e-5)
    norms = [worker.optim_step()["grad_norm"] for worker in (full, chunked)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_settings_of_an_optimizer_step_apply_only_to_that_step(one_layer_dir: Path) -> None:
    actor = started(ActorWorker, config_of(one_layer_dir), 3)
    (group,) = actor.engine.optimizer.param_groups
    before = {name: group[name] for name in ("lr", "betas", "weight_decay")}
    checksum = actor.weights_checksum()
    actor.forward_backward(make_batch(NUM_ROWS), "policy")
    metrics = actor.optim_step(OptimStepSettings(lr=0.0, weight_decay=0.0, ends_update=False))
    assert metrics["lr"] == 0.0
    assert metrics["skipped_steps"] == 0.0
    assert actor.weights_checksum() == checksum
    assert {name: group[name] for name in before} == before


def test_an_unknown_loss_or_output_is_rejected_with_the_known_names(one_layer_dir: Path) -> None:
    config = config_of(one_layer_dir)
    actor, reference = started(ActorWorker, config, 1), started(ReferenceWorker, config)
    with pytest.raises(
        ConfigError, match="there is no loss 'polcy'. Did you mean 'policy'. Known: policy, ptx, lm"
    ):
        actor.forward_backward(make_batch(4), "polcy")
    with pytest.raises(ConfigError, match="optim_step: there are no gradients"):
        actor.optim_step()
    with pytest.raises(BatchError, match="no output 'values'; it has log_probs"):
        actor.forward(make_batch(4), ("values",))
    with pytest.raises(ConfigError, match="'policy'. This role is frozen"):
        reference.forward_backward(make_batch(4), "policy")
    with pytest.raises(ConfigError, match="optim_step: the model is frozen"):
        reference.optim_step()
