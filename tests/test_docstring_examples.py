"""Every public name for runs and extensions has an example in its docstring, and it runs."""

from __future__ import annotations

import importlib
import inspect
import math
import re
import sys
import textwrap
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import pytest
import torch

from tests.conftest import load
from tests.trainer.tools.report.report_runs import make_run
from trainer.api.python_run import PythonRun
from verl_like import registry
from verl_like.rules import dapo
from workers import columns

PUBLIC = ("verl_like", "verl_like.extend")
NAMES = [(module, name) for module in PUBLIC for name in importlib.import_module(module).__all__]
PARSED = {
    *("LocalWorkerGroup", "RayClassWithInitArgs", "RayWorkerGroup", "ClassWithInitArgs"),
    *("create_colocated_worker_cls", "DataProtoFuture", "PerRank", "gather"),
    *("RolloutEngine", "ScoreTrainEngine", "WorkerExtension", "diagnose_rollout_gap"),
    *("Recipe", "check_loss", "EVAL", "RolloutWorker", "sync_weights", "update_model"),
    *("RecordCallback", "datum_arrays", "record_verl_step", "trajectory_chats"),
    *("decode_responses",),
}
"""Names whose examples need groups of workers, models in training, files or other packages."""


def code_of(module: str, name: str) -> str:
    """Return the code of a docstring: its indented lines before the lists of arguments."""
    value = getattr(importlib.import_module(module), name)
    has_docstring = inspect.isclass(value) or inspect.isroutine(value)
    constant = load("docs/api_tables.py").docstring_of_constant
    text = inspect.getdoc(value) if has_docstring else constant(module, name)
    text = re.split(r"^(?:Args|Raises|Attributes):$", text or "", flags=re.M)[0]
    return textwrap.dedent("".join(re.findall(r"^(?:    .*)?\n?", text, re.M)))


@pytest.fixture
def names_of_examples(
    tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Return the public names, and the objects that examples use without making them."""
    (tmp_path / "models").mkdir()
    (tmp_path / "Qwen").mkdir()
    for model in ("models/policy", "models/verifier", "Qwen/Qwen3-0.6B"):
        (tmp_path / model).symlink_to(tiny_dir / "model")
    paths = "data.train_files=a.parquet actor_rollout_ref.model.path=models/policy"
    (tmp_path / "run.sh").write_text(f"python3 -m verl.trainer.main_ppo {paths}")
    make_run(tmp_path / "runs" / "letters", 2)
    monkeypatch.chdir(tmp_path)
    for entries in registry._by_kind.values():
        monkeypatch.setattr(entries, "_entries", dict(entries._entries))
    monkeypatch.setattr(columns, "COLUMNS", dict(columns.COLUMNS))

    public = {name: getattr(importlib.import_module(module), name) for module, name in NAMES}
    for recipe in (public["PPO"], PythonRun):
        monkeypatch.setattr(recipe, "fit", lambda *_, **__: None)
    chunks = [public["SampleChunk"](number=number, num_samples=4) for number in range(2)]
    columns_of_batch = {"response_mask": torch.ones(2, 3), "responses": torch.ones(2, 3)}
    module = torch.nn.Linear(2, 2)
    digits = cycle(range(10))
    pair = {"prompt": "Hi", "chosen": "Hello!", "rejected": "?"}
    return public | {
        **{"torch": torch, "math": math, "sys": sys, "dataclass": dataclass},
        **{"Annotated": Annotated, "PrintReward": object, "__name__": __name__},
        "run": lambda *_, **__: SimpleNamespace(
            metrics=[{"critic/score/mean": 0.5}], model_folder="model"
        ),
        "settings": ["data.train_files=a.parquet", "actor_rollout_ref.model.path=m"],
        **{"config": public["OptimConfig"](), "step": 0, "total_steps": 10},
        "view": public["BufferView"](chunks, [], 8, 0, 1, 8, [0]),
        "batch": public["DataProto"].from_dict(columns_of_batch),
        **{"losses": torch.ones(2), "mini_batch": SimpleNamespace(num_rows=2)},
        **{"module": module, "named_tensors": module.state_dict().items()},
        **{"ids": torch.ones(2, 3, dtype=torch.int64), "uids": ["0-0", "1-0"]},
        **{
            "kwargs": {},
            "row": {},
            "rng": np.random.default_rng(0),
            "generate": lambda _: str(next(digits)),
        },
        **{"prompts": [{"prompt": "2 + 2 ="}], "reward": dapo},
        **{"pairs": [pair], "val_pairs": [pair]},
    }


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[name for _, name in NAMES])
def test_the_docstring_of_a_public_name_has_an_example_that_runs(
    module: str, name: str, names_of_examples: dict[str, Any]
) -> None:
    code = code_of(module, name)
    assert code.strip(), f"{module}.{name} has no example"
    compiled = compile(code, f"the example of {name}", "exec")
    if name not in PARSED:
        exec(compiled, dict(names_of_examples))
