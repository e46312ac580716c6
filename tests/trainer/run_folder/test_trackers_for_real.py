"""Installed W&B, trackio and TensorBoard, without a network: the logs of a run are read."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import FEW_ROWS, POLICY_ALONE, lines, overrides
from trainer.run_folder.resume import TRACKIO_RUN

pytestmark = pytest.mark.example
NAME = "critic/score/mean"
TRACKERS = ("tensorboard", "trackio", "wandb")


@pytest.fixture(scope="module")
def run(tiny_dir: Path, forked_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps with validations and all trackers."""
    folder = tmp_path_factory.mktemp("run")
    remote = ["TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID", "WANDB_API_KEY"]
    environment = {name: value for name, value in os.environ.items() if name not in remote}
    environment |= {"WANDB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackio")}
    settings = [
        *overrides(tiny_dir, folder / "run", *POLICY_ALONE, *FEW_ROWS),
        f"data.val_files={tiny_dir}/few.parquet",
        "trainer.backend=local",
        "trainer.total_training_steps=2",
        "trainer.test_freq=1",
        "trainer.project_name=letters",
        f"trainer.logger=[{','.join(TRACKERS)}]",
    ]
    done = subprocess.run(
        [forked_python, "-m", "trainer.main_ppo", *settings],
        cwd=folder, env=environment, check=False,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "which is not installed" not in done.stderr
    return folder / "run"


def best_of(run: Path, name: str, step: int) -> dict[str, Any]:
    """Return the first row of the table of this step's samples."""
    return max(lines(run / name, f"{step}.jsonl"), key=lambda row: row["score"])


def rewards_of(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line[NAME]) for line in lines(run) if NAME in line]


@pytest.mark.long
def test_tensorboard_has_the_numbers_and_the_samples(run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    rewards = [(event.step, event.value) for event in events.Scalars(NAME)]
    assert rewards == [(step, pytest.approx(value)) for step, value in rewards_of(run)]

    for name, steps in (("validation", [0, 1, 2]), ("rollouts", [1, 2])):
        tables = events.Tensors(f"samples/{name}/text_summary")
        assert [event.step for event in tables] == steps
        text = tables[-1].tensor_proto.string_val[0].decode()
        head, rule, first, *_ = text.splitlines()
        assert [cell.strip() for cell in head.split("|")[1:4]] == ["step", "uid", "sample"]
        assert set(rule) <= set("| \\-")
        assert first.split("|")[2].strip() == best_of(run, name, 2)["uid"]


def test_wandb_has_the_numbers_and_the_samples(run: Path) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    (folder,) = (run / "wandb").glob("offline-run-*")
    (log,) = folder.glob("*.wandb")
    rewards: list[tuple[int, float]] = []
    tables = []
    project = ""
    for message in messages_of(log.read_bytes()):
        record = Record()
        record.ParseFromString(message)
        project = project or record.run.project
        items = {item.key or "/".join(item.nested_key): item for item in record.history.item}
        if NAME in items:
            rewards.append((record.history.step.num, json.loads(items[NAME].value_json)))
        tables += [name for name in items if name.startswith("samples/")]
    assert project == "letters"
    assert rewards == rewards_of(run)
    names = ["samples/rollouts", "samples/validation"]
    assert sorted({"/".join(name.split("/")[:2]) for name in tables}) == names

    for name in ("validation", "rollouts"):
        (file,) = folder.glob(f"files/media/table/samples/{name}_2_*.table.json")
        table = json.loads(file.read_text())
        best = best_of(run, name, 2)
        assert table["data"][0][table["columns"].index("output")] == best["output"]


def test_trackio_has_the_numbers_and_the_samples(run: Path) -> None:
    with sqlite3.connect(run.parent / "trackio" / "letters.db") as database:
        rows = database.execute("SELECT step, run_name, metrics FROM metrics").fetchall()
    logs = [(step, name, json.loads(metrics)) for step, name, metrics in rows]
    assert {name for _, name, _ in logs} == {(run / TRACKIO_RUN).read_text()}
    assert sorted((step, m[NAME]) for step, _, m in logs if NAME in m) == rewards_of(run)
    tables = {name: table for _, _, m in logs for name, table in m.items() if "samples/" in name}
    assert set(tables) == {"samples/rollouts", "samples/validation"}
    uids = [row["uid"] for row in tables["samples/rollouts"]["_value"]]
    assert best_of(run, "rollouts", 2)["uid"] in uids


def messages_of(log: bytes) -> Iterator[bytes]:
    """Return the records of a LevelDB file: blocks of 32 KiB, the first with a header.

    Each piece has a checksum, its length, and its kind: full, first, middle or last.
    """
    message, place = b"", 7
    while place + 7 <= len(log):
        if place % 32768 > 32768 - 7:  # no room for another piece
            place += -place % 32768
            continue
        length, kind = struct.unpack("<HB", log[place + 4 : place + 7])
        message += log[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield message
            message = b""
