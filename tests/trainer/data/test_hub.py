"""Data sets by name: fetched from a local hub, and found in the cache without it."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import HfFileSystem, constants, snapshot_download

from trainer.config.compose import load_config
from trainer.data.files import rows_of_files
from trainer.data.formats import is_hub_name
from trainer.data.lm_rows import read_lm_rows
from trainer.sft.recipe import SFT
from verl_like.errors import ConfigError

COMMIT, CONVERTED = "1a2b3c4d" * 5, "c0ffee00" * 5
KEY = "data.train_files"
PREFIX = "/api/datasets/maker/texts"


def parquet(folder: Path, rows: Sequence[dict[str, Any]]) -> bytes:
    pq.write_table(pa.Table.from_pylist(list(rows)), folder / "made.parquet")
    return (folder / "made.parquet").read_bytes()


def jsonl(*texts: str) -> bytes:
    return "\n".join(json.dumps({"text": text}) for text in texts).encode()


class Hub(BaseHTTPRequestHandler):
    """The hub's replies about one data set: its revision, tree and files."""

    files: dict[str, bytes] = {}
    converted: dict[str, bytes] = {}
    """The files of the branch with the hub's own conversion."""
    requests: list[str] = []
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.requests.append(f"{self.command} {url.path}")
        body = self._body(url.path, parse_qs(url.query), parse_qs(sent.decode()))
        content = b"" if body is None else body
        self.send_response(404 if body is None else 200)
        if body is None:
            is_known = "/maker/texts" in url.path
            self.send_header("X-Error-Code", "EntryNotFound" if is_known else "RepoNotFound")
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _body(self, path: str, query: dict[str, Any], form: dict[str, Any]) -> bytes | None:
        branches = {
            **dict.fromkeys(("", "/revision/main"), (COMMIT, self.files)),
            "/revision/refs%2Fconvert%2Fparquet": (CONVERTED, self.converted),
        }
        for commit, files in ((COMMIT, self.files), (CONVERTED, self.converted)):
            branches[f"/revision/{commit}"] = commit, files
            if path == f"{PREFIX}/paths-info/{commit}":
                return json.dumps([entry(name, files) for name in form["paths"]]).encode()
            if path.startswith(start := f"{PREFIX}/tree/{commit}"):
                return tree(path.removeprefix(start).strip("/"), "recursive" in query, files)
        for revision in ("main", COMMIT, CONVERTED, "refs%2Fconvert%2Fparquet"):
            start = f"/datasets/maker/texts/resolve/{revision}/"
            if path.startswith(start):
                files = self.files if revision in ("main", COMMIT) else self.converted
                return files.get(path.removeprefix(start))
        if path.removeprefix(PREFIX) not in branches:
            return None
        commit, files = branches[path.removeprefix(PREFIX)]
        siblings = [{"rfilename": name} for name in files]
        info = {"id": "maker/texts", "sha": commit, "siblings": siblings, "tags": []}
        return json.dumps(info).encode()

    do_HEAD = do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def entry(name: str, files: dict[str, bytes]) -> dict[str, Any]:
    """Return the hub's entry of a file or a folder."""
    oid = hashlib.sha1(name.encode()).hexdigest()
    if name not in files:
        return {"type": "directory", "path": name, "oid": oid, "size": 0}
    return {"type": "file", "path": name, "size": len(files[name]), "oid": oid}


def tree(folder: str, is_recursive: bool, files: dict[str, bytes]) -> bytes | None:
    """Return the hub's listing of a folder."""
    start = f"{folder}/" if folder else ""
    inside = [name.removeprefix(start).split("/") for name in files if name.startswith(start)]
    if not inside:
        return None
    depth = max(map(len, inside)) if is_recursive else 1
    names = {"/".join(parts[: end + 1]) for parts in inside for end in range(depth)}
    return json.dumps([entry(start + name, files) for name in sorted(names)]).encode()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """A hub with one data set of two splits, at the address that the library uses."""
    Hub.files = {
        "data/train-00000-of-00002.parquet": parquet(tmp_path, [{"text": "one"}, {"text": "two"}]),
        "data/train-00001-of-00002.parquet": parquet(tmp_path, [{"text": "three"}]),
        "data/test-00000-of-00001.parquet": parquet(tmp_path, [{"text": "four"}]),
    }
    Hub.requests, Hub.converted = [], {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", address)
    for name in ("HF_DATASETS_CACHE", "DOWNLOADED_DATASETS_PATH", "EXTRACTED_DATASETS_PATH"):
        monkeypatch.setattr(datasets.config, name, str(tmp_path / "datasets" / name))
    HfFileSystem.clear_instance_cache()
    yield Hub
    server.shutdown()
    server.server_close()


def texts(name: str) -> list[str]:
    return [row["text"] for _, row in rows_of_files([name], KEY)]


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def test_a_data_set_is_fetched_once(hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    name = "maker/texts/data:train"
    assert texts(f"hub://{name}") == ["one", "two", "three"]
    assert [line for line in hub.requests if line.startswith("GET /datasets")]

    hub.requests.clear()
    assert texts(name) == ["one", "two", "three"]
    assert not [line for line in hub.requests if line.startswith("GET /datasets")]

    hub.requests.clear()
    go_offline(monkeypatch)
    assert texts(name) == ["one", "two", "three"]
    assert hub.requests == []


def test_cached_files_need_no_network(hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot_download("maker/texts", repo_type="dataset")
    go_offline(monkeypatch)
    assert texts("maker/texts:test") == ["four"]
    assert texts("maker/texts/data:test") == ["four"]


def test_an_unknown_name_is_an_error(hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"data.train_files=hub://maker/other: it is not a file"):
        texts("hub://maker/other")
    go_offline(monkeypatch)
    with pytest.raises(
        ConfigError, match=r"not a file here, and the Hugging Face hub does not provide"
    ):
        texts("maker/texts")
    with pytest.raises(ConfigError, match="hub://texts is not the name of a data set. Write hub"):
        texts("hub://texts")


def test_splits_have_the_names_of_the_hub(hub: type[Hub]) -> None:
    hub.files = {
        "helpful/train.jsonl.gz": gzip.compress(jsonl("helpful")),
        "helpful/test.jsonl": jsonl("helpful, tested"),
        "harmless/train.jsonl": jsonl("harmless"),
        "one_split/validation/0000.jsonl": jsonl("first"),
        "one_split/validation/0001.jsonl": jsonl("second"),
    }
    assert texts("hub://maker/texts/helpful:train") == ["helpful"]
    assert texts("hub://maker/texts/harmless") == ["harmless"]
    assert texts("hub://maker/texts/one_split") == ["first", "second"]


def test_configurations_of_a_data_set_have_names_too(hub: type[Hub]) -> None:
    split = "data_files: [{split: first, path: rows.csv}]"
    hub.files = {
        "README.md": f"---\nconfigs: [{{config_name: table, {split}}}]\n---\n".encode(),
        "rows.csv": b"text\na\nb\n",
    }
    assert texts("hub://maker/texts/table:first") == ["a", "b"]


def test_scripts_are_replaced_by_the_hubs_conversion(hub: type[Hub], tmp_path: Path) -> None:
    hub.files = {"texts.py": b"", "rows.xyz": b""}
    hub.converted = {
        "default/train/0000.parquet": parquet(tmp_path, [{"text": "a"}]),
        "default/test/0000.parquet": parquet(tmp_path, [{"text": "b"}]),
    }
    assert texts("maker/texts:test") == ["b"]
    assert texts("maker/texts/default:train") == ["a"]


def test_a_bad_row_is_named_by_its_number(hub: type[Hub], tokenizer: Any) -> None:
    hub.files = {"train.jsonl": jsonl("a", "", "b")}
    with pytest.raises(ConfigError, match="hub://maker/texts, row 1: 'text' is empty"):
        read_lm_rows("data.train_files", "hub://maker/texts", tokenizer, 32)
    with pytest.raises(ConfigError, match="maker/texts: no column 'prompt'. Columns: text"):
        list(rows_of_files(["maker/texts"], KEY, ["prompt"]))


def test_a_name_with_all_its_parts_is_a_value_of_the_command_line() -> None:
    name = "hub://open.ai/gsm-8k/main:train"
    settings = [f"data.train_files={name}", f"data.val_files=[{name}]", "model.path=model"]
    data = load_config(settings, SFT).data
    assert [data.train_files, *data.val_files] == [name, name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", r"has several splits. Append :SPLIT, where SPLIT is one of train, test"),
        (":tran", r'maker/texts:tran: .* Unknown split "tran". Should be one of .*train'),
    ],
)
def test_an_unclear_split_names_the_splits(hub: type[Hub], name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        texts(f"hub://maker/texts{name}")


def test_file_names_are_not_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    for name in ("rows/mistyped", "train.jsonl", "nowhere/train.parquet", "a/b/c.jsonl", "/a/b"):
        assert not is_hub_name(name)
    for name in ("maker/texts", "maker/texts:train", "maker/texts/helpful:train", "hub://x"):
        assert is_hub_name(name)
