"""Other roles than actor and critic under tensor or pipeline parallelism equal one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.kept_ranks import run_kept
from tests.workers.roles import test_preference
from tests.workers.samples import beside, learned, make_batch, started, tiny_config, weights_of
from tests.workers.training import test_moving_average_engine
from verl_like.errors import ConfigError
from workers.config import ModelConfig, ParallelConfig
from workers.memory import RoleModelSpec
from workers.roles.actor import ActorWorker
from workers.roles.preference import PreferenceWorker
from workers.roles.reference import ReferenceWorker
from workers.training.row_proof import RowPasses


def cut_over_all(axis: str) -> ParallelConfig:
    """Split a model over all ranks of this world along the axis."""
    return ParallelConfig(**{axis: int(os.environ.get("WORLD_SIZE", "1"))})


AXES = ("tp", "pp")


def sides_apart(folder: Path) -> tuple[dict[str, float], torch.Tensor]:
    """Update on pairs with one pass per side; return log-probs after it."""
    config = test_preference.config_of(folder, "dpo", 2)
    config.parallel = cut_over_all("pp")
    worker, batch = started(PreferenceWorker, config, 10), test_preference.batch_of("dpo")
    worker.engine.row_passes = RowPasses("single")
    metrics = learned(worker.update_model(batch))
    return metrics, worker.compute_log_prob(batch).batch["response_log_probs"]


def test_stages_hand_on_the_states_of_each_side(tiny_dir: Path) -> None:
    metrics, log_probs = sides_apart(tiny_dir)
    for own, column in run_kept(2, sides_apart, tiny_dir):
        assert own == pytest.approx(metrics, rel=1e-4, abs=1e-5)
        torch.testing.assert_close(column, log_probs, atol=1e-4, rtol=0)


def followed(folder: Path, axis: str, checkpoint: Path) -> list[dict[str, torch.Tensor]]:
    """Return the policy's weights around two updates, then the reference's.

    Another reference takes over between the two.
    """
    config = test_moving_average_engine.config_of(folder)
    config.parallel = cut_over_all(axis)
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
def test_a_reference_that_follows_moves_its_part_of_every_weight(
    tiny_dir: Path, axis: str, tmp_path: Path
) -> None:
    for found in run_kept(2, followed, tiny_dir, axis, tmp_path):
        test_moving_average_engine.assert_average(found, test_moving_average_engine.DECAY)


def log_probs(folder: Path, axis: str, model: dict[str, Any]) -> list[torch.Tensor]:
    """Return the log-probs of an actor after an update, and of the reference that is its base."""
    config = tiny_config(folder, ppo_mini_batch_size=4, parallel=cut_over_all(axis))
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
def test_the_policy_s_base_and_its_casts_are_cut_as_it_is(
    tiny_dir: Path, axis: str, model: dict[str, Any], error: float
) -> None:
    alone = log_probs(tiny_dir, axis, model)
    for found in run_kept(2, log_probs, tiny_dir, axis, model):
        for own, expected in zip(found, alone, strict=True):
            torch.testing.assert_close(own, expected, atol=error, rtol=0)


def held(folder: Path, tp: int, **settings: Any) -> RoleModelSpec:
    model = ModelConfig(path=str(folder / "model"))
    return RoleModelSpec("", model, parallel=ParallelConfig(tp=tp), **settings)


def test_a_model_is_refused_by_the_key_of_its_role_before_it_has_weights(
    one_layer_dir: Path,
) -> None:
    held(one_layer_dir, 2).check_axes(2)
    with pytest.raises(ConfigError, match=r"^critic.parallel.tp=3 does not divide .* \d+"):
        held(one_layer_dir, 3, section="critic.model", head="scalar").check_axes(3)
    with pytest.raises(ConfigError, match=r"^parallel.tp=3 does not divide"):
        held(one_layer_dir, 3).check_axes(3)
