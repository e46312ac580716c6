"""Ranks of one vLLM engine make the same calls in order, also with slow or failing ranks."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.workers.distributed import run
from tests.workers.rollout.vllm.fakes import LIMITS, FakeLLM
from tests.workers.rollout_engines import load, make_model, requests_of
from verl_like import Worker
from workers.rollout.base import SamplingParams, followed_by_ranks
from workers.rollout.vllm.engine import VllmRolloutEngine
from workers.rollout.vllm.in_process import InProcessVllm, Lockstep
from workers.rollout.vllm.setup import VllmRequest, VllmSettings

SAMPLING = SamplingParams(max_tokens=14, stop_token_ids=(0,))


class Scripted(FakeLLM):
    """Gives each of its requests one token per pass."""

    def __init__(self, log: list[Any]) -> None:
        super().__init__(log)
        self.names: list[str] = []
        self.fails_at = -1

    def collective_rpc(self, method: str, args: Any = ()) -> list[Any]:
        if method == "sampled_for":
            count = len(args[0])
            return [(torch.zeros(count, 15, 1), torch.zeros(count, 15).int())]
        return super().collective_rpc(method, args)

    def step(self) -> list[Any]:
        self.log.append("step")
        if self.log.count("step") == self.fails_at:
            raise ValueError("no memory left")
        token = SimpleNamespace(token_ids=[9])
        return [SimpleNamespace(request_id=name, outputs=[token]) for name in self.names]

    def abort_request(self, names: list[str]) -> None:
        self.log.append(f"abort {names}")
        self.names = [name for name in self.names if name not in names]

    def get_num_unfinished_requests(self) -> int:
        return len(self.names)


class ScriptedVllm(InProcessVllm):
    def start(self) -> Any:
        return Scripted([])

    def add(self, request: VllmRequest) -> None:
        self.llm.log.append(f"add {request.number} {request.token_ids}")
        self.llm.names.append(str(request.number))


class Role:
    """Two calls, as the rollout's role makes them."""

    def __init__(self, engine: VllmRolloutEngine) -> None:
        self.engine = engine

    @followed_by_ranks
    def submit(self) -> list[int]:
        return self.engine.submit(requests_of([[11], [12, 13]]), SAMPLING)

    @followed_by_ranks
    def collect(self, seconds: float | None = None) -> Any:
        return sorted(self.engine.collect(seconds=seconds))

    @followed_by_ranks
    def abort(self) -> Any:
        return sorted(self.engine.abort())


def engine_of(folder: Path) -> VllmRolloutEngine:
    worker = Worker()
    worker.open_process_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workers.rollout.vllm.engine.InProcessVllm", ScriptedVllm)
        engine = VllmRolloutEngine(VllmSettings(str(folder)), LIMITS, lockstep=Lockstep(worker, 2))
    load(engine, make_model(folder / str(worker.rank)), 1)
    llm_of(engine).log.clear()
    return engine


def llm_of(engine: VllmRolloutEngine) -> Any:
    assert isinstance(engine.vllm, InProcessVllm)
    return engine.vllm.llm


def one_is_slow(folder: Path) -> Any:
    """Delay the second rank; time decides how far a call goes."""
    engine = engine_of(folder)
    role = Role(engine)
    if engine.is_follower:
        time.sleep(0.3)
    results = [role.submit(), role.collect(0.0), role.collect(0.0)]
    load(engine, make_model(folder / f"again {engine.is_follower}"), 2)
    results += [engine.num_running, role.abort(), role.collect(), engine.num_running]
    return results, llm_of(engine).log


def one_fails(folder: Path) -> Any:
    engine = engine_of(folder)
    role = Role(engine)
    if engine.is_follower:
        llm_of(engine).fails_at = 2
    role.submit()
    try:
        role.collect()
    except ValueError as error:
        return str(error)
    return role.engine.num_running


def test_the_other_ranks_repeat_the_calls_of_the_first(tmp_path: Path) -> None:
    make_model(tmp_path)
    (first, log), (second, followed) = run(2, one_is_slow, tmp_path)
    assert first == [[0, 1], [], [], 2, [0, 1], [], 0]
    assert second == [None, None, None, 2, None, None, 0]
    assert [entry for entry in log if entry != "sampled_for"] == followed
    assert followed.count("step") == 2
    assert "add 1 [12, 13]" in followed


def test_an_error_of_a_following_rank_is_raised_there_after_the_call(tmp_path: Path) -> None:
    make_model(tmp_path)
    assert run(2, one_fails, tmp_path) == [0, "no memory left"]
