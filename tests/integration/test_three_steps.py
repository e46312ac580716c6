"""Three real PPO steps through every layer: what moves, what stays, what overlaps.

Placement and backend do not change the numbers.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.recording import RecordingTrainer, VerifiedTrainer
from tests.integration.runs import calls, lines, numbers, overrides
from trainer import PPOTrainer, load_config, run

COMMAND = Path(sys.executable).parent / "verl-like"
SPLIT_2_1 = ("placement=split", "trainer.n_gpus_per_node=3")
SPLIT_2_2 = ("placement=split", "trainer.n_gpus_per_node=4")
COLOCATE_2 = ("placement=colocate", "trainer.n_gpus_per_node=2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path, ray_session: None) -> Any:
    """Run folders by (backend, placement), each made once."""
    made: dict[tuple[str, tuple[str, ...]], Path] = {}

    def folder_of(backend: str, placement: tuple[str, ...], trainer: type[PPOTrainer] = PPOTrainer) -> Path:
        key = backend, placement
        if key not in made:
            made[key] = tmp_path_factory.mktemp("run")
            settings = overrides(tiny_dir, made[key], *placement, f"trainer.backend={backend}")
            run(load_config(settings), trainer)
        return made[key]

    return folder_of


@pytest.fixture(scope="module")
def split_run(runs: Any) -> tuple[Path, list[dict[str, set[str]]]]:
    folder = runs("ray", SPLIT_2_1, RecordingTrainer)
    return folder, RecordingTrainer.last.history


@pytest.mark.ray
def test_every_metric_is_finite(split_run: Any) -> None:
    metrics = lines(split_run[0])
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert [k for line in metrics for k, v in line.items() if not math.isfinite(v)] == []
    assert {"actor/pg_loss", "critic/vf_loss", "actor/reward_kl_penalty"} <= metrics[0].keys()


@pytest.mark.ray
def test_actor_and_critic_move_and_the_reference_stays(split_run: Any) -> None:
    history = split_run[1]
    for role in ("actor", "critic"):
        assert len({frozenset(hashes[role]) for hashes in history}) == 4, role
    assert len({frozenset(hashes["ref"]) for hashes in history}) == 1
    assert history[0]["ref"] == history[0]["actor"]


@pytest.mark.ray
def test_the_rollout_has_the_actors_weights_after_each_sync(split_run: Any) -> None:
    for hashes in split_run[1]:
        assert len(hashes["actor"]) == 1, "the ranks of the actor disagree"
        assert hashes["rollout"] == hashes["actor"]


@pytest.mark.ray
def test_actor_and_critic_update_at_the_same_time_in_different_processes(split_run: Any) -> None:
    actor, critic = calls(split_run[0], "update_actor"), calls(split_run[0], "update_critic")
    assert len(actor) == 3 * 2
    assert len(critic) == 3
    assert {e["args"]["pid"] for e in actor}.isdisjoint(e["args"]["pid"] for e in critic)
    overlapping = [
        (a, c) for a in actor for c in critic if max(a["ts"], c["ts"]) < min(a["ts"] + a["dur"], c["ts"] + c["dur"])
    ]
    assert {c["ts"] for _, c in overlapping} == {c["ts"] for c in critic}


@pytest.mark.ray
def test_colocated_and_split_runs_with_equal_ranks_agree_bit_for_bit(runs: Any) -> None:
    assert numbers(runs("ray", COLOCATE_2)) == numbers(runs("ray", SPLIT_2_2))


@pytest.mark.ray
def test_local_and_ray_agree_bit_for_bit(runs: Any, split_run: Any) -> None:
    assert numbers(runs("local", SPLIT_2_1)) == numbers(split_run[0])
    assert numbers(runs("local", COLOCATE_2)) == numbers(runs("ray", COLOCATE_2))


@pytest.mark.ray
def test_other_rank_counts_agree_to_rounding(runs: Any, split_run: Any) -> None:
    alone = runs("local", ("placement=colocate", "trainer.n_gpus_per_node=1"))
    for one, other in zip(numbers(alone), numbers(split_run[0]), strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("placement", [COLOCATE_2, ("placement=standalone", "trainer.n_gpus_per_node=4")])
def test_local_placements_run(tiny_dir: Path, tmp_path: Path, placement: tuple[str, ...]) -> None:
    run(
        load_config(
            overrides(tiny_dir, tmp_path, *placement, "trainer.backend=local", "trainer.total_training_steps=1")
        )
    )
    assert len(lines(tmp_path)) == 1


def test_a_role_is_added_by_one_class_one_entry_and_one_override(tiny_dir: Path, tmp_path: Path) -> None:
    role = ("+role_workers.verifier=tests.integration.recording.LengthVerifier", "+role_mapping.verifier=global_pool")
    settings = overrides(tiny_dir, tmp_path, *role, "placement=colocate", "trainer.backend=local")
    run(load_config(settings), VerifiedTrainer)
    plain = tmp_path / "plain"
    run(load_config(overrides(tiny_dir, plain, "placement=colocate", "trainer.backend=local")))
    with_role, without = lines(tmp_path)[0], lines(plain)[0]
    assert with_role["verifier/mean"] > 0
    assert with_role["critic/score/mean"] == pytest.approx(without["critic/score/mean"] + with_role["verifier/mean"])
    assert calls(tmp_path, "verify")


@pytest.mark.ray
@pytest.mark.parametrize("backend", ["ray", "local"])
def test_the_console_command_is_not_misled_by_namesakes(tiny_dir: Path, tmp_path: Path, backend: str) -> None:
    """A folder with its own `trainer.py` and `workers/`, on the driver and inside the worker processes."""
    (tmp_path / "workers").mkdir()
    for name in ("trainer.py", "workers/__init__.py", "workers/actor.py"):
        (tmp_path / name).write_text("raise SystemExit('the namesake was imported')", encoding="utf-8")
    settings = overrides(
        tiny_dir, tmp_path / "run", *SPLIT_2_1, f"trainer.backend={backend}", "trainer.total_training_steps=1"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [COMMAND, "ppo", *settings],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "critic_pool" in done.stdout
    assert len(lines(tmp_path / "run")) == 1
