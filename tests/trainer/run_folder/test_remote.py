"""Run folders in object stores: uploads, resumes, the lock, and stores that fail."""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.object_store import BUCKET, Proxy, s3_through_proxy
from tests.trainer.run_folder.checkpoints import Role, checkpoints, composed, saved
from tests.waiting import wait_until
from trainer.run_folder import remote
from trainer.run_folder.folder import saved_steps
from trainer.run_folder.remote import RemoteRun, fetched_run, local_run_folder, upload
from verl_like.errors import ConfigError


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "SCAN_EVERY_S", 0.05)
    monkeypatch.setattr(remote, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(remote, "LOCK_TIMEOUT_S", 1.0)


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with s3_through_proxy(monkeypatch) as proxy:
        yield proxy


URL = f"s3://{BUCKET}/runs/my run"


def in_store(url: str = URL) -> list[str]:
    system, root = fsspec.url_to_fs(url)
    system.invalidate_cache()
    return sorted(path.removeprefix(root).lstrip("/") for path in system.find(root))


def on_another_machine(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


@pytest.mark.parametrize("kind", ["memory", "file", "s3"])
def test_another_machine_resumes_from_the_store(
    kind: str, tmp_path: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = {"memory": f"memory://{tmp_path.name}", "file": f"file://{tmp_path}/a b", "s3": URL}[kind]
    run = RemoteRun(f"{url}/")
    (run.folder / "metrics.jsonl").write_text('{"step": 2}\n')
    saved(run.folder, 2, 4)
    checkpoints(run.folder).write(6, {"actor": Role(6)}, {"global_step": 6})  # never committed
    run.close()
    assert not [name for name in in_store(url) if "6" in name or name == "remote.lock"]

    on_another_machine(monkeypatch, tmp_path / "other")
    run = RemoteRun(url)
    roles = {"actor": Role(0), "critic": Role(0)}
    assert checkpoints(run.folder).resume.load(roles) == {"global_step": 4}
    assert (roles["actor"].number, roles["critic"].number) == (4, -4)
    assert (run.folder / "metrics.jsonl").read_text() == '{"step": 2}\n'
    saved(run.folder, 6, 8)  # keeps the newest two
    run.close()
    assert saved_steps(run.folder) == [6, 8]
    names = in_store(url)
    assert {name.split("/")[0] for name in names if "global" in name} == {
        "global_step_6",
        "global_step_8",
    }

    on_another_machine(monkeypatch, tmp_path / "cache")  # the first machine again
    run = RemoteRun(url)
    run.close()
    assert saved_steps(run.folder) == [6, 8]
    assert in_store(url) == names


@pytest.mark.long
def test_a_checkpoint_whose_upload_is_cut_does_not_count(
    tmp_path: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = RemoteRun(URL)
    saved(run.folder, 2)
    wait_until(lambda: "global_step_2/commit.json" in in_store())
    proxy.cut_after = proxy.num_sent + (1 << 20)
    run_checkpoints = checkpoints(run.folder)
    run_checkpoints.write(
        4,
        {"actor": Role(4)},
        {"global_step": 4},
        lambda folder: (folder / "large").write_bytes(bytes(4 << 20)) and None,
    )
    run_checkpoints.commit()
    with caplog.at_level(logging.WARNING):
        run.close()
    warnings = [record.getMessage() for record in caplog.records if "s3://" in record.getMessage()]
    assert len(warnings) == 2, warnings
    assert warnings[0].startswith(f"{URL} does not take uploads (")
    assert "lacks files of this run" in warnings[1]

    proxy.is_cut, proxy.cut_after = False, None
    on_another_machine(monkeypatch, tmp_path / "other")
    run = RemoteRun(URL)
    assert saved_steps(run.folder) == [2]
    run.close()
    assert not [name for name in in_store() if name.startswith("global_step_4/")]

    on_another_machine(monkeypatch, tmp_path / "cache")  # the first machine has step 4
    RemoteRun(URL).close()
    assert "global_step_4/commit.json" in in_store()


def test_a_store_that_fails_for_a_while_is_reported_once_and_caught_up(
    proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    run = RemoteRun(URL)
    proxy.is_cut = True
    with caplog.at_level(logging.WARNING):
        for step in (2, 4):
            saved(run.folder, step)
            time.sleep(1.0)
        wait_until(lambda: "does not take uploads" in caplog.text)
        proxy.is_cut = False
        wait_until(lambda: "takes uploads again" in caplog.text)
        run.close()
    assert caplog.text.count("does not take uploads") == 1
    assert {"global_step_2/commit.json", "global_step_4/commit.json"} <= {*in_store()}


def test_a_slow_store_does_not_slow_the_run(proxy: Proxy) -> None:
    run = RemoteRun(URL)
    proxy.bytes_per_s = 2 << 20
    start = time.monotonic()
    run_checkpoints = checkpoints(run.folder)
    run_checkpoints.write(
        2, {}, {"global_step": 2}, lambda f: (f / "large").write_bytes(bytes(4 << 20)) and None
    )
    run_checkpoints.commit()
    assert time.monotonic() - start < 1
    assert "global_step_2/commit.json" not in in_store()
    run.close()
    assert time.monotonic() - start > 2
    assert "global_step_2/commit.json" in in_store()


def test_a_marker_is_removed_before_its_files_change(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory://replaced"
    run = RemoteRun(url)
    saved(run.folder, 2)
    wait_until(lambda: "global_step_2/commit.json" in in_store(url))
    seen: list[list[str]] = []
    put = remote._put
    monkeypatch.setattr(remote, "_put", lambda *args: (seen.append(in_store(url)), put(*args)))
    shutil.rmtree(run.folder / "global_step_2")
    (run.folder / "global_step_2").mkdir()
    (run.folder / "global_step_2" / "trainer.json").write_text("{}")
    (run.folder / "global_step_2" / "commit.json").write_text("{ }")
    run.close()
    changes = [names for names in seen if "global_step_2/random.json" not in names]
    assert changes
    assert not any("global_step_2/commit.json" in names for names in seen)
    assert in_store(url)[:2] == ["global_step_2/commit.json", "global_step_2/trainer.json"]


def test_two_runs_on_one_prefix_are_told_apart(proxy: Proxy) -> None:
    run = RemoteRun(URL)
    with pytest.raises(
        ConfigError, match=r"trainer.default_local_dir=s3://.* is in use by process"
    ):
        RemoteRun(URL)
    run.close()
    RemoteRun(URL).close()


def test_of_two_runs_that_start_together_one_gets_the_folder(proxy: Proxy) -> None:
    runs: list[RemoteRun] = []
    errors: list[ConfigError] = []

    def start() -> None:
        try:
            runs.append(RemoteRun(URL))
        except ConfigError as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(runs), len(errors)) == (1, 3)
    runs[0].close()


def lock_of(**fields: Any) -> bytes:
    return json.dumps({"id": "x", "host": "gone", "pid": "1", "since": "then", **fields}).encode()


def test_the_lock_of_a_dead_run_is_taken_over(caplog: pytest.LogCaptureFixture) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/dead/remote.lock", lock_of())
    with caplog.at_level(logging.WARNING):
        run = RemoteRun("memory://dead")
    assert "remote.lock is of a run that died; taking it over" in caplog.text
    memory.pipe_file("/dead/remote.lock", lock_of(host="thief"))  # after this run lost the network
    with caplog.at_level(logging.WARNING):
        wait_until(
            lambda: "was taken by process 1 on thief; this run uploads no more" in caplog.text
        )
    (run.folder / "metrics.jsonl").write_text("{}\n")
    run.close()
    assert in_store("memory://dead") == ["remote.lock"]


def test_a_store_that_cannot_be_written_is_an_error_with_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def deny(*_: object, **__: object) -> None:
        raise PermissionError("Access Denied.")

    monkeypatch.setattr(fsspec.filesystem("memory"), "pipe_file", deny)
    text = (
        "trainer.default_local_dir=memory://closed is not accessible: PermissionError: Access Den"
    )
    with pytest.raises(ConfigError, match=text):
        RemoteRun("memory://closed")


def test_a_store_that_denies_writing_during_a_run_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def deny(*_: object, **__: object) -> None:
        raise PermissionError("Access Denied.")

    run = RemoteRun("memory://denies")
    with caplog.at_level(logging.WARNING), monkeypatch.context() as denied:
        denied.setattr(fsspec.filesystem("memory"), "put_file", deny)
        for step in (2, 4):
            saved(run.folder, step)
            time.sleep(0.5)
        wait_until(lambda: "does not take uploads (PermissionError: Access Denied)" in caplog.text)
        assert not [name for name in in_store("memory://denies") if name.endswith("commit.json")]
        denied.undo()
        wait_until(lambda: "takes uploads again" in caplog.text)
        run.close()
    assert caplog.text.count("does not take uploads") == 1
    steps = {f"global_step_{step}/commit.json" for step in (2, 4)}
    assert steps <= {*in_store("memory://denies")}


def test_a_run_starts_from_a_checkpoint_in_the_store(tmp_path: Path) -> None:
    run = RemoteRun("memory://first")
    saved(run.folder, 2, 4)
    run.close()
    settings = ["trainer.resume_mode=resume_path", "trainer.resume_from_path={}/global_step_2"]
    resume = [setting.format("memory://first") for setting in settings]
    config = composed(tmp_path / "second", *resume)
    with local_run_folder(config) as local:
        start = Path(local.trainer.resume_from_path)
        assert (start.name, start.is_relative_to(tmp_path / "cache")) == ("global_step_2", True)
    config = composed(Path("x"), *resume)
    from verl_like.config_key import replace_keys

    with local_run_folder(
        replace_keys(config, {"trainer.default_local_dir": "memory://first"})
    ) as local:
        assert Path(local.trainer.resume_from_path).parent == Path(local.trainer.default_local_dir)


def test_a_copy_for_reading_has_what_it_is_for(tmp_path: Path) -> None:
    run = RemoteRun("memory://read")
    saved(run.folder, 2, 4)
    (run.folder / "config.yaml").write_text("a: 1\n")
    run.close()

    def files(needs: str) -> set[str]:
        shutil.rmtree(tmp_path / "cache" / "verl_like" / "remote", ignore_errors=True)
        copy = fetched_run("memory://read", needs)
        return {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}

    records = files("records")
    assert {"config.yaml", "global_step_2/commit.json", "global_step_4/commit.json"} <= records
    assert not any(name.endswith("number") for name in records)
    weights = files("weights")
    assert {"global_step_4/actor/number", "global_step_2/commit.json"} <= weights
    assert "global_step_2/actor/number" not in weights
    assert "global_step_2/actor/number" in files("all")


def test_an_export_is_not_mixed_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "model" / "deep").mkdir(parents=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "deep" / "weights").write_text("1")
    upload(tmp_path / "model", "memory://exported")
    assert in_store("memory://exported") == ["config.json", "deep/weights"]
    with pytest.raises(ConfigError, match="memory://exported has files already"):
        upload(tmp_path / "model", "memory://exported")
