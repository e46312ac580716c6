"""What an engine of vLLM's gives back while it sleeps, and takes again, in which order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from workers.rollout.vllm.engine import VllmEngine


class Recorded:
    """In the place of vLLM."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def sleep(self, level: int) -> None:
        self.told.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        self.told.append(("wake up", tags))

    def collective_rpc(self, method: str, args: tuple[int, ...]) -> list[None]:
        assert (method, len(args)) == ("use_version", 1)
        return [None]


def engine_on(device_type: str) -> tuple[VllmEngine, Recorded]:
    engine, llm = VllmEngine.__new__(VllmEngine), Recorded()
    engine.settings = SimpleNamespace(device_type=device_type)
    engine.llm, engine._running, engine._requests, engine._cache_sleeps = llm, {}, {}, False
    return engine, llm


def test_the_cache_comes_back_once_the_weights_are_there() -> None:
    engine, llm = engine_on("cuda")
    for version in (1, 2):
        engine.sleep()
        engine.wake_up()
        engine.commit(version)
    engine.commit(3)  # other weights, without a sleep
    once = [("sleep", 2), ("wake up", ["weights"]), ("wake up", ["kv_cache"])]
    assert llm.told == 2 * once


def test_on_a_cpu_vllm_has_no_sleep() -> None:
    engine, llm = engine_on("cpu")
    engine.sleep()
    engine.wake_up()
    engine.commit(1)
    assert llm.told == []
    assert engine.version == 1
