"""What stands for vLLM: an engine that notes what it is told, in the order of all that happens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from workers.rollout.base import EngineLimits
from workers.rollout.vllm.engine import VllmEngine
from workers.rollout.vllm.handover import Arrivals
from workers.rollout.vllm.in_process import InProcessVllm
from workers.rollout.vllm.setup import VllmSettings

LIMITS = EngineLimits(prompt_width=9, response_width=14)


class FakeLLM:
    """Takes all weights, and is told to sleep and to wake up."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.given: dict[str, Tensor] = {}
        self.llm_engine = self

    def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        self.log.append(method)
        if method == "load_tensors":
            self.given |= dict(args[0])
        answers = {"install_sampler": ["Fp8LinearMethod"], "finish_load": Arrivals()}
        return [answers.get(method)]

    def sleep(self, level: int) -> None:
        self.log.append(f"sleep {level}")

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.log.append(f"wake {tags}")

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        return True


def engine_on(
    monkeypatch: pytest.MonkeyPatch, folder: Any, log: list[Any], device_type: str = "cuda"
) -> VllmEngine:
    """Our engine with it in vLLM's place, told that it is on this device."""
    monkeypatch.setattr(InProcessVllm, "start", lambda self: FakeLLM(log))
    return VllmEngine(VllmSettings(str(folder), device_type=device_type), LIMITS)
