"""The metrics of a step, on disk with all digits, on the console, and in other trackers."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import struct
import sys
import termios
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from trainer import load_config
from trainer.ppo.config import DataConfig, PPOConfig, PPOTrainerConfig
from trainer.ppo.stages import PPOTrainer
from trainer.run_folder.tracking import Console, Tracking, make_tracking
from verl_like.errors import ConfigError
from verl_like.registry import load_object

STEP = {
    "critic/score/mean": 0.5,
    "actor/ppo_kl": 0.01,
    "perf/total_num_tokens": 300.0,
    "perf/time_per_step": 2.0,
    "actor/entropy": 1.25,
    "actor/pg_loss": -0.02,
    "response_length/mean": 7.5,
}
REST = "entropy 1.25  length 7.5  loss -0.02  150 tokens/s"


def config(folder: Path, *logger: str) -> PPOConfig:
    settings = {"project_name": "letters", "experiment_name": "first"}
    return PPOConfig(
        data=DataConfig(),
        trainer=PPOTrainerConfig(default_local_dir=str(folder), logger=list(logger), **settings),
    )


def test_a_line_is_written_at_once_with_all_digits(tmp_path: Path) -> None:
    with make_tracking(config(tmp_path / "new"), total_steps=2) as tracking:
        for step, value in enumerate((0.1 + 0.2, np.float32(1 / 3)), 1):
            tracking.log({"loss": value}, step)
            lines = (tmp_path / "new" / "metrics.jsonl").read_text().splitlines()
            assert json.loads(lines[-1]) == {"step": step, "loss": float(value)}
        assert len(lines) == 2


def test_a_console_without_terminal_gets_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with make_tracking(config(tmp_path, "console"), 2, PPOTrainer.headline) as tracking:
        tracking.log(STEP, 1)
        tracking.log({**STEP, "actor/kl_loss": 0.3, "val-core/s/reward/mean@1": 0.25}, 2)
    assert capsys.readouterr().out.splitlines() == [
        f"step 1/2  reward 0.5  KL(old) 0.01  {REST}",
        f"step 2/2  reward 0.5  KL 0.3  {REST}",
        "    val-core/s/reward/mean@1 0.25",
    ]


def test_kl_means_the_same_in_every_line_of_a_run() -> None:
    same_weights = {**STEP, "actor/kl_loss": 0.0}  # the first step: the policy is the reference
    assert not any("KL" in number for number in PPOTrainer.headline(same_weights))
    assert "KL 0.3" in PPOTrainer.headline({**STEP, "actor/kl_loss": 0.3})


@pytest.mark.parametrize("columns", [40, 100])
def test_the_bar_has_the_width_of_the_terminal(columns: int) -> None:
    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with open(writer, "w", encoding="utf-8") as terminal:
        console = Console(8, PPOTrainer.headline, terminal)
        console.write({"val-core/s/reward/mean@1": 0.125}, 0)  # the validation before the steps
        console.write(STEP, 3)
        console.write({**STEP, "val-core/s/reward/mean@1": 0.25}, 4)
        console.close()
        output = b""
        while b"4/8" not in output or not output.endswith(b"\n"):  # it arrives in pieces
            output += os.read(reader, 10_000)
    os.close(reader)
    shown = output.decode()
    assert "step 0  val-core/s/reward/mean@1 0.125" in shown
    assert "step 4  val-core/s/reward/mean@1 0.25" in shown
    assert "0/8" in shown
    assert "-1/8" not in shown
    (bar,) = [part for part in re.split(r"[\r\n]", shown) if part.startswith("4/8")]
    assert len(bar.rstrip()) <= columns
    assert ("reward 0.5" if columns == 40 else f"reward 0.5  KL(old) 0.01  {REST}"[:60]) in bar


def test_a_notebook_gets_a_bar_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    with make_tracking(config(tmp_path, "console"), 2, PPOTrainer.headline) as tracking:
        tracking.log(STEP, 1)
        tracking.log(STEP, 2)
    output = capsys.readouterr()
    assert output.out == ""
    assert "2/2 |" in output.err
    assert "reward 0.5" in output.err


def test_a_log_has_the_first_and_last_step_and_validations() -> None:
    log = io.StringIO()
    console = Console(8, PPOTrainer.headline, log)
    console.write({"val-core/s/reward/mean@1": 0.125}, 0)
    for step in range(1, 9):
        console.write(STEP, step)
    console.close()
    steps = re.findall(r"^step (\d)/8", log.getvalue(), re.MULTILINE)
    assert steps == ["0", "1", "8"]


def test_the_last_step_of_a_run_that_ends_early_has_a_line_without_time_left() -> None:
    log = io.StringIO()
    console = Console(8, PPOTrainer.headline, log)
    tracking = Tracking([console], Path(), 8)
    for step in range(1, 6):
        tracking.log(STEP, step, is_last=step == 5)
    *_, last = log.getvalue().splitlines()
    assert last.startswith("step 5/8")
    assert "left" not in last


class RecordingTracker:
    """A user's own tracker."""

    events: ClassVar[list[object]] = []

    def __init__(self, config: PPOConfig, total_steps: int) -> None:
        self.events.append(total_steps)

    def write(self, metrics: dict[str, float], step: int) -> None:
        self.events.append((step, metrics))

    def close(self) -> None:
        self.events.append("closed")


def test_a_users_tracker_is_found_by_its_dotted_path(tmp_path: Path) -> None:
    name = "tests.trainer.run_folder.test_tracking.RecordingTracker"
    needed = ["data.train_files=x", "actor_rollout_ref.model.path=y"]
    folder = f"trainer.default_local_dir={tmp_path}"
    tracker = load_object(name, "here")
    with make_tracking(load_config([*needed, folder, f"trainer.logger={name}"]), 2) as tracking:
        tracking.log({"loss": 0.5}, 1)
    assert tracker.events == [2, (1, {"loss": 0.5}), "closed"]


def test_wandb_runs_are_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []

    def init(**settings: Any) -> Any:
        seed = settings["config"]["trainer"]["seed"]
        events.append((settings["project"], settings["name"], seed))
        events.append((settings["id"], settings["resume"]))
        return SimpleNamespace(
            id=settings["id"] or "new",
            log=lambda metrics, step: events.append((metrics, step)),
            finish=lambda: events.append("finished"),
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for step in (1, 2):
        with make_tracking(config(tmp_path, "wandb"), total_steps=2) as tracking:
            tracking.log({"loss": 1}, step)
    run = ("letters", "first", 1)
    first = [run, (None, "allow"), ({"loss": 1.0}, 1), "finished"]
    assert events == [*first, run, ("new", "allow"), ({"loss": 1.0}, 2), "finished"]


def test_trackio_runs_are_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    def init(**settings: Any) -> Any:
        opened.append((settings["project"], settings["name"], settings["resume"]))
        return SimpleNamespace(finish=lambda: None)

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))
    for folder in ("one", "one", "two"):
        with make_tracking(config(tmp_path / folder, "trackio"), total_steps=2):
            pass
    projects, names, resumes = zip(*opened, strict=True)
    assert set(projects) == {"letters"}
    assert names[0] == names[1] != names[2]
    assert names[0].startswith("first-")
    assert resumes == ("never", "allow", "never")


def test_a_tracker_that_is_not_installed_gets_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with make_tracking(config(tmp_path, "wandb", "wandb"), total_steps=1) as tracking:
        tracking.log({"loss": 1}, 1)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    (record,) = caplog.records
    assert "pip install 'verl-like[wandb]'" in record.getMessage()


def test_a_missing_login_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class UsageError(Exception):
        pass

    def init(**settings: Any) -> Any:
        raise UsageError("api_key not configured")

    wandb = SimpleNamespace(init=init, errors=SimpleNamespace(Error=UsageError))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with (
        pytest.raises(ConfigError, match="api_key not configured. Log in with `wandb login`"),
        make_tracking(config(tmp_path, "wandb"), total_steps=1),
    ):
        pass


def test_fast_steps_print_one_line_per_second(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("trainer.run_folder.tracking.time.monotonic", lambda: now)
    with make_tracking(config(tmp_path, "console"), 50, PPOTrainer.headline) as tracking:
        for step in range(1, 13):
            score = {"val-core/s/reward/mean@1": 0.25} if step == 3 else {}
            tracking.log({**STEP, **score}, step)
            now += 0.25
    lines = capsys.readouterr().out.splitlines()
    steps = [line.split("/")[0] for line in lines if line.startswith("step")]
    assert steps == ["step 1", "step 3", "step 7", "step 11", "step 12"], "and the last step"
