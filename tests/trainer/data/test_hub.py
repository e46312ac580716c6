"""Data sets by name: fetched from a hub that runs here, found again in the cache without it."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from trainer.config.compose import load_config
from trainer.data.config import DataConfig
from trainer.data.files import rows_of_files
from trainer.data.hub import hub_files, is_hub_name
from trainer.data.lm_rows import read_lm_rows
from trainer.data.pairs import read_pairs
from trainer.data.prompts import PromptSet, load_tokenizer
from trainer.sft.recipe import SFT
from verl_like.errors import ConfigError

COMMIT = "1a2b3c4d" * 5
KEY = "data.train_files"


def parquet(folder: Path, rows: Sequence[dict[str, Any]]) -> bytes:
    pq.write_table(pa.Table.from_pylist(list(rows)), folder / "made.parquet")
    return (folder / "made.parquet").read_bytes()


def jsonl(*texts: str) -> bytes:
    return "\n".join(json.dumps({"text": text}) for text in texts).encode()


class Hub(BaseHTTPRequestHandler):
    """What `snapshot_download` asks a hub for: the files of a revision, and each of them."""

    files: dict[str, bytes] = {}
    asked: list[str] = []
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        path = self.path.split("?")[0]
        self.asked.append(f"{self.command} {path}")
        body, status = b"{}", 404
        if path == "/api/datasets/maker/texts/revision/main":
            siblings = [{"rfilename": name} for name in self.files]
            info = {"id": "maker/texts", "sha": COMMIT, "siblings": siblings, "tags": []}
            body, status = json.dumps(info).encode(), 200
        elif path == f"/api/datasets/maker/texts/tree/{COMMIT}":
            tree = []
            for name, content in self.files.items():
                oid = hashlib.sha1(content).hexdigest()
                tree.append({"type": "file", "path": name, "size": len(content), "oid": oid})
            body, status = json.dumps(tree).encode(), 200
        elif path.startswith(start := f"/datasets/maker/texts/resolve/{COMMIT}/"):
            body, status = self.files[path.removeprefix(start)], 200
        self.send_response(status)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """A hub with one data set of two splits, which is where the client looks."""
    Hub.files = {
        "README.md": b"not rows",
        "data/train-00000-of-00002.parquet": parquet(tmp_path, [{"text": "one"}, {"text": "two"}]),
        "data/train-00001-of-00002.parquet": parquet(tmp_path, [{"text": "three"}]),
        "data/test-00000-of-00001.parquet": parquet(tmp_path, [{"text": "four"}]),
    }
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    address = f"http://127.0.0.1:{server.server_port}"
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    yield Hub
    server.shutdown()
    server.server_close()


def texts(name: str) -> list[str]:
    return [row["text"] for _, row in rows_of_files([name], KEY)]


def test_a_data_set_is_fetched_once_and_read_without_a_network_then(
    hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert texts("hub://maker/texts:train") == ["one", "two", "three"]
    assert not [line for line in hub.asked if "test-" in line or "README" in line]
    fetched = [line for line in hub.asked if line.startswith("GET /datasets")]
    assert len(fetched) == 2

    hub.asked.clear()
    assert texts("maker/texts:train") == ["one", "two", "three"]
    assert not [line for line in hub.asked if line.startswith("GET /datasets")]

    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert texts("maker/texts:train") == ["one", "two", "three"]
    assert hub.asked == []
    with pytest.raises(ConfigError, match=r"texts:test: .*data/test-00000-of-00001.parquet"):
        texts("maker/texts:test")


def test_a_name_that_nothing_answers_to_is_refused(
    hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"data.train_files=hub://maker/other: it is no file"):
        texts("hub://maker/other")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"no file here, and the Hugging Face hub does not give"):
        texts("maker/texts")
    with pytest.raises(ConfigError, match="hub://texts names no data set; write hub://organisat"):
        texts("hub://texts")


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of maker/texts in the cache, fetched before; other revisions are not there."""

    def fetch(name: str, revision: str | None, **_: Any) -> str:
        folder = tmp_path / (revision or "") / name
        if revision is not None and not folder.exists():
            raise OSError("no such revision")
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    return tmp_path / "maker" / "texts"


def fill(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = jsonl(name)
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)


def test_splits_and_folders_are_known_from_the_names_of_files(cached: Path) -> None:
    fill(cached, "helpful/train.jsonl.gz", "helpful/test.jsonl.gz", "harmless/train.jsonl")
    fill(cached, "plain/valid/0000.parquet", "plain/valid/0001.parquet", "train_prefs.jsonl")
    assert texts("hub://maker/texts/helpful:train") == ["helpful/train.jsonl.gz"]
    assert texts("hub://maker/texts:train_prefs") == ["train_prefs.jsonl"]
    assert [path.name for path in hub_files("hub://maker/texts/plain", KEY)] == [
        "0000.parquet",
        "0001.parquet",
    ]


def test_of_a_data_set_in_another_form_the_hub_s_own_files_are_read(
    cached: Path, tmp_path: Path
) -> None:
    fill(cached, "rows.csv", "rows.py")
    made = tmp_path / "refs/convert/parquet" / "maker" / "texts"
    fill(made, "default/train/0000.jsonl", "default/test/0000.jsonl")
    assert texts("maker/texts:test") == ["default/test/0000.jsonl"]


def test_prompts_texts_and_pairs_are_read_by_name(cached: Path, tiny_dir: Path) -> None:
    tokenizer = load_tokenizer(f"{tiny_dir}/model")
    rule = {"data_source": "verl_like/tiny_letters", "reward_model": {"ground_truth": "a"}}
    row = {"prompt": "say a", "chosen": "a", "rejected": "b", "response": "a", **rule}
    cached.mkdir(parents=True)
    (cached / "train.jsonl").write_text(json.dumps(row), encoding="utf-8")
    name = "hub://maker/texts"
    assert len(read_lm_rows("ptx.train_files", name, tokenizer, 32)) == 1
    assert len(read_pairs("data.train_files", name, tokenizer, 32)) == 1
    assert len(PromptSet(DataConfig(train_files=name), "train_files", tokenizer)) == 1


def test_a_name_with_all_its_parts_is_a_value_of_the_command_line() -> None:
    name = "hub://open.ai/gsm-8k/main:train"
    settings = [f"data.train_files={name}", f"data.val_files=[{name}]", "model.path=model"]
    data = load_config(settings, SFT).data
    assert [data.train_files, *data.val_files] == [name, name]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("", r"say which split, by a : and one of test, train, valid"),
        (":train", r"split train is in several folders; .*a /: harmless, helpful"),
        ("/helpful:tran", r"no split 'tran', only train. Did you mean 'train'"),
        (":valid", r"1 of 3 files of the split valid are in this machine's cache"),
        ("/nowhere", r"has no file in its folder nowhere that ends in .parquet, .jsonl"),
    ],
)
def test_what_is_not_one_whole_split_is_refused_with_what_there_is(
    cached: Path, name: str, answer: str
) -> None:
    fill(cached, "helpful/train.jsonl", "harmless/train.jsonl", "helpful2/test.jsonl")
    fill(cached, "valid-00001-of-00003.jsonl")
    with pytest.raises(ConfigError, match=answer):
        texts(f"hub://maker/texts{name}")


def test_what_could_be_a_file_is_not_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    for name in ("rows/mistyped", "train.jsonl", "nowhere/train.parquet", "a/b/c.jsonl", "/a/b"):
        assert not is_hub_name(name)
    for name in ("maker/texts", "maker/texts:train", "maker/texts/helpful:train", "hub://x"):
        assert is_hub_name(name)
