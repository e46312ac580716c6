"""The entropy coefficient: its formula, how it reaches the actor, and its checkpoint."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from tests.integration.runs import FEW_ROWS, POLICY_ALONE, numbers, overrides
from tests.workers.samples import make_batch, started, tiny_config
from trainer import load_config, run
from trainer.ppo.updating import EntropyController
from workers.config import ActorConfig
from workers.roles.actor import ActorWorker


def controller_of(target: float) -> EntropyController:
    return EntropyController(ActorConfig(entropy_coeff=0.01, target_entropy=target))


def test_the_logarithm_follows_the_distance_to_the_target() -> None:
    controller = controller_of(target=1.0)
    assert controller.update(0.8) == {"actor/entropy_coeff": 0.01}
    assert controller.value == pytest.approx(0.01 * math.exp(0.1 * 0.2))
    controller.update(1.4)
    assert controller.value == pytest.approx(0.01 * math.exp(0.1 * (0.2 - 0.4)))


@pytest.mark.parametrize(("entropy", "bound"), [(1e-3, 1.0), (9.0, 1e-4)])
def test_coefficient_and_its_changes_are_bounded(entropy: float, bound: float) -> None:
    controller = controller_of(target=5.0)
    controller.update(entropy)
    assert abs(math.log(controller.value / 0.01)) == pytest.approx(0.1)
    for _ in range(100):
        controller.update(entropy)
    assert controller.value == pytest.approx(bound)


@pytest.mark.parametrize("entropy", [0.0, math.nan])
def test_an_update_without_tokens_changes_nothing(entropy: float) -> None:
    controller = controller_of(target=1.0)
    controller.update(entropy)
    assert controller.value == 0.01


def test_without_a_target_the_coefficient_stays_and_is_not_sent() -> None:
    controller = EntropyController(ActorConfig(entropy_coeff=0.01))
    assert controller.update(9.0) == controller.state_dict() == {}


def test_the_actor_uses_the_coefficient_sent_with_the_batch(tiny_dir: Path) -> None:
    norms = []
    for configured, sent in ((0.5, None), (0.1, 0.5), (0.1, None)):
        config = tiny_config(tiny_dir, ppo_mini_batch_size=4, entropy_coeff=configured)
        batch = make_batch(4)
        batch.meta_info = {} if sent is None else {"entropy_coeff": sent}
        norms.append(started(ActorWorker, config, 1).update_actor(batch)["actor/grad_norm"])
    assert norms[0] == norms[1] != norms[2]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum"])
def test_the_token_entropy_is_a_token_mean_in_every_mode(tiny_dir: Path, mode: str) -> None:
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
    "trainer.save_freq=1",
    "trainer.total_training_steps=2",
)


def test_the_coefficient_changes_and_is_resumed(tiny_dir: Path, tmp_path: Path) -> None:
    run(load_config(overrides(tiny_dir, tmp_path, *STEERED)))
    whole = numbers(tmp_path)
    first, second = (line["actor/entropy_coeff"] for line in whole)
    assert first == 0.01 != second
    saved = json.loads((tmp_path / "global_step_1" / "trainer.json").read_text())
    assert saved["entropy_coeff"] == second

    shutil.rmtree(tmp_path / "global_step_2")
    run(load_config(overrides(tiny_dir, tmp_path, *STEERED)))
    assert numbers(tmp_path) == whole
