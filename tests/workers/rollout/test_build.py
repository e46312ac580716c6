"""What building an engine leaves of the process that it is built in."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.workers.rollout_engines import LIMITS, make_model
from tests.workers.samples import tiny_config
from workers.config import RolloutConfig
from workers.rollout import build
from workers.rollout.vllm import engine, setup


@pytest.mark.parametrize("before", [None, "5"])
def test_the_devices_that_a_process_sees_are_as_found_when_its_engine_is_built_or_not(
    before: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if before is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    seen: list[str] = []

    def start(*_: Any, **__: Any) -> None:
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        raise RuntimeError("vLLM does not start")

    make_model(tmp_path / "model")
    monkeypatch.setattr(engine, "VllmEngine", start)
    worker: Any = SimpleNamespace(device=torch.device("cuda", 1))
    with pytest.raises(RuntimeError, match="does not start"):
        build._vllm_engine(tiny_config(tmp_path), worker, LIMITS, None, "5,6")
    assert seen == ["5,6"]
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before


def engine_of(device_type: str, **keys: Any) -> str:
    rollout = RolloutConfig(**keys)
    build.settle_engine(rollout, device_type)
    return rollout.name


def test_by_default_gpus_have_vllm_where_it_is_installed_and_cpus_the_native_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(setup, "version", lambda package: setup.TESTED[0] + ".1")
    assert [engine_of(device) for device in ("cuda", "cpu")] == ["vllm", "native"]
    assert engine_of("cuda", name="hf") == "hf"
    monkeypatch.setattr(setup, "version", lambda package: "0.1")
    assert engine_of("cuda") == "native", "a version that is not tested is none"


def test_the_native_engine_on_gpus_is_said_to_be_that_of_cpus() -> None:
    (notice,) = build.settle_engine(RolloutConfig(name="native"), "cuda")
    assert "rollout.name=vllm is the one for GPUs" in notice
    assert build.settle_engine(RolloutConfig(name="native"), "cpu") == []
    assert build.settle_engine(RolloutConfig(name="vllm"), "cuda") == []


def test_fp8_is_told_to_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    asked: list[Any] = []
    monkeypatch.setattr(engine, "VllmEngine", lambda settings, *_, **__: asked.append(settings))
    config = tiny_config(tmp_path)
    config.actor_rollout_ref.rollout.quantization = "fp8"
    worker: Any = SimpleNamespace(device=torch.device("cuda", 0))
    build._vllm_engine(config, worker, LIMITS, None, None)
    assert asked[0].options == {"quantization": "fp8"}
