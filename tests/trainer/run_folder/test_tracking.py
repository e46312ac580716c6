"""A step's numbers are on disk when `log` returns, with all digits, and in other trackers."""

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
from trainer.run_folder.tracking import Console, make_tracking
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


def test_a_line_is_on_disk_at_once_with_every_digit(tmp_path: Path) -> None:
    with make_tracking(config(tmp_path / "new"), total_steps=2) as tracking:
        for step, value in enumerate((0.1 + 0.2, np.float32(1 / 3)), 1):
            tracking.log({"loss": value}, step)
            lines = (tmp_path / "new" / "metrics.jsonl").read_text().splitlines()
            assert json.loads(lines[-1]) == {"step": step, "loss": float(value)}
        assert len(lines) == 2


def test_no_terminal_gets_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with make_tracking(config(tmp_path, "console"), 2, PPOTrainer.headline) as tracking:
        tracking.log(STEP, 1)
        tracking.log({**STEP, "actor/kl_loss": 0.3, "val-core/s/reward/mean@1": 0.25}, 2)
    assert capsys.readouterr().out.splitlines() == [
        f"step 1/2  reward 0.5  KL 0.01  {REST}",
        f"step 2/2  reward 0.5  KL 0.3  {REST}  0:00:00 left",
        "    val-core/s/reward/mean@1 0.25",
    ]


@pytest.mark.parametrize("columns", [40, 100])
def test_a_terminal_gets_a_bar_of_its_width(columns: int) -> None:
    ours, its = os.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with open(its, "w", encoding="utf-8") as terminal:
        console = Console(8, PPOTrainer.headline, terminal)
        console.write({"val-core/s/reward/mean@1": 0.125}, 0)  # the validation before the steps
        console.write(STEP, 3)
        console.write({**STEP, "val-core/s/reward/mean@1": 0.25}, 4)
        console.close()
        said = b""
        while b"4/8" not in said or not said.endswith(
            b"\n"
        ):  # a terminal hands on what it got piece by piece
            said += os.read(ours, 10_000)
    os.close(ours)
    shown = said.decode()
    assert "step 0  val-core/s/reward/mean@1 0.125" in shown
    assert "step 4  val-core/s/reward/mean@1 0.25" in shown
    assert "0/8" in shown
    assert "-1/8" not in shown
    (bar,) = [part for part in re.split(r"[\r\n]", shown) if part.startswith("4/8")]
    assert len(bar.rstrip()) <= columns
    assert ("reward 0.5" if columns == 40 else f"reward 0.5  KL 0.01  {REST}"[:60]) in bar


def test_a_log_has_lines_of_the_first_and_last_step_and_of_validations() -> None:
    log = io.StringIO()
    console = Console(8, PPOTrainer.headline, log)
    console.write({"val-core/s/reward/mean@1": 0.125}, 0)
    for step in range(1, 9):
        console.write(STEP, step)
    console.close()
    steps = re.findall(r"^step (\d)/8", log.getvalue(), re.MULTILINE)
    assert steps == ["0", "1", "8"]


class Kept:
    """A user's own tracker."""

    said: ClassVar[list[object]] = []

    def __init__(self, config: PPOConfig, total_steps: int) -> None:
        self.said.append(total_steps)

    def write(self, metrics: dict[str, float], step: int) -> None:
        self.said.append((step, metrics))

    def close(self) -> None:
        self.said.append("closed")


def test_a_tracker_of_ones_own_is_found_by_its_dotted_path(tmp_path: Path) -> None:
    name = "tests.trainer.run_folder.test_tracking.Kept"
    needed = ["data.train_files=x", "actor_rollout_ref.model.path=y"]
    folder = f"trainer.default_local_dir={tmp_path}"
    own = load_object(name, "here")
    with make_tracking(load_config([*needed, folder, f"trainer.logger={name}"]), 2) as tracking:
        tracking.log({"loss": 0.5}, 1)
    assert own.said == [2, (1, {"loss": 0.5}), "closed"]


def test_wandb_runs_are_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []

    def init(**settings: Any) -> Any:
        said.append((settings["project"], settings["name"], settings["config"]["trainer"]["seed"]))
        said.append((settings["id"], settings["resume"]))
        return SimpleNamespace(
            id=settings["id"] or f"new{len(said)}",
            log=lambda metrics, step: said.append((metrics, step)),
            finish=lambda: said.append("finished"),
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for step in (1, 2):
        with make_tracking(config(tmp_path, "wandb"), total_steps=2) as tracking:
            tracking.log({"loss": 1}, step)
    first = [("letters", "first", 1), (None, "allow"), ({"loss": 1.0}, 1), "finished"]
    assert said == [
        *first,
        ("letters", "first", 1),
        ("new2", "allow"),
        ({"loss": 1.0}, 2),
        "finished",
    ]


def test_trackio_runs_are_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    def init(**settings: Any) -> Any:
        opened.append((settings["project"], settings["name"], settings["resume"]))
        return SimpleNamespace(finish=lambda: None)

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))
    for folder in ("one", "one", "two"):
        with make_tracking(config(tmp_path / folder, "trackio"), total_steps=2):
            pass
    one, again, two = opened
    assert (one[0], one[2], again[2], two[2]) == ("letters", "never", "allow", "never")
    assert one[1] == again[1]
    assert one[1].startswith("first-")
    assert two[1] != one[1]


def test_a_tracker_that_is_not_installed_costs_one_warning(
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


def test_fast_steps_share_a_line_a_second(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("trainer.run_folder.tracking.time.monotonic", lambda: now)
    with make_tracking(config(tmp_path, "console"), 50, PPOTrainer.headline) as tracking:
        for step in range(1, 13):
            score = {"val-core/s/reward/mean@1": 0.25} if step == 3 else {}
            tracking.log({**STEP, **score}, step)
            now += 0.25
    said = capsys.readouterr().out.splitlines()
    steps = [line.split("/")[0] for line in said if line.startswith("step")]
    assert steps == ["step 1", "step 3", "step 7", "step 11", "step 12"], "the last one at the end"
