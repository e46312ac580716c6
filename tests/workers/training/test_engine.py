from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.gradients import ACTOR_COLUMNS, assert_equal_gradients, gradients
from tests.workers.kept_ranks import run_kept
from tests.workers.samples import (
    learned,
    make_batch,
    own_chunk,
    started,
    tiny_config,
    weights_of,
)
from verl_like.errors import ConfigError
from workers.config import LOSS_AGG_MODES, OptimConfig
from workers.cpu import onednn
from workers.models.causal_lm import checkpointed_layers
from workers.parallel import sharding
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.training.microbatch import MicroBatchBudget
from workers.training.optim import guarded_step


def tiny_actor(tiny_dir: Path, **actor: Any) -> ActorWorker:
    return started(ActorWorker, tiny_config(tiny_dir, **actor), 10)


def on_ranks(
    tiny_dir: Path, num_rows: int, fsdp_size: int = -1, is_large: bool = False
) -> dict[str, Any]:
    """Return gradients, log-probs and an update of every rank.

    The update has two mini-batches, or one if the number of rows is odd.

    An `is_large` model has an FSDP2 unit for each of its layers. Several ranks, in separate
    processes, run one row per pass, so a mini-batch has several passes. Their products use oneDNN,
    whereas those of one rank use torch's kernels.
    """
    if is_large:
        sharding.SMALL_ELEMENTS = 0
    if os.environ.get("WORLD_SIZE", "1") != "1":
        onednn.MIN_MULTIPLICATIONS = 1
    config = tiny_config(
        tiny_dir,
        loss_agg_mode="seq-mean-token-mean",
        entropy_coeff=0.01,
        use_kl_loss=True,
        fsdp_config={"fsdp_size": fsdp_size},
        ppo_mini_batch_size=num_rows // 2 if num_rows % 2 == 0 else num_rows,
    )
    actor, critic = started(ActorWorker, config, 10), started(CriticWorker, config, 10)
    data = own_chunk(make_batch(num_rows), actor.rank, actor.world_size)
    real = data.num_real_rows
    budget = MicroBatchBudget(rows=1 if actor.world_size > 1 else num_rows)
    before = actor.weights_checksum()
    return {
        "gradients": gradients(actor, data, ACTOR_COLUMNS, budget),
        "critic_gradients": gradients(critic, data, ("values", "returns"), budget),
        "log_probs": actor.compute_log_prob(data)[0].batch["old_log_probs"][:real],
        "metrics": learned(actor.update_actor(data)),
        "critic_metrics": learned(critic.update_critic(data)),
        "weights": weights_of(actor),
        "elements": sum(getattr(p, "_local_tensor", p).numel() for p in actor.engine.parameters()),
        "checksums": (before, actor.weights_checksum()),
    }


def assert_same_training(
    results: list[dict[str, Any]], one_rank: dict[str, Any], num_shards: int
) -> None:
    for result in results:
        assert result["metrics"] == results[0]["metrics"]
        assert result["critic_metrics"] == results[0]["critic_metrics"]
        assert result["checksums"] == results[0]["checksums"]
    ours = results[0]
    assert ours["elements"] < 1.1 * one_rank["elements"] / num_shards
    assert ours["checksums"][0] == one_rank["checksums"][0]
    assert ours["checksums"][1] != ours["checksums"][0]
    assert_equal_gradients(ours["gradients"], one_rank["gradients"])
    assert_equal_gradients(ours["critic_gradients"], one_rank["critic_gradients"])
    torch.testing.assert_close(
        torch.cat([r["log_probs"] for r in results]), one_rank["log_probs"], atol=1e-6, rtol=0
    )
    for metrics in ("metrics", "critic_metrics"):
        assert ours[metrics] == pytest.approx(one_rank[metrics], rel=1e-4, abs=1e-6)
    for name, weight in one_rank["weights"].items():
        assert (ours["weights"][name] - weight).norm() <= 1e-3 * weight.norm(), name


@pytest.fixture(scope="module")
def one_rank() -> Callable[[Path], dict[str, Any]]:
    """Return one rank's results on eight rows, by the model's folder; computed once."""
    return functools.cache(lambda folder: on_ranks(folder, 8))


@pytest.mark.parametrize(("world_size", "fsdp_size", "is_large"), [(2, -1, True), (4, 2, False)])
def test_training_does_not_depend_on_the_number_of_ranks(
    tiny_dir: Path,
    one_layer_dir: Path,
    one_rank: Callable[[Path], dict[str, Any]],
    world_size: int,
    fsdp_size: int,
    is_large: bool,
) -> None:
    num_shards = world_size if fsdp_size == -1 else fsdp_size
    folder = tiny_dir if is_large else one_layer_dir
    results = run_kept(world_size, on_ranks, folder, 8, fsdp_size, is_large)
    assert_same_training(results, one_rank(folder), num_shards)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_gradient_does_not_depend_on_the_micro_batch_cut(
    one_layer_dir: Path, mode: str
) -> None:
    actor = tiny_actor(one_layer_dir, loss_agg_mode=mode, entropy_coeff=0.01, use_kl_loss=True)
    batch = make_batch(9)
    whole = gradients(actor, batch, ACTOR_COLUMNS, MicroBatchBudget(rows=9))
    for budget in (MicroBatchBudget(rows=2), MicroBatchBudget(tokens=25)):
        assert_equal_gradients(gradients(actor, batch, ACTOR_COLUMNS, budget), whole)


def test_the_scheduler_steps_once_per_update(tiny_dir: Path) -> None:
    optim = OptimConfig(lr=1e-3, lr_warmup_steps=1, lr_scheduler_type="linear")
    actor = tiny_actor(tiny_dir, optim=optim, ppo_mini_batch_size=2, ppo_epochs=2)
    actor.init_model(3)
    rates = [actor.update_actor(make_batch(6))["actor/lr"] for _ in range(4)]
    assert rates == pytest.approx([5e-4, 1e-3, 5e-4, 0.0])


def test_an_error_within_a_mini_batch_leaves_no_gradient_behind(
    tiny_dir: Path,
) -> None:
    actor, other = (
        tiny_actor(tiny_dir, ppo_mini_batch_size=4, ppo_micro_batch_size_per_gpu=2)
        for _ in range(2)
    )
    passes: list[int] = []
    policy_loss = actor.objective_settings.policy_loss

    def breaks_once(**columns: Any) -> Any:
        passes.append(1)
        if len(passes) == 2:
            raise ArithmeticError("in the second of two passes")
        return policy_loss(**columns)

    actor.objective_settings.policy_loss = breaks_once
    with pytest.raises(ArithmeticError):
        actor.update_actor(make_batch(4))
    actor.update_actor(make_batch(4))
    other.update_actor(make_batch(4))
    assert len(passes) == 4
    assert actor.weights_checksum() == other.weights_checksum()


def test_gradients_are_clipped_by_their_global_norm() -> None:
    weights = [torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))]
    weights[0].grad, weights[1].grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert guarded_step(torch.optim.SGD(weights, lr=1.0), weights, grad_clip=1.0) == 5.0
    assert [float(weight.detach()) for weight in weights] == pytest.approx([-0.6, -0.8], rel=1e-5)
    assert all(weight.grad is None for weight in weights)


def test_rows_without_a_response_give_no_loss_and_no_nan(tiny_dir: Path) -> None:
    actor = tiny_actor(tiny_dir, ppo_mini_batch_size=4, entropy_coeff=0.01, use_kl_loss=True)
    batch = make_batch(4)
    batch.batch["response_mask"].zero_()
    metrics = actor.update_actor(batch)
    assert metrics["actor/pg_loss"] == metrics["actor/grad_norm"] == metrics["actor/entropy"] == 0.0
    assert all(torch.isfinite(weight).all() for _, weight in actor.engine.named_full_tensors())


def test_passes_do_not_modify_the_caller_s_batch(tiny_dir: Path) -> None:
    actor, batch = tiny_actor(tiny_dir, ppo_mini_batch_size=4), make_batch(4)
    actor.compute_log_prob(batch)
    actor.update_actor(batch)
    assert all(
        torch.equal(batch.batch[name], column) for name, column in make_batch(4).batch.items()
    )


def test_a_folder_without_a_model_is_rejected_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no config.json there.*verl-like make-tiny"):
        tiny_actor(tmp_path)


def test_a_model_that_is_no_causal_lm_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ConfigError, match="cannot load .* as a causal LM"):
        tiny_actor(tmp_path)


def test_rows_longer_than_the_model_s_positions_are_rejected(tiny_dir: Path) -> None:
    actor = tiny_actor(tiny_dir)
    actor.engine.module.config.max_position_embeddings = 4
    with pytest.raises(ConfigError, match=r"a row of \d+ tokens.*4 positions"):
        actor.compute_log_prob(make_batch(9))


@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_only_the_first_layers_are_recomputed(count: int, tiny_dir: Path) -> None:
    saved_bytes, results = [], []
    for settings in ({}, {"enable_gradient_checkpointing": count}):
        actor = started(ActorWorker, tiny_config(tiny_dir, model=settings), 10)
        layers = checkpointed_layers(actor.engine.module)
        assert len(layers) == 2
        flags = [bool(layer.gradient_checkpointing) for layer in layers]
        assert flags == [
            number < settings.get("enable_gradient_checkpointing", 0) for number in range(2)
        ]

        kept: list[int] = []

        def pack(tensor: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
            kept.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            results.append(gradients(actor, make_batch(4), ACTOR_COLUMNS))
        saved_bytes.append(sum(kept))
    for name, gradient in results[0].items():
        assert torch.equal(gradient, results[1][name]), name
    assert (saved_bytes[1] < saved_bytes[0]) == (count > 0)
