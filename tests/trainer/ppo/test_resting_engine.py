"""A rollout on shared GPUs sleeps from a step's samples to its next weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import FEW_ROWS, POLICY_ALONE, calls, numbers, overrides
from trainer import load_config, run
from trainer.config.devices import Devices
from trainer.ppo.memory import engine_sleeps


def test_a_sleeping_engine_changes_no_number(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (*POLICY_ALONE, *FEW_ROWS, "trainer.total_training_steps=2")
    settings += ("actor_rollout_ref.rollout.name=hf", "trainer.backend=local")
    awake, asleep = (tmp_path / name for name in ("awake", "asleep"))
    run(load_config(overrides(tiny_dir, awake, *settings)))
    monkeypatch.setattr("trainer.ppo.weight_sync.run_devices", lambda _: Devices("cuda", 1))
    run(load_config(overrides(tiny_dir, asleep, *settings)))
    assert numbers(asleep) == numbers(awake)
    assert len(calls(asleep, "sleep")) == 2
    assert not calls(awake, "sleep")


def test_engines_sleep_only_next_to_other_roles(tiny_dir: Path, tmp_path: Path) -> None:
    def rests(device_type: str, *more: str) -> bool:
        return engine_sleeps(load_config(overrides(tiny_dir, tmp_path, *more)), device_type)

    separate = (
        "resource_pool_spec={a: [1], b: [1]}",
        "role_mapping={actor: a, ref: a, critic: a, rollout: b}",
    )
    server = ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.server_urls=[x:1]")
    assert rests("cuda")
    assert not rests("cpu")
    assert not rests("cuda", *separate)
    assert not rests("cuda", *server)
