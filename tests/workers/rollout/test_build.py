"""Building an engine leaves its process unchanged."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from tests.workers.distributed import run
from tests.workers.rollout_engines import LIMITS, make_model
from tests.workers.samples import tiny_config
from verl_like import Worker
from workers.config import RolloutConfig
from workers.rollout import build
from workers.rollout.vllm import engine, setup


class LLM:
    """Stands for vLLM's; records its arguments and environment."""

    given: ClassVar[list[Any]] = []

    def __init__(self, **options: Any) -> None:
        names = ("RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES")
        LLM.given.append((options, {name: os.environ.get(name) for name in names}))

    def collective_rpc(self, method: str, args: Any = ()) -> list[Any]:
        return [["UnquantizedLinearMethod"]]


def start_on_two_devices(folder: Path) -> tuple[Any, dict[str, str], bool]:
    """Return a rank's arguments for vLLM, and whether it restores the environment."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "3,5"
    sys.modules["vllm"] = SimpleNamespace(LLM=LLM)
    setup.version = lambda package: setup.TESTED[0] + ".1"
    worker = Worker()
    worker.open_process_group()
    worker._device = torch.device("cuda", worker.rank)
    config = tiny_config(folder)
    rollout = config.actor_rollout_ref.rollout
    rollout.name, rollout.tensor_model_parallel_size = "vllm", 2
    before = dict(os.environ)
    built = build.build_engine(config, worker)
    assert built.is_follower == (worker.rank == 1)
    options, environment = LLM.given[0]
    asked = options["tensor_parallel_size"], options["distributed_executor_backend"]
    ours = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return asked, environment, ours == before


def test_each_rank_of_an_engine_has_its_share_on_its_own_device_and_sees_the_devices_as_found(
    tmp_path: Path,
) -> None:
    make_model(tmp_path / "model")
    for rank, (asked, environment, as_found) in enumerate(run(2, start_on_two_devices, tmp_path)):
        assert asked == (2, "external_launcher"), "no process of vLLM's, on a neighbor's device"
        own = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
        assert environment == own | {"CUDA_VISIBLE_DEVICES": "3,5"}
        assert as_found


def engine_of(device_type: str, **keys: Any) -> str:
    return build.engine_for(RolloutConfig(**keys), device_type)


def test_by_default_gpus_have_vllm_where_it_is_installed_and_cpus_the_native_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(setup, "version", lambda package: setup.TESTED[0] + ".1")
    assert [engine_of(device) for device in ("cuda", "cpu")] == ["vllm", "native"]
    assert engine_of("cuda", name="hf") == "hf"
    monkeypatch.setattr(setup, "version", lambda package: "0.1")
    assert engine_of("cuda") == "native", "a version that is not tested is none"


def test_the_native_engine_on_gpus_is_said_to_be_that_of_cpus() -> None:
    (notice,) = build.notices_of_engine("native", "cuda")
    assert "actor_rollout_ref.rollout.name=auto chooses vLLM if a supported version is" in notice
    assert build.notices_of_engine("native", "cpu") == []
    assert build.notices_of_engine("vllm", "cuda") == []


def test_fp8_is_told_to_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    asked: list[Any] = []
    monkeypatch.setattr(engine, "VllmEngine", lambda settings, *_, **__: asked.append(settings))
    config = tiny_config(tmp_path)
    config.actor_rollout_ref.rollout.quantization = "fp8"
    worker: Any = SimpleNamespace(device=torch.device("cuda", 0))
    build._vllm_engine(config, worker, LIMITS, None)
    assert asked[0].options == {"quantization": "fp8"}
