"""Roles with tensor or pipeline parallelism equal one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.kept_ranks import run_kept
from tests.workers.roles import test_preference
from tests.workers.samples import (
    beside,
    check_axes_of,
    learned,
    make_batch,
    started,
    tiny_config,
    weights_of,
)
from tests.workers.training import test_moving_average_engine
from verl_like.errors import ConfigError
from workers.config import ModelConfig, ParallelConfig
from workers.roles.actor import ActorWorker
from workers.roles.reference import ReferenceWorker
from workers.roles.rows import PreferenceWorker
from workers.training.passes.packing import RowPasses
from workers.training.role_model_spec import RoleModelSpec


def split_over_all(axis: str) -> ParallelConfig:
    """Split a model over all ranks of this world along the axis."""
    return ParallelConfig(**{axis: int(os.environ.get("WORLD_SIZE", "1"))})


AXES = ("tp", "pp")


def update_with_separate_sides(folder: Path) -> tuple[dict[str, float], torch.Tensor]:
    """Update on pairs with one pass per side; return log-probs after it."""
    config = test_preference.config_of(folder, "dpo", 2)
    config.parallel = split_over_all("pp")
    worker, batch = started(PreferenceWorker, config, 10), test_preference.batch_of("dpo")
    worker.engine.row_passes = RowPasses("single")
    metrics = learned(worker.update_model(batch))
    return metrics, worker.compute_log_prob(batch).batch["response_log_probs"]


def test_pipeline_stages_pass_on_the_activations_of_each_side(tiny_dir: Path) -> None:
    metrics, log_probs = update_with_separate_sides(tiny_dir)
    for rank_metrics, column in run_kept(2, update_with_separate_sides, tiny_dir):
        assert rank_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-5)
        torch.testing.assert_close(column, log_probs, atol=1e-4, rtol=0)


def weights_around_updates(
    folder: Path, axis: str, checkpoint: Path
) -> list[dict[str, torch.Tensor]]:
    """Return the policy's weights around two updates, then the reference's.

    Another reference takes over between the two.
    """
    config = test_moving_average_engine.config_of(folder)
    config.parallel = split_over_all(axis)
    actor = started(ActorWorker, config, 10)
    reference = beside(actor, ReferenceWorker, config)
    found = [weights_of(actor)]
    for seed in range(2):
        actor.update_actor(make_batch(4, seed))
        assert reference.update_weights(seed).error is None
        found.append(weights_of(actor))
        if seed == 0:
            reference.save_checkpoint(str(checkpoint))
            reference = beside(actor, ReferenceWorker, config)
            reference.load_checkpoint(str(checkpoint))
    return [*found, weights_of(reference)]


@pytest.mark.parametrize("axis", AXES)
def test_a_moving_average_reference_updates_its_shard_of_every_weight(
    tiny_dir: Path, axis: str, tmp_path: Path
) -> None:
    for found in run_kept(2, weights_around_updates, tiny_dir, axis, tmp_path):
        test_moving_average_engine.assert_average(found, test_moving_average_engine.DECAY)


def log_probs(folder: Path, axis: str, model: dict[str, Any]) -> list[torch.Tensor]:
    """Return the log-probs of an actor after an update, and of the reference that is its base."""
    config = tiny_config(folder, ppo_mini_batch_size=4, parallel=split_over_all(axis))
    for name, value in model.items():
        setattr(config.actor_rollout_ref.model, name, value)
    actor = started(ActorWorker, config, 10)
    actor.update_actor(make_batch(4))
    found = [actor.compute_log_prob(make_batch(4))[0].batch["old_log_probs"]]
    if "lora_rank" in model:
        reference = beside(actor, ReferenceWorker, config)
        found.append(reference.compute_ref_log_prob(make_batch(4)).batch["ref_log_prob"])
    return found


@pytest.mark.parametrize(
    ("axis", "model", "error"),
    [
        ("tp", {"compute_dtype": "bfloat16", "use_fused_kernels": False}, 0.05),
        ("pp", {"lora_rank": 4}, 2e-5),
    ],
)
def test_the_policy_s_base_and_its_casts_are_split_like_the_policy(
    tiny_dir: Path, axis: str, model: dict[str, Any], error: float
) -> None:
    alone = log_probs(tiny_dir, axis, model)
    for found in run_kept(2, log_probs, tiny_dir, axis, model):
        for own, expected in zip(found, alone, strict=True):
            torch.testing.assert_close(own, expected, atol=error, rtol=0)


def spec_of(folder: Path, tp: int, **settings: Any) -> RoleModelSpec:
    model = ModelConfig(path=str(folder / "model"))
    return RoleModelSpec("", model, parallel=ParallelConfig(tp=tp), **settings)


def test_an_impossible_tp_size_is_rejected_by_the_key_of_its_role(
    one_layer_dir: Path,
) -> None:
    check_axes_of(spec_of(one_layer_dir, 2), 2)
    with pytest.raises(ConfigError, match=r"^critic.parallel.tp=3 does not divide .* \d+"):
        check_axes_of(spec_of(one_layer_dir, 3, section="critic.model", head="scalar"), 3)
    with pytest.raises(ConfigError, match=r"^parallel.tp=3 does not divide"):
        check_axes_of(spec_of(one_layer_dir, 3), 3)
