"""Local copies of remote files and folders, and the errors for paths that cannot work."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from tests.object_store import BUCKET, Proxy, s3_through_proxy
from verl_like.errors import ConfigError
from verl_like.files import cache_folder, is_remote
from verl_like.remote_files import RemoteFolder, local_copy, remote_version


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with s3_through_proxy(monkeypatch) as proxy:
        yield proxy


def test_a_failed_transfer_that_nobody_waits_for_prints_no_traceback(
    proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    async def lose() -> None:
        asyncio.ensure_future(fail())
        await asyncio.sleep(0.05)
        gc.collect()

    async def fail() -> None:
        raise ConnectionResetError("the connection is cut")

    loop = RemoteFolder(f"s3://{BUCKET}/a b", "model.path").system.loop
    with caplog.at_level(logging.INFO):
        asyncio.run_coroutine_threadsafe(lose(), loop).result(10)
    assert "cut" not in caplog.text


def write(url: str, contents: bytes) -> None:
    system, path = fsspec.url_to_fs(url)
    system.makedirs(path.rpartition("/")[0], exist_ok=True)
    system.pipe_file(path, contents)


def stores(tmp_path: Path) -> list[str]:
    return [f"file://{tmp_path}/store", f"memory://{tmp_path.name}", f"s3://{BUCKET}/a b"]


def test_a_folder_is_fetched_once_per_version(tmp_path: Path, proxy: Proxy) -> None:
    for store in stores(tmp_path):
        write(f"{store}/model/config.json", b"{}")
        write(f"{store}/model/deep er/weights", b"123")
        copy = local_copy(f"{store}/model/", "model.path")
        assert (copy / "deep er" / "weights").read_bytes() == b"123"
        (copy / "config.json").write_text("kept")
        assert local_copy(f"{store}/model", "model.path") == copy
        assert (copy / "config.json").read_text() == "kept"
        before = remote_version(f"{store}/model", "model.path")
        write(f"{store}/model/config.json", b"{ }")
        assert remote_version(f"{store}/model", "model.path") != before
        assert (local_copy(f"{store}/model", "model.path") / "config.json").read_bytes() == b"{ }"


def test_a_file_keeps_its_name(tmp_path: Path, proxy: Proxy) -> None:
    for store in stores(tmp_path):
        write(f"{store}/train.parquet", b"rows")
        copy = local_copy(f"{store}/train.parquet", "data.train_files")
        assert (copy.name, copy.read_bytes()) == ("train.parquet", b"rows")


def test_only_wanted_files_are_fetched_until_all_are_wanted(tmp_path: Path) -> None:
    write("memory://wanted/config.json", b"{}")
    write("memory://wanted/weights", b"123")
    small = local_copy("memory://wanted", "model.path", lambda name: name.endswith(".json"))
    assert [path.name for path in small.iterdir()] == ["config.json"]
    assert local_copy("memory://wanted", "model.path") == small
    assert (small / "weights").read_bytes() == b"123"


@pytest.mark.long
def test_a_file_whose_connection_is_cut_is_not_there(tmp_path: Path, proxy: Proxy) -> None:
    write(f"s3://{BUCKET}/large", bytes(4 << 20))
    proxy.bytes_per_s = 1 << 20
    threading.Timer(1.0, lambda: setattr(proxy, "is_cut", True)).start()
    with pytest.raises(ConfigError, match=f"model.path=s3://{BUCKET}/large is not accessible: "):
        local_copy(f"s3://{BUCKET}/large", "model.path")
    assert not [path for path in cache_folder("remote").rglob("*large*")]
    proxy.is_cut, proxy.bytes_per_s = False, None
    assert local_copy(f"s3://{BUCKET}/large", "model.path").stat().st_size == 4 << 20


def test_processes_wait_for_the_one_that_downloads(tmp_path: Path) -> None:
    write("file://" + str(tmp_path / "store" / "large"), bytes(1 << 22))
    code = (
        "import sys; from verl_like.remote_files import local_copy as f; print(f(sys.argv[1], 'k'))"
    )
    command = [sys.executable, "-c", code, f"file://{tmp_path}/store"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    (copy,) = {process.communicate()[0].strip() for process in started}
    assert (Path(copy) / "large").stat().st_size == 1 << 22


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "s4://bucket/x",
            "model.path=s4://bucket/x: fsspec knows no scheme s4://. Use s3://, gs://",
        ),
        ("http://host/x", "model.path=http://host/x: http:// is not supported, because such"),
        ("s3://", "model.path=s3://: it names no bucket or folder"),
        ("s3://bucket/../x", "a remote path has no '..'"),
        ("gs://bucket/x", "model.path=gs://bucket/x: .*gcsfs.*, into the environment"),
        ("memory://no/such", "model.path=memory://no/such: there is no such file or folder"),
    ],
)
def test_a_path_that_cannot_work_is_one_sentence_with_its_key(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        local_copy(url, "model.path")
    assert "\n" not in str(error.value)


def test_missing_credentials_and_buckets_are_named(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="data.train_files=s3://other/x"):
        local_copy("s3://other/x", "data.train_files")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(ConfigError, match=r"is not accessible: .*redentials"):
        local_copy(f"s3://{BUCKET}/x", "data.train_files")


def test_names_outside_of_the_folder_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    monkeypatch.setattr(memory, "find", lambda root, detail: {f"{root}/../../x": {"size": 1}})
    with pytest.raises(ConfigError, match="unsafe name"):
        local_copy("memory://evil", "model.path")
    assert not cache_folder("remote").exists()


def test_only_schemes_are_remote_and_only_they_import_fsspec() -> None:
    assert all(map(is_remote, ("s3://b/x", "file:///x", "S4://x")))
    others = ("runs/a", "org/model", "a:b", "hub://org/data", "C:/x", "", None, 3)
    assert not any(map(is_remote, others))
    code = "import sys, verl_like.remote_files; sys.exit('fsspec' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
