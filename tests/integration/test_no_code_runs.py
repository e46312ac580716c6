"""Loading a folder runs none of its code: a malicious file of each kind."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ROOT
from tests.trainer.tools.report.report_runs import make_run
from tests.workers.samples import started, tiny_config
from trainer.data.prompt_tokens import encode_prompt
from trainer.data.prompts import load_tokenizer
from trainer.run_folder.folder import read_marker, saved_config
from trainer.tools.report.page import write_report
from verl_like.batch.protocol import DataProto
from verl_like.errors import VerlLikeError
from verl_like.process.random_state import load_random_state
from workers.config import ModelConfig
from workers.models.causal_lm import empty_model
from workers.models.load import load_weights
from workers.roles.actor import ActorWorker
from workers.training.checkpoints.manifest import read_manifest
from workers.training.checkpoints.shards import read_shards


class Witness:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, ran: Path) -> None:
        self.ran = ran

    def __reduce__(self) -> Any:
        return open, (str(self.ran), "w")


def code(ran: Path) -> str:
    return f"open({str(ran)!r}, 'w').close()\nclass Evil: pass\n"


def model_with(tiny_dir: Path, folder: Path, file: str, **fields: Any) -> Path:
    """The tiny model's folder with code, and with these fields in one of its JSON files."""
    shutil.copytree(tiny_dir / "model", folder)
    facts = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(facts | fields))
    (folder / "evil.py").write_text(code(folder.parent / "ran"))
    return folder


def no_shards(folder: Path) -> None:
    read_shards({"w": torch.zeros(1)}, folder)


LOADERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "batch": ("batch", lambda folder: DataProto.load_from_disk(folder / "batch")),
    "shard": ("0.safetensors", no_shards),
    "index of torch's shards": (".metadata", no_shards),
    "random state": ("0.json", lambda folder: load_random_state(folder / "0.json")),
    "manifest": ("manifest.json", read_manifest),
    "commit marker": ("commit.json", read_marker),
    "configuration": ("config.yaml", saved_config),
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("write", [pickle.dump, torch.save])
def test_a_pickle_with_the_name_of_a_file_is_rejected(
    tmp_path: Path, kind: str, write: Callable[[Any, Any], None]
) -> None:
    name, load = LOADERS[kind]
    with (tmp_path / name).open("wb") as file:
        write(Witness(tmp_path / "ran"), file)
    with pytest.raises(VerlLikeError):
        load(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_of_a_pickle_with_a_valid_checksum_is_rejected(
    tiny_dir: Path, tmp_path: Path
) -> None:
    actor = started(ActorWorker, tiny_config(tiny_dir), 10)
    actor.save_checkpoint(str(tmp_path / "actor"))
    from verl_like.files import fingerprint

    evil = tmp_path / "actor" / "shards" / "0.safetensors"
    evil.write_bytes(pickle.dumps(Witness(tmp_path / "ran")))
    path = tmp_path / "actor" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["shards/0.safetensors"] = fingerprint(evil)
    path.write_text(json.dumps(manifest))
    with pytest.raises(VerlLikeError, match="0.safetensors is damaged"):
        actor.load_checkpoint(str(tmp_path / "actor"))
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_or_model_with_custom_code_is_rejected_without_a_prompt(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # the answer to a prompt of transformers
    own_tokenizer = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    folder = model_with(tiny_dir, tmp_path / "t", "tokenizer_config.json", **own_tokenizer)
    with pytest.raises(VerlLikeError, match="custom code"):
        load_tokenizer(str(folder))

    own_model = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    folder = model_with(
        tiny_dir, tmp_path / "m", "config.json", auto_map=own_model, model_type="evil"
    )
    with pytest.raises(VerlLikeError, match="custom code"):
        empty_model(ModelConfig(path=str(folder)), "token", torch.device("cpu"))
    assert not (tmp_path / "ran").exists()


def test_weights_in_a_pickle_are_rejected(tiny_dir: Path, tmp_path: Path) -> None:
    folder = model_with(tiny_dir, tmp_path / "model", "config.json")
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Witness(tmp_path / "ran")}, folder / "pytorch_model.bin")
    config, cpu = ModelConfig(path=str(folder)), torch.device("cpu")
    with pytest.raises(VerlLikeError, match="pytorch_model.bin cannot be read: Weights only"):
        load_weights(empty_model(config, "token", cpu), config, "token", cpu)
    assert not (tmp_path / "ran").exists()


def test_a_chat_template_cannot_access_python_classes(tiny_dir: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_dir / "model"))
    tokenizer.chat_template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ValueError, match="the chat template rejects it: access to attribute"):
        encode_prompt([{"role": "user", "content": "a"}], tokenizer)


def test_a_report_escapes_the_contents_of_the_run_folder(tmp_path: Path) -> None:
    script = "<script>alert(1)</script>"
    run = make_run(tmp_path / "run", 2, response=script)
    for name in ("config.yaml", "failure.txt", "placement.txt"):
        (run / name).write_text(f"a: {script}")
    (run / "starts.jsonl").write_text(
        json.dumps({"time": script, "host": script, "command": script})
    )
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    (run / "metrics.jsonl").write_text(json.dumps(line | {script: 1.0, f"reward/{script}/mean": 1}))
    assert script not in write_report(run).read_text(encoding="utf-8")


UNPICKLES = re.compile(
    r"torch\.load\((?!.*weights_only=True)|pickle\.loads?\(|np\.load\(|trust_remote_code=True|dcp\.load"
)
BETWEEN_PROCESSES = (
    "verl_like/process/host.py",
    "verl_like/calls/",
    "verl_like/backends/",
    "verl_like/process/pool.py",
    "workers/rollout/vllm/worker.py",
)
FUNCTION_OF_A_SESSION = "trainer/api/inputs.py"
"""Loads a user's function that a Python session has pickled."""


def test_only_messages_between_processes_are_unpickled() -> None:
    names = set()
    for package in ("verl_like", "workers", "trainer"):
        for path in (ROOT / package).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            if UNPICKLES.search(path.read_text()) and not name.startswith(BETWEEN_PROCESSES):
                names.add(name)
    assert names == {FUNCTION_OF_A_SESSION}
