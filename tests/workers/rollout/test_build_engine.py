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
from workers.rollout import build_engine
from workers.rollout.vllm import engine, setup


class LLM:
    """Stands for vLLM's; records its arguments and environment."""

    calls: ClassVar[list[Any]] = []

    def __init__(self, **options: Any) -> None:
        names = ("RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES")
        LLM.calls.append((options, {name: os.environ.get(name) for name in names}))

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
    built = build_engine.build_engine(config, worker)
    assert built.is_follower == (worker.rank == 1)
    options, environment = LLM.calls[0]
    parallelism = options["tensor_parallel_size"], options["distributed_executor_backend"]
    after = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return parallelism, environment, after == before


def test_each_rank_of_an_engine_uses_its_own_device(
    tmp_path: Path,
) -> None:
    make_model(tmp_path / "model")
    for rank, (parallelism, environment, is_restored) in enumerate(
        run(2, start_on_two_devices, tmp_path)
    ):
        assert parallelism == (2, "external_launcher"), "vLLM starts no process of its own"
        ranks = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
        assert environment == ranks | {"CUDA_VISIBLE_DEVICES": "3,5"}
        assert is_restored


def engine_of(device_type: str, **keys: Any) -> str:
    return build_engine.resolve_engine(RolloutConfig(**keys).name, device_type)


def test_the_default_engine_is_vllm_on_gpus_and_native_on_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(setup, "version", lambda package: setup.TESTED[0] + ".1")
    assert [engine_of(device) for device in ("cuda", "cpu")] == ["vllm", "native"]
    assert engine_of("cuda", name="hf") == "hf"
    monkeypatch.setattr(setup, "version", lambda package: "0.1")
    assert engine_of("cuda") == "native", "an untested version is not used"


def test_the_native_engine_on_gpus_has_a_notice() -> None:
    (notice,) = build_engine.notices_of_engine("native", "cuda")
    assert "actor_rollout_ref.rollout.name=auto chooses vLLM if a supported version is" in notice
    assert build_engine.notices_of_engine("native", "cpu") == []
    assert build_engine.notices_of_engine("vllm", "cuda") == []


@pytest.mark.parametrize(
    ("device", "capability", "scheme"),
    [
        ("cuda:0", (9, 0), "fp8_per_channel"),
        ("cuda:0", (8, 0), "fp8"),
        ("cpu", None, "fp8_per_channel"),
    ],
)
def test_fp8_is_passed_to_vllm(
    device: str,
    capability: tuple[int, int] | None,
    scheme: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    make_model(tmp_path / "model")
    calls: list[Any] = []
    monkeypatch.setattr(
        engine, "VllmRolloutEngine", lambda settings, *_, **__: calls.append(settings)
    )
    config = tiny_config(tmp_path)
    config.actor_rollout_ref.rollout.quantization = "fp8"
    worker: Any = SimpleNamespace(device=torch.device(device))
    build_engine._vllm_engine(config, worker, LIMITS, None)
    assert calls[0].options == {"quantization": scheme}
