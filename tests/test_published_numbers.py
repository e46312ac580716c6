"""The planner next to published measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from trainer.cli.plan import job_of
from workers.config.model import FSDPConfig, ModelConfig
from workers.memory import GIB, LargestPass, engine_memory
from workers.training.role_model_spec import RoleModelSpec

Case = dict[str, Any]
MODELS = ("actor_rollout_ref", "critic", "reward_model")


def read(name: str) -> Case:
    published: Case = json.loads((ROOT / f"tests/published/{name}.json").read_text())
    return published


def model_folder(root: Path, published: Case, name: str) -> Path:
    """Write the config.json of one of the file's models, without weights."""
    folder = root / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(published["models"][name]))
    return folder


@pytest.mark.long
def test_the_planner_picks_the_published_best_placement(tmp_path: Path) -> None:
    published = read("hybridflow")
    case = published["cases"][0]
    model = model_folder(tmp_path, published, case["model"])
    policy = "actor_rollout_ref"
    pinned = [  # fewer layouts to try
        f"{policy}.rollout.tensor_model_parallel_size=2",
        f"{policy}.rollout.gpu_memory_utilization=0.5",
        f"{policy}.actor.parallel.tp=1",
        "critic.parallel.tp=1",
    ]
    settings = [
        *(f"--gpus={case['gpus']}", f"--device={published['device']}", "--network-bandwidth=25e9"),
        *(f"{role}.model.path={model}" for role in MODELS),
        *(*published["settings"], *pinned),
    ]
    best = next(iter(job_of(settings).best(case["gpus"])))
    assert case["placement"] == "colocate"
    assert len(best.pools) == 1


def test_planned_memory_is_near_the_published_peaks(tmp_path: Path) -> None:
    published = read("prime_rl")
    for case in published["cases"]:
        path = str(model_folder(tmp_path, published, case["model"]))
        model = ModelConfig(path=path, enable_gradient_checkpointing=True)
        spec = RoleModelSpec("model.path", model, FSDPConfig(), trains=True)
        largest = LargestPass(case["tokens"], case["tokens"])
        memory = engine_memory(spec, "model", "all", case["gpus"], "cuda", largest)
        gib = (memory.resident + memory.call) / GIB
        assert gib == pytest.approx(case["GiB"], rel=0.12), case["name"]
