"""Roles on separate pools work at the same time, without settings of backend or devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import calls, numbers
from trainer import GRPO, PPO, AsyncPPO

PROMPTS = [{"prompt": f"say {letter}", "letter": letter} for letter in "abcd"]
SMALL: dict[str, Any] = {"n": 2, "max_prompt_length": 16, "max_response_length": 8, "logger": []}


@pytest.mark.parametrize(
    ("cls", "keys", "backend"),
    [
        (PPO, {}, "local"),
        (PPO, {"placement": "split"}, "ray"),
        (PPO, {"placement": "split", "trainer.backend": "local"}, "local"),
        (AsyncPPO, {}, "local"),
    ],
)
def test_several_pools_of_one_run_are_on_ray(
    cls: Any, keys: dict[str, Any], backend: str, tiny_dir: Path, tmp_path: Path
) -> None:
    run = cls(tiny_dir / "model", PROMPTS, lambda response: 1.0, save_to=tmp_path, **SMALL, **keys)
    config = run.config()
    assert config.trainer.backend == backend
    assert f"trainer.backend={backend}" in run.command()
    assert config.trainer.n_gpus_per_node == len(config.resource_pool_spec)


@pytest.mark.parametrize(("devices", "backend"), [(1, "local"), (8, "ray")])
def test_several_gpus_use_ray(devices: int, backend: str, tiny_dir: Path, tmp_path: Path) -> None:
    keys = {**SMALL, "devices": devices, "engine": "native", "trainer.simulate": "8xH100"}
    run = GRPO(tiny_dir / "model", PROMPTS, lambda response: 1.0, save_to=tmp_path, **keys)
    assert run.config().trainer.backend == backend


@pytest.mark.ray
def test_split_runs_keep_their_numbers(ray_session: None, tiny_dir: Path, tmp_path: Path) -> None:
    share = 8

    def reward(response: str, letter: str) -> float:
        return response.count(letter) / share

    for placement in ("split", "colocate"):
        folder = tmp_path / placement
        PPO(tiny_dir / "model", PROMPTS, reward, placement=placement, save_to=folder, **SMALL).fit(
            2
        )
    assert numbers(tmp_path / "split") == numbers(tmp_path / "colocate")
    by_role = [calls(tmp_path / "split", f"update_{role}") for role in ("actor", "critic")]
    assert any(
        max(actor["ts"], critic["ts"]) < min(call["ts"] + call["dur"] for call in (actor, critic))
        for actor, critic in zip(*by_role, strict=True)
    )
