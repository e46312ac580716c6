"""Several trained states on one actor: each is trained independently of the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.samples import make_batch, started, tiny_config
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError
from workers.roles.served import ServedActorWorker
from workers.training.optim import OptimStepSettings

STEP = OptimStepSettings(
    lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1, grad_clip=torch.inf
)


def config_of(folder: Path, rank: int) -> Any:
    config = tiny_config(folder)
    policy = config.actor_rollout_ref
    policy.model = replace(policy.model, lora_rank=rank)
    return config


def rows(seed: int) -> DataProto:
    batch = make_batch(5, seed)
    columns = {name: batch.column(name) for name in batch.columns}
    columns["weights"] = columns["advantages"]
    columns["logprobs"] = columns["old_log_probs"]
    return DataProto.from_dict(columns)


def train(actor: Any, seed: int, loss: str = "cross_entropy") -> list[float]:
    """Do two batches, whose gradients add up, and a step."""
    losses = [actor.forward_backward(rows(n), loss).metrics["loss"] for n in (seed, seed + 1)]
    return [*losses, actor.optim_step(STEP)["grad_norm"]]


@pytest.mark.parametrize("rank", [0, 4])
def test_a_state_trains_like_a_separate_actor_bit_for_bit(one_layer_dir: Path, rank: int) -> None:
    alone = started(ServedActorWorker, config_of(one_layer_dir, rank))
    alone.add_state("a", rank, 5)
    alone.use_state("a")
    expected = [train(alone, seed) for seed in (0, 2, 4)]

    shared = started(ServedActorWorker, config_of(one_layer_dir, rank))
    base = shared.weights_checksum()
    shared.add_state("a", rank, 5)
    shared.add_state("b", 2 * rank, 6)
    metrics = []
    for seed in (0, 2, 4):
        shared.use_state("a")
        first = shared.forward_backward(rows(seed), "cross_entropy").metrics["loss"]
        shared.use_state("b")
        train(shared, seed + 10, "importance_sampling")
        shared.use_state("a")
        second = shared.forward_backward(rows(seed + 1), "cross_entropy").metrics["loss"]
        metrics.append([first, second, shared.optim_step(STEP)["grad_norm"]])
    assert metrics == expected
    assert shared.weights_checksum() == alone.weights_checksum()
    shared.use_state("b")
    assert shared.weights_checksum() != alone.weights_checksum()
    shared.use_state("")
    assert shared.weights_checksum() == base


def test_a_copied_state_keeps_its_weights_until_it_is_dropped(one_layer_dir: Path) -> None:
    actor = started(ServedActorWorker, config_of(one_layer_dir, 4))
    actor.add_state("a", 4)
    actor.use_state("a")
    train(actor, 0)
    before = actor.weights_checksum()
    actor.copy_state("a", "frozen")
    train(actor, 2)
    assert actor.weights_checksum() != before
    actor.use_state("frozen")
    assert actor.weights_checksum() == before
    actor.drop_state("frozen")
    with pytest.raises(ConfigError, match="no state 'frozen'"):
        actor.use_state("frozen")


def test_a_copy_may_replace_the_state_in_use(one_layer_dir: Path) -> None:
    actor = started(ServedActorWorker, config_of(one_layer_dir, 4))
    for seed, name in enumerate("ab"):
        actor.add_state(name, 4)
        actor.use_state(name)
        train(actor, seed)
    actor.use_state("a")
    expected = actor.weights_checksum()
    actor.use_state("b")
    actor.copy_state("a", "b")
    for name in ("a", "b"):
        actor.use_state(name)
        assert actor.weights_checksum() == expected


def test_frozen_modules_are_not_trained(one_layer_dir: Path) -> None:
    actor = started(ServedActorWorker, config_of(one_layer_dir, 4))
    actor.add_state("a", 4, None, ("attn",))
    actor.use_state("a")
    before = {name: weight.clone() for name, weight in actor.states.parameters.items()}
    train(actor, 0)
    moved = {n for n, weight in actor.states.parameters.items() if not weight.equal(before[n])}
    assert moved
    assert not any("attn" in name for name in moved)
    assert any("attn" in name for name in before)


def test_a_checkpoint_of_another_rank_restores_weights_and_moments(
    one_layer_dir: Path, tmp_path: Path
) -> None:
    actor = started(ServedActorWorker, config_of(one_layer_dir, 4))
    actor.add_state("a", 2, 1)
    actor.use_state("a")
    train(actor, 0)
    actor.save_checkpoint(str(tmp_path / "c"), 1, ["model", "optimizer"])
    expected = train(actor, 2), actor.weights_checksum()
    actor.add_state("b", 2)
    actor.use_state("b")
    actor.load_checkpoint(str(tmp_path / "c"))
    assert (train(actor, 2), actor.weights_checksum()) == expected


def test_policy_losses_are_chosen_by_name_with_their_settings(one_layer_dir: Path) -> None:
    actor = started(ServedActorWorker, config_of(one_layer_dir, 4))
    actor.add_state("a", 4)
    actor.use_state("a")
    batch = rows(0)
    columns = {name: batch.column(name) for name in batch.columns}
    columns["weights"] = columns["response_mask"]
    batch = DataProto.from_dict(columns, meta_info={"loss_settings": {"clip_ratio_high": 0.3}})
    assert actor.forward_backward(batch, "verl_like:vanilla").metrics["loss"] != 0
    wrong = DataProto.from_dict(columns, meta_info={"loss_settings": {"clip_ratio_hihg": 0.3}})
    with pytest.raises(ConfigError, match="no setting 'clip_ratio_hihg'.*clip_ratio_high"):
        actor.forward_backward(wrong, "verl_like:vanilla")


def test_a_state_of_another_kind_or_with_an_existing_name_is_rejected(one_layer_dir: Path) -> None:
    full = started(ServedActorWorker, config_of(one_layer_dir, 0))
    with pytest.raises(
        ConfigError, match="trains all weights .*, so it cannot add a state of rank 4"
    ):
        full.add_state("a", 4)
    adapted = started(ServedActorWorker, config_of(one_layer_dir, 4))
    with pytest.raises(ConfigError, match="trains adapters .*, so it cannot add a state of rank 0"):
        adapted.add_state("a", 0)
    adapted.add_state("a", 4)
    with pytest.raises(ConfigError, match="a state named 'a' already exists"):
        adapted.add_state("a", 4)
