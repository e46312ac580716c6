"""A stand-in for vLLM that records its calls in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from workers.config import ModelConfig
from workers.rollout.base import EngineLimits
from workers.rollout.vllm.engine import VllmRolloutEngine
from workers.rollout.vllm.handover import Arrivals
from workers.rollout.vllm.in_process import InProcessVllm
from workers.rollout.vllm.setup import VllmSettings

LIMITS = EngineLimits(prompt_width=9, response_width=14)


class FakeLLM:
    """Accepts all weights, and calls to sleep, wake up and shut down."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.weights: dict[str, Tensor] = {}
        self.llm_engine = self.engine_core = self

    def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        self.log.append(method)
        if method == "load_tensors":
            self.weights |= dict(args[0])
        replies = {"install_sampler": ["Fp8LinearMethod"], "finish_load": Arrivals()}
        return [replies.get(method)]

    def sleep(self, level: int) -> None:
        self.log.append(f"sleep {level}")

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.log.append(f"wake {tags}")

    def shutdown(self) -> None:
        self.log.append("shut down")

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        return True


def engine_on(
    monkeypatch: pytest.MonkeyPatch,
    folder: Any,
    log: list[Any],
    device_type: str = "cuda",
    adapter: ModelConfig | None = None,
) -> VllmRolloutEngine:
    """Return our engine on this device, with the stand-in for vLLM."""
    monkeypatch.setattr(InProcessVllm, "start", lambda self: FakeLLM(log))
    return VllmRolloutEngine(
        VllmSettings(str(folder), device_type=device_type, adapter=adapter), LIMITS
    )
