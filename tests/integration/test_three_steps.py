"""Real PPO steps through every layer: which weights change, and which calls overlap.

Placement and backend do not change the numbers, which are those of the golden curve.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.integration import golden
from tests.integration.recording import RecordingTrainer, VerifiedTrainer
from tests.integration.runs import calls, lines, numbers
from tests.programs import VERL_LIKE
from trainer import PPOTrainer, load_config, run

NUM_STEPS = 5
SPLIT_2_2 = ("placement=split", "trainer.n_gpus_per_node=4")
COLOCATE_2 = ("placement=colocate", "trainer.n_gpus_per_node=2")
ONE_RANK_PER_ROLE = [
    (f"placement={preset}", f"trainer.n_gpus_per_node={num_pools}")
    for preset, num_pools in (("colocate", 1), ("split", 2), ("standalone", 4))
]

STEPS_BY_GRADIENTS = ("actor_rollout_ref.actor.optim.eps=1e-6", "critic.optim.eps=1e-6")
"""With an eps of 1e-8, AdamW moves a weight by a full step if its gradient is only rounding."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path, ray_session: None) -> Any:
    """A function from (backend, placement) to the folder of a run, which runs once."""

    @cache
    def folder_of(
        backend: str, placement: tuple[str, ...], trainer: type[PPOTrainer] = PPOTrainer
    ) -> Path:
        folder = tmp_path_factory.mktemp("run")
        settings = golden.settings(tiny_dir, folder, *placement, f"trainer.backend={backend}")
        run(load_config(settings), trainer)
        return folder

    return folder_of


@pytest.fixture(scope="module")
def split_run(runs: Any) -> tuple[Path, list[dict[str, set[str]]]]:
    folder = runs("ray", SPLIT_2_2, RecordingTrainer)
    return folder, RecordingTrainer.last.history


@pytest.mark.ray
def test_every_metric_is_finite(split_run: Any) -> None:
    metrics = lines(split_run[0])
    assert [line["step"] for line in metrics] == list(range(1, NUM_STEPS + 1))
    assert [k for line in metrics for k, v in line.items() if not math.isfinite(v)] == []
    assert {"actor/pg_loss", "critic/vf_loss", "actor/reward_kl_penalty"} <= metrics[0].keys()


@pytest.mark.ray
def test_actor_and_critic_move_and_the_reference_stays(split_run: Any) -> None:
    history = split_run[1]
    for role in ("actor", "critic"):
        assert len({frozenset(hashes[role]) for hashes in history}) == NUM_STEPS + 1, role
    assert len({frozenset(hashes["ref"]) for hashes in history}) == 1
    assert history[0]["ref"] == history[0]["actor"]


@pytest.mark.ray
def test_the_rollout_has_the_actors_weights_after_each_sync(split_run: Any) -> None:
    for hashes in split_run[1]:
        assert len(hashes["actor"]) == 1, "the ranks of the actor disagree"
        assert hashes["rollout"] == hashes["actor"]


def overlapping(calls: list[Any], others: list[Any]) -> list[Any]:
    """Return the calls that ran at the same time as one of the others."""
    return [call for call in calls if any(overlap(call, other) for other in others)]


def overlap(call: Any, other: Any) -> bool:
    ends = call["ts"] + call["dur"], other["ts"] + other["dur"]
    return max(call["ts"], other["ts"]) < min(ends)


@pytest.mark.ray
def test_actor_and_critic_update_at_the_same_time_in_different_processes(split_run: Any) -> None:
    actor, critic = calls(split_run[0], "update_actor"), calls(split_run[0], "update_critic")
    assert len(actor) == len(critic) == NUM_STEPS * 2
    assert {e["args"]["pid"] for e in actor}.isdisjoint(e["args"]["pid"] for e in critic)
    assert overlapping(critic, actor) == critic


@pytest.mark.ray
def test_log_probs_reference_and_values_on_different_pools_overlap(runs: Any) -> None:
    old, ref, values = (
        calls(runs("ray", ONE_RANK_PER_ROLE[-1]), f"compute_{name}")
        for name in ("log_prob", "ref_log_prob", "values")
    )
    assert overlapping(old, ref)
    assert overlapping(old, values)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("backend", "placement"), [("local", ONE_RANK_PER_ROLE[1]), ("ray", ONE_RANK_PER_ROLE[2])]
)
def test_other_placements_and_backends_give_the_golden_curve_bit_for_bit(
    runs: Any, backend: str, placement: tuple[str, ...]
) -> None:
    steps, one_pool = (
        numbers(runs(backend, placement)),
        numbers(runs("local", ONE_RANK_PER_ROLE[0])),
    )
    assert steps == one_pool
    expected = json.loads(golden.FILE.read_text(encoding="utf-8"))
    for step, (metrics, curve) in enumerate(zip(steps, expected, strict=True), 1):
        shared = {name: metrics[name] for name in curve}
        assert shared == pytest.approx(curve, rel=1e-4, abs=1e-6), f"step {step}"


@pytest.mark.ray
def test_two_ranks_per_role_give_the_same_bits_on_other_pools_of_another_backend(
    runs: Any, split_run: Any
) -> None:
    assert numbers(runs("local", COLOCATE_2)) == numbers(split_run[0])


@pytest.mark.long
@pytest.mark.ray
def test_another_number_of_ranks_agrees_to_rounding(runs: Any) -> None:
    one_rank, two_ranks = (
        numbers(runs("local", (*placement, *STEPS_BY_GRADIENTS)))
        for placement in (ONE_RANK_PER_ROLE[0], COLOCATE_2)
    )
    for one, two in zip(one_rank, two_ranks, strict=True):
        # global_seqlen is a rank's share of the tokens
        shared = [name for name in one if "global_seqlen" not in name]
        for name in shared:  # `rollout_corr` measures rounding itself
            assert one[name] == pytest.approx(
                two[name], rel=1e-6, abs=1e-5 if "rollout_corr" in name else 1e-6
            ), name


def test_a_role_is_added_by_a_class_and_two_overrides(tiny_dir: Path, tmp_path: Path) -> None:
    role = (
        "+role_workers.verifier=tests.integration.recording.LengthVerifier",
        "+role_mapping.verifier=global_pool",
    )
    more = (*role, "placement=colocate", "trainer.backend=local")
    run(load_config(golden.on_all_prompts(tiny_dir, tmp_path, *more)), VerifiedTrainer)
    with_role, without = lines(tmp_path)[0], json.loads(golden.FILE.read_text(encoding="utf-8"))[0]
    assert with_role["verifier/mean"] > 0
    assert with_role["critic/score/mean"] == pytest.approx(
        without["critic/score/mean"] + with_role["verifier/mean"]
    )
    assert calls(tmp_path, "verify")


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.parametrize(("backend", "num_processes"), [("ray", 1), ("local", 2)])
def test_the_console_command_imports_no_module_of_the_current_folder(
    tiny_dir: Path, tmp_path: Path, backend: str, num_processes: int
) -> None:
    """A folder with its own `trainer.py` and `workers/`, in the driver and in worker processes."""
    (tmp_path / "workers" / "roles").mkdir(parents=True)
    for name in ("trainer.py", "workers/__init__.py", "workers/roles/actor.py"):
        (tmp_path / name).write_text(
            "raise SystemExit('the namesake was imported')", encoding="utf-8"
        )
    settings = golden.on_all_prompts(
        tiny_dir,
        tmp_path / "run",
        "placement=colocate",
        f"trainer.n_gpus_per_node={num_processes}",
        f"trainer.backend={backend}",
        "trainer.total_training_steps=1",
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [VERL_LIKE, "ppo", *settings],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (metrics,) = numbers(tmp_path / "run")
    curve = json.loads(golden.FILE.read_text(encoding="utf-8"))[0]
    assert {name: metrics[name] for name in curve} == pytest.approx(curve, rel=1e-4, abs=1e-6)
