"""A run that loses workers and weights, and has slow calls, ends with undisturbed numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.runs import POLICY_ALONE, lines, numbers, overrides
from tests.trainer.disturbances import LOSSY, Disturb
from tests.trainer.process_backends import start_processes
from trainer import load_config, recovery, run
from trainer.async_training.recipe import ASYNC

STEPS, PROMPTS = 10, 2
OF_ASYNC_RUNS = "async/"
"""Prefix of metrics that PPO does not have."""


OWN_PROCESS = (LOSSY, "placement=standalone", "trainer.n_gpus_per_node=2")
DISTURBANCES = {
    **{2: ("delay", "rollout"), 3: ("lose", "actor"), 4: ("delay", "actor")},
    **{6: ("lose", "actor"), 8: ("kill", "actor")},
}
SHARED = (
    *("trainer.device=cpu", f"data.train_batch_size={PROMPTS}", "data.max_response_length=2"),
    *(f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}", *POLICY_ALONE),
    f"trainer.total_training_steps={STEPS}",
)
LOCAL = (*SHARED, "trainer.backend=local")


@pytest.fixture(scope="module", autouse=True)
def restarts_at_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recovery, "FIRST_WAIT_S", 0.01)
        yield


@pytest.fixture(scope="module")
def whole(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run in one process."""
    folder = tmp_path_factory.mktemp("whole")
    run(load_config(overrides(tiny_dir, folder, *LOCAL)))
    return folder


@pytest.mark.long
def test_a_disturbed_ppo_run_repeats_steps_but_changes_no_numbers(
    tiny_dir: Path,
    tmp_path: Path,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    start_processes("local", monkeypatch, request)
    disturb = Disturb(DISTURBANCES)
    settings = (*LOCAL, *OWN_PROCESS, "trainer.save_freq=5")
    run(load_config(overrides(tiny_dir, tmp_path, *settings)), callbacks=[disturb])
    assert not disturb.left
    assert numbers(tmp_path) == numbers(whole)
    restarted = [line for line in lines(tmp_path, "restarts.jsonl") if "lost" in line]
    assert [line["step"] for line in restarted] == [8], "weights that are lost are sent again"


def test_a_disturbed_async_run_drops_samples_but_no_numbers_or_steps(
    tiny_dir: Path, tmp_path: Path, whole: Path
) -> None:
    async_training = (
        LOSSY,
        "async_training.max_staleness=0",
        "async_training.on_generator_failure=restart",
    )
    disturb = Disturb({**DISTURBANCES, 8: ("kill", "rollout")})
    settings = overrides(tiny_dir, tmp_path, *LOCAL, *async_training)
    run(load_config(settings, ASYNC), callbacks=[disturb])
    assert not disturb.left
    for disturbed, undisturbed in zip(numbers(tmp_path), numbers(whole), strict=True):
        shared = {name: n for name, n in disturbed.items() if not name.startswith(OF_ASYNC_RUNS)}
        assert shared == {name: undisturbed[name] for name in shared}
    ledger = json.loads((tmp_path / "async.json").read_text())["ledger"]
    (generator,) = ledger["generators"].values()
    assert generator["trained"] == STEPS * PROMPTS * 2
    assert generator["made"] == generator["trained"] + sum(generator["dropped"].values())


@pytest.mark.long
@pytest.mark.ray
def test_a_disturbed_run_on_ray_changes_no_numbers(
    tiny_dir: Path, tmp_path: Path, whole: Path, ray_session: None
) -> None:
    disturb = Disturb(DISTURBANCES)
    settings = (*SHARED, *OWN_PROCESS, "trainer.save_freq=6", "trainer.backend=ray")
    run(load_config(overrides(tiny_dir, tmp_path, *settings)), callbacks=[disturb])
    assert not disturb.left
    assert numbers(tmp_path) == numbers(whole)
