"""Saved checkpoints survive other names, crashes and damaged neighbors."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.trainer.serve.clients import Client, FailedError, Model, config_of, served
from tests.waiting import wait_until
from trainer.serve import app, handlers
from trainer.serve.checkpoints import SavedPath


def names_of(model: Model) -> set[str]:
    listed = model.client.get(f"training_runs/{model.name}/checkpoints")["checkpoints"]
    return {checkpoint["checkpoint_id"] for checkpoint in listed}


def test_no_name_of_a_checkpoint_is_a_work_folder_of_another(model: Model) -> None:
    for name in ("a.part", "a.old", "a"):
        model.save(path=name)
        model.train()
    model.save(path="a", overwrite=True)
    assert names_of(model) == {"weights/a.part", "weights/a.old", "weights/a"}
    for seq, name in enumerate(("a.part", "a.old", "a"), 1):
        model.client.load(f"tinker://{model.name}/weights/{name}", True, seq)


def test_the_start_of_a_server_removes_what_a_crashed_server_left(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tiny_dir / "model", tmp_path)
    with served(config) as (work_queue, url), Client(url) as client:
        model = client.model(work_queue.base_model)
        for name in ("whole", "replaced"):
            model.save(path=name)
        run = tmp_path / model.name
    weights = run / "weights"
    # as after a crash: in the middle of a save, before the second rename of an overwrite, and
    # after a snapshot moved to the disk
    (weights / ".new.part" / "global_step_1").mkdir(parents=True)
    (weights / "replaced").rename(weights / ".replaced.old")
    (weights / ".whole.old").mkdir()
    (run / "snapshots" / "0").mkdir(parents=True)
    with served(config) as (_, url), Client(url) as client:
        assert {file.name for file in weights.iterdir()} == {"whole", "replaced"}
        assert not (run / "snapshots").exists()
        assert client.load(f"tinker://{model.name}/weights/replaced", True, 0)


DAMAGED = ["", "{", "[]", "{}", '{"expires_at": "soon"}', '{"expires_at": "2020-01-01"}']


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_checkpoint_stops_neither_the_janitor_nor_the_list_of_checkpoints(
    tiny_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    content: str,
) -> None:
    monkeypatch.setattr(app, "CLEANUP_S", 0.01)
    with (
        served(config_of(tiny_dir / "model", tmp_path)) as (work_queue, url),
        Client(url) as client,
    ):
        model = client.model(work_queue.base_model)
        for name in ("broken", "expired", "healthy"):
            model.save(path=name)
        weights = tmp_path / model.name / "weights"
        (weights / "broken" / "checkpoint.json").write_text(content)
        time.sleep(0.1)  # several rounds of the janitor
        work_queue.checkpoints.change(
            SavedPath(model.name, "weights", "expired"), expires_at="2020-01-01T00:00:00+00:00"
        )
        wait_until(lambda: not (weights / "expired").exists())
        assert names_of(model) == {"weights/healthy"}
        with pytest.raises(FailedError, match=f"{weights}/broken/checkpoint.json is damaged: "):
            client.load(f"tinker://{model.name}/weights/broken", True, 1)
        delete = f"training_runs/{model.name}/checkpoints/weights/broken"
        assert client.http.delete(delete).is_success
    assert caplog.text.count("broken/checkpoint.json is damaged") == 1


def test_the_janitor_goes_on_after_an_exception_and_says_so_once(
    tiny_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rounds = []

    def fail() -> None:
        rounds.append(1)
        raise OSError("the disk is gone")

    monkeypatch.setattr(app, "CLEANUP_S", 0.01)
    with (
        served(config_of(tiny_dir / "model", tmp_path)) as (work_queue, url),
        Client(url) as client,
    ):
        monkeypatch.setattr(work_queue.checkpoints, "delete_expired", fail)
        wait_until(lambda: len(rounds) > 3)
        monkeypatch.setattr(app, "SESSION_TIMEOUT_S", 0.0)
        wait_until(lambda: not client.get("sessions")["sessions"])
    assert caplog.text.count("the disk is gone") == 1


def test_a_crashed_client_gives_its_place_to_another_client_that_wants_it(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tiny_dir / "model", tmp_path, rank=0)
    with served(config) as (work_queue, url):
        with Client(url) as crashed:
            model = crashed.model(work_queue.base_model, rank=0)
            model.train()
            path = model.save(path="a")["path"]
        with Client(url) as second:
            with pytest.raises(FailedError, match="a model is open.*a session ends when .* 120 s"):
                second.load(path, True, 0)
            monkeypatch.setattr(handlers, "ABANDONED_S", 0.0, raising=False)
            resumed = second.load(path, True, 1)
            with pytest.raises(FailedError, match="410: the session has ended"):
                crashed_heartbeat(url, crashed.session)
            assert resumed.train()["grad_norm"] > 0


def crashed_heartbeat(url: str, session: str) -> None:
    with Client(url) as client:
        client.post("session_heartbeat", session_id=session)


def test_a_load_that_failed_leaves_its_place_free(tiny_dir: Path, tmp_path: Path) -> None:
    config = config_of(tiny_dir / "model", tmp_path, rank=0)
    with served(config) as (work_queue, url):
        with Client(url) as first:
            saved = first.model(work_queue.base_model, rank=0)
            paths = [saved.save(path=name)["path"] for name in ("good", "bad")]
            first.post(f"sessions/{first.session}/finish")
        for file in (tmp_path / saved.name / "weights" / "bad").rglob("*.safetensors"):
            file.unlink()
        with Client(url) as second:
            with pytest.raises(FailedError, match="user: "):
                second.load(paths[1], True, 0)
            assert second.load(paths[0], True, 1).train()["grad_norm"] > 0
