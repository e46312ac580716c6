"""The weight of the entropy bonus: its formula, and its way to the actor and into a checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.integration.runs import FEW_ROWS, POLICY_ALONE, lines, numbers, overrides
from tests.workers.samples import make_batch, started, tiny_config
from trainer import load_config, run
from trainer.ppo.update import EntropyController
from workers.config import ActorConfig
from workers.roles.actor import ActorWorker


def steered(first: float, target: float) -> EntropyController:
    actor = ActorConfig(entropy_coeff=first, target_entropy=target)
    return EntropyController(actor)


def test_the_logarithm_follows_the_distance_to_the_target() -> None:
    controller = steered(0.01, target=1.0)
    assert controller.update(0.8) == {"actor/entropy_coeff": 0.01}
    assert controller.value == pytest.approx(0.01 * math.exp(0.1 * 0.2))
    controller.update(1.4)
    assert controller.value == pytest.approx(0.01 * math.exp(0.1 * (0.2 - 0.4)))


@pytest.mark.parametrize(("entropy", "bound"), [(1e-3, 1.0), (9.0, 1e-4)])
def test_weight_changes_and_range_are_bounded(entropy: float, bound: float) -> None:
    controller = steered(0.01, target=5.0)
    controller.update(entropy)
    assert abs(math.log(controller.value / 0.01)) == pytest.approx(0.1)
    for _ in range(100):
        controller.update(entropy)
    assert controller.value == pytest.approx(bound)


@pytest.mark.parametrize("entropy", [0.0, math.nan])
def test_an_update_that_saw_no_tokens_moves_nothing(entropy: float) -> None:
    controller = steered(0.01, target=1.0)
    controller.update(entropy)
    assert controller.value == 0.01


def test_without_a_target_the_weight_stays_and_is_not_sent() -> None:
    controller = EntropyController(ActorConfig(entropy_coeff=0.01))
    assert controller.update(9.0) == controller.state_dict() == {}


def test_the_actor_takes_the_weight_that_comes_with_the_batch(tiny_dir: Path) -> None:
    norms = []
    for configured, sent in ((0.5, None), (0.1, 0.5), (0.1, None)):
        config = tiny_config(tiny_dir, ppo_mini_batch_size=4, entropy_coeff=configured)
        batch = make_batch(4)
        batch.meta_info = {} if sent is None else {"entropy_coeff": sent}
        norms.append(started(ActorWorker, config, 1).update_actor(batch)["actor/grad_norm"])
    assert norms[0] == norms[1] != norms[2]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum"])
def test_the_controller_sees_a_token_mean_in_any_mode(tiny_dir: Path, mode: str) -> None:
    config = tiny_config(
        tiny_dir, ppo_mini_batch_size=4, entropy_coeff=0.01, target_entropy=1.0, loss_agg_mode=mode
    )
    metrics = started(ActorWorker, config, 1).update_actor(make_batch(4))
    assert metrics["actor/token_entropy"] == pytest.approx(math.log(50), abs=0.05)


STEERED = (
    "trainer.backend=local",
    "placement=colocate",
    *(*POLICY_ALONE, *FEW_ROWS),
    "actor_rollout_ref.actor.entropy_coeff=0.01",
    "actor_rollout_ref.actor.target_entropy=1.0",
    "trainer.save_freq=2",
)


def test_the_weight_moves_and_survives_a_resume(tiny_dir: Path, tmp_path: Path) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    run(load_config(overrides(tiny_dir, whole, *STEERED)))
    for steps in (2, 3):
        length = f"trainer.total_training_steps={steps}"
        run(load_config(overrides(tiny_dir, parted, *STEERED, length)))

    weights = [line["actor/entropy_coeff"] for line in lines(whole)]
    assert weights[0] == 0.01 != weights[1] != weights[2]
    assert numbers(parted) == numbers(whole)
    saved = json.loads((whole / "global_step_2" / "trainer.json").read_text())
    assert saved["entropy_coeff"] == weights[2]
