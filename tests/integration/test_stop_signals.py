"""A signal ends a run as docs/checkpoints.md says, also in parts that take several seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.integration.runs import FEW_ROWS, POLICY_ALONE, lines, overrides
from tests.integration.slow_steps import LOST_IN, SIGNALED_IN
from tests.waiting import wait_until
from trainer.run_folder.folder import saved_steps

MARK = "TEST_OF_STOP_SIGNALS"
"""Environment variable of all processes of a run."""
BEFORE_STEPS = ("prepare", "init")


def living(mark: str) -> list[int]:
    """Return the processes that have inherited this mark."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or belongs to another user
            continue
        if f"{MARK}={mark}".encode() in environment:
            pids.append(int(folder.name))
    return pids


def assert_stops(
    tiny: Path, folder: Path, backend: str, number: str, part: str, loss: str = "nothing"
) -> None:
    """Run until the signal in this part, and check what the run leaves."""
    settings = [
        *POLICY_ALONE, *FEW_ROWS, "trainer.total_training_steps=9", "placement=colocate",
        f"trainer.backend={backend}", f"trainer.n_gpus_per_node={2 if loss == 'worker' else 1}",
        "trainer.device=cpu",
    ]  # fmt: skip
    if loss != "nothing" or part == "checkpoint":
        settings.append("trainer.save_freq=1")
    if part == "validation":
        settings += [f"trainer.test_freq={SIGNALED_IN}", "trainer.val_before_train=false"]
        settings.append(f"data.val_files={tiny}/few.parquet")
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.slow_steps", part, loss, number,
         *overrides(tiny, folder, *settings)],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
        env=os.environ | {MARK: str(folder)}, start_new_session=True,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode == 128 + signal.Signals[number], output
    assert done.stdout.count("signal\n") == 1, output
    if part in BEFORE_STEPS:
        assert f"\nStopped by {number} at once" in done.stderr, output
    else:
        saved = folder / f"global_step_{SIGNALED_IN}"
        where = f"after step {SIGNALED_IN} of 9, saved in {saved}"
        assert f"\nStopped by {number} {where}; " in done.stderr, output
        assert SIGNALED_IN in saved_steps(folder)
        assert [line["step"] for line in lines(folder)] == [1, 2, 3]
        if part == "validation":
            assert any(name.startswith("val") for name in lines(folder)[-1])
    if loss != "nothing":
        assert [line["step"] for line in lines(folder, "restarts.jsonl")][:1] == [LOST_IN]
    if part != "prepare" or loss != "nothing":
        assert f"Stopped by {number}" in (folder / "report.html").read_text(encoding="utf-8")
    assert not (folder / "run.lock").exists() or not (folder / "run.lock").read_bytes()
    wait_until(lambda: not living(str(folder)))  # without its head, a cluster ends a bit later


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.parametrize("part", ["prepare", "step"])
def test_sigterm_in_a_part_that_outlasts_rays_handler_stops_a_run_on_ray(
    tiny_dir: Path, tmp_path: Path, part: str
) -> None:
    assert_stops(tiny_dir, tmp_path, "ray", "SIGTERM", part)


@pytest.mark.slow  # under pytest-xdist, the end of its cluster reaches pytest's processes, too
def test_sigterm_in_a_long_step_stops_a_run_that_has_lost_its_cluster(
    tiny_dir: Path, tmp_path: Path
) -> None:
    assert_stops(tiny_dir, tmp_path, "ray", "SIGTERM", "step", "head")


@pytest.mark.slow
@pytest.mark.parametrize("part", ["prepare", "init", "step", "validation", "checkpoint"])
@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize(
    ("backend", "loss"),
    [
        *(("ray", loss) for loss in ("nothing", "worker", "head")),
        *(("local", loss) for loss in ("nothing", "worker")),
    ],
)
def test_a_signal_in_any_part_stops_a_run(
    tiny_dir: Path, tmp_path: Path, backend: str, loss: str, number: str, part: str
) -> None:
    assert_stops(tiny_dir, tmp_path, backend, number, part, loss)
