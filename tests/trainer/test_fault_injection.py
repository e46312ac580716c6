"""A run with faults drawn from a seed ends with the numbers of an undisturbed run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.runs import POLICY_ALONE, lines, numbers, overrides
from tests.trainer.process_backends import start_processes
from trainer import load_config, restarts, run
from trainer.async_training.recipe import ASYNC
from trainer.observers.fault_injection import FaultInjection
from trainer.report.accounts import describe_faults
from trainer.sft.recipe import SFT
from verl_like.errors import ConfigError, SampleLogError

STEPS, PROMPTS = 10, 2
OF_ASYNC_RUNS = "async/"
"""Prefix of metrics that PPO does not have."""


OWN_PROCESS = ("placement=standalone", "trainer.n_gpus_per_node=2")
FAULTS = (
    *("faults.kill_worker=0.05", "faults.drop_weight_bucket=0.1", "faults.delay_call=0.1"),
    "faults.delay_s=0.02",
)
SHARED = (
    *("trainer.device=cpu", f"data.train_batch_size={PROMPTS}", "data.max_response_length=2"),
    *(f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}", *POLICY_ALONE),
    f"trainer.total_training_steps={STEPS}",
)
LOCAL = (*SHARED, "trainer.backend=local")


@pytest.fixture(scope="module", autouse=True)
def restarts_at_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restarts, "FIRST_WAIT_S", 0.01)
        yield


@pytest.fixture(scope="module")
def whole(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run in one process."""
    folder = tmp_path_factory.mktemp("whole")
    run(load_config(overrides(tiny_dir, folder, *LOCAL)))
    return folder


def faults(folder: Path) -> list[dict[str, Any]]:
    return lines(folder, "faults.jsonl")


def check_numbers(folder: Path, whole: Path) -> None:
    """Check that every kind of fault happened and changed no number."""
    kinds = {line["kind"] for line in faults(folder)}
    assert kinds == {"kill_worker", "drop_weight_bucket", "delay_call", "ledger"}
    for disturbed, undisturbed in zip(numbers(folder), numbers(whole), strict=True):
        shared = {name: n for name, n in disturbed.items() if not name.startswith(OF_ASYNC_RUNS)}
        assert shared == {name: undisturbed[name] for name in shared}


def test_faults_of_ppo_runs_repeat_steps_but_change_no_numbers(
    tiny_dir: Path,
    tmp_path: Path,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    start_processes("local", monkeypatch, request)
    more = (*LOCAL, *FAULTS, *OWN_PROCESS, "trainer.save_freq=5", "faults.seed=2582")
    run(load_config(overrides(tiny_dir, tmp_path, *more)))
    check_numbers(tmp_path, whole)
    *_, ledger = faults(tmp_path)
    assert ledger == {
        **{"kind": "ledger", "started": STEPS + 3, "completed": STEPS},
        **{"repeated": 3, "unfinished": 0},
        "samples": {
            **{"made": (STEPS + 3) * PROMPTS * 2, "trained": STEPS * PROMPTS * 2},
            "dropped": {"step repeated": 3 * PROMPTS * 2},
        },
    }, "the actor was lost three steps after a checkpoint"
    (line,) = describe_faults(tmp_path)
    assert "2 x drop_weight_bucket, 2 x delay_call, 1 x kill_worker; steps: " in line
    assert f"steps: {STEPS + 3} started = {STEPS} completed + 3 repeated" in line
    assert "; samples: 52 generated = 40 trained + 12 dropped (step repeated: 12)" in line


def test_faults_of_async_runs_cost_samples_but_no_numbers_or_steps(
    tiny_dir: Path, tmp_path: Path, whole: Path
) -> None:
    async_training = (
        "async_training.max_staleness=0",
        "async_training.on_generator_failure=restart",
        "faults.seed=2582",
    )
    run(load_config(overrides(tiny_dir, tmp_path, *LOCAL, *FAULTS, *async_training), ASYNC))
    check_numbers(tmp_path, whole)
    *_, steps = faults(tmp_path)
    assert (steps["started"], steps["repeated"]) == (STEPS, 0)
    ledger = json.loads((tmp_path / "async.json").read_text())["ledger"]
    (generator,) = ledger["generators"].values()
    assert generator["trained"] == STEPS * PROMPTS * 2
    assert generator["made"] == generator["trained"] + sum(generator["dropped"].values())


@pytest.mark.ray
def test_faults_on_ray_change_no_numbers(
    tiny_dir: Path, tmp_path: Path, whole: Path, ray_session: None
) -> None:
    more = (*SHARED, *FAULTS, *OWN_PROCESS, "trainer.save_freq=6", "faults.seed=2559")
    run(load_config(overrides(tiny_dir, tmp_path, *more, "trainer.backend=ray")))
    kinds = Counter(line["kind"] for line in faults(tmp_path))
    assert kinds == {"kill_worker": 1, "drop_weight_bucket": 2, "delay_call": 2, "ledger": 1}
    assert numbers(tmp_path) == numbers(whole)


def small(folder: Path, *more: str) -> Any:
    files = ("model.path=none", "data.train_files=none")
    where = ("trainer.backend=local", "trainer.device=cpu", f"trainer.default_local_dir={folder}")
    return load_config([*files, *where, *more], SFT)


class Recorder:
    """Stand-in for a run's groups that records the calls on the role `actor`."""

    def __init__(self) -> None:
        self.delayed: list[float] = []

    def __iter__(self) -> Iterator[str]:
        return iter(["actor"])

    def __getitem__(self, role: str) -> Any:
        remote = SimpleNamespace(remote=lambda call, seconds: self.delayed.append(seconds))
        return SimpleNamespace(execute_func_rank_zero=remote)


class Spread(Recorder):
    """Groups with processes on several machines, except those of the role `actor`."""

    def __init__(self) -> None:
        super().__init__()
        self.killed: list[tuple[str, int]] = []

    def __iter__(self) -> Iterator[str]:
        return iter(["actor", "critic", "rollout"])

    def __getitem__(self, role: str) -> Any:
        transport = SimpleNamespace(
            process_key=hash(role),
            world_size=2,
            can_kill=role != "actor",
            place=lambda rank: f"pid 1 on node {rank}",
            kill=lambda rank: self.killed.append((role, rank)),
        )
        return SimpleNamespace(transport=transport)


def at(step: int, groups: Any = None) -> SimpleNamespace:
    """Return a trainer at this step."""
    return SimpleNamespace(groups=groups, global_step=step)


def test_processes_of_all_machines_except_the_driver_are_killed(tmp_path: Path) -> None:
    injection = FaultInjection(small(tmp_path, "faults.kill_worker=1", "trainer.backend=ray"))
    groups = Spread()
    injection.on_init_end(at(0))
    for step in range(1, 41):
        injection.on_step_begin(at(step, groups))
    assert set(groups.killed) == {("critic", 0), ("critic", 1), ("rollout", 0), ("rollout", 1)}
    assert {line["place"] for line in faults(tmp_path)} == {"pid 1 on node 0", "pid 1 on node 1"}


def test_a_repeated_step_does_not_repeat_its_faults(tmp_path: Path) -> None:
    injection = FaultInjection(small(tmp_path, "faults.delay_call=1", "faults.delay_s=2"))
    groups = Recorder()
    injection.on_init_end(at(0))
    for step in (1, 2, 3):
        injection.on_step_begin(at(step, groups))
    injection.on_init_end(at(1))
    for step in (2, 3, 4):
        injection.on_step_begin(at(step, groups))
    assert groups.delayed == [2.0] * 4
    assert [line["step"] for line in faults(tmp_path)] == [1, 2, 3, 4]


def test_only_the_seed_decides_which_steps_have_a_fault(tmp_path: Path) -> None:
    def steps_with_faults(seed: int, first: int) -> list[int]:
        injection = FaultInjection(small(tmp_path, "faults.delay_call=0.3", f"faults.seed={seed}"))
        injection.on_init_end(at(0))
        for step in range(first, 40):
            injection.on_step_begin(at(step, Recorder()))
        return [line["step"] for line in faults(tmp_path)]

    steps = steps_with_faults(1, 1)
    assert steps_with_faults(1, 20) == [step for step in steps if step >= 20]
    assert steps != steps_with_faults(2, 1)


@pytest.mark.parametrize(
    ("written", "problem"),
    [([1, 2], "3 were started"), ([1, 3], r"has steps \[1, 3\]"), ([1, 2, 2, 3], "1, 2, 2, 3")],
)
def test_lost_or_doubled_steps_are_errors(tmp_path: Path, written: list[int], problem: str) -> None:
    injection = FaultInjection(small(tmp_path, "faults.delay_call=1"))
    injection.on_init_end(at(0))
    for step in (1, 2, 2):
        injection.on_step_begin(at(step, Recorder()))
    lines = "".join(f'{{"step": {step}}}\n' for step in written)
    (tmp_path / "metrics.jsonl").write_text(lines)
    with pytest.raises(SampleLogError, match=problem):
        injection.at_end()


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("faults.delay_call=1.5", "faults.delay_call=1.5: it must be from 0 to 1"),
        ("faults.kill_worker=0.1", "no worker of this run has its own process"),
        ("faults.drop_weight_bucket=0.1", "there is no key 'faults.drop_weight_bucket'"),
    ],
)
def test_impossible_faults_are_rejected(tmp_path: Path, setting: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        small(tmp_path, setting)


def test_dropped_buckets_need_a_rollout_with_its_own_processes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="placement=standalone, or `verl-like async`"):
        load_config(overrides(tmp_path, tmp_path, "faults.drop_weight_bucket=0.1"))
