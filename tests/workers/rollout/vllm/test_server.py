"""`rollout.server_urls` beyond the contract: requests to a server, and its errors.

The contract suite runs on a real server (marker `vllm`); here one stands in for it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.rollout_engines import PROMPT, RESPONSE, load, settings
from tests.workers.samples import tiny_config
from tests.workers.vllm_servers import StandIn, stand_in_server
from verl_like.errors import ConfigError, RolloutError, WeightSyncError
from verl_like.process.machine import address_toward
from workers.roles.rollout import RolloutWorker
from workers.rollout.base import EngineLimits
from workers.rollout.sample import Sample
from workers.rollout.vllm.engine import VllmRolloutEngine
from workers.rollout.vllm.server import VllmServer
from workers.rollout.vllm.setup import VllmSettings
from workers.weights.full_weights import checksum_of

LIMITS = EngineLimits(prompt_width=PROMPT, response_width=RESPONSE, max_num_seqs=4)


@pytest.fixture
def server(
    folder: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, StandIn]]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with stand_in_server(folder, LIMITS) as url_and_rank:
        yield url_and_rank


def engine_of(folder: Path, url: str) -> VllmRolloutEngine:
    return VllmRolloutEngine(VllmSettings(str(folder)), LIMITS, server_url=url)


@pytest.fixture
def engine(folder: Path, model: Any, server: tuple[str, StandIn]) -> VllmRolloutEngine:
    engine = engine_of(folder, server[0])
    load(engine, model, 3)
    return engine


FREE = settings(stop_token_ids=(0,))


def test_requests_join_running_ones_and_aborted_ones_resume(
    engine: VllmRolloutEngine, server: tuple[str, StandIn]
) -> None:
    _, rank = server
    rank.held |= {1, 20}
    first, second = engine.submit([Sample([1]), Sample([20])], FREE)
    assert engine.collect(max_tokens=2) == {}
    (third,) = engine.submit([Sample([40])], FREE)
    finished: dict[int, Sample] = {}
    while third not in finished:
        finished |= engine.collect(seconds=0.2)
    assert finished[third].tokens.tolist() == list(range(40, 40 + RESPONSE))
    assert finished[third].log_probs.tolist() == [-float(n) for n in range(40, 40 + RESPONSE)]

    stopped = engine.abort([first])
    assert stopped[first].finish_reason == "abort"
    assert stopped[first].tokens.tolist() == [1, 2]
    assert len(rank.aborted) == 1
    rank.held.clear()
    (again,) = engine.submit([stopped[first]], FREE)
    finished |= engine.collect()
    assert finished[again].tokens.tolist() == list(range(1, 1 + RESPONSE))
    assert finished[second].tokens.tolist() == list(range(20, 20 + RESPONSE))
    assert finished[again].finish_reason == "length"
    assert engine.num_running == 0


def test_a_request_that_arrives_after_its_abort_is_aborted(
    engine: VllmRolloutEngine, server: tuple[str, StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, rank = server
    server_side: Any = engine.vllm
    ask, rank.held = server_side._ask, {1}
    late = threading.Event()

    def ask_early(path: str, body: Any = None) -> Any:
        reply = ask(path, body)
        if path == "/abort_requests" and not late.is_set():
            rank.aborted.clear()  # as if the request had not arrived yet
            late.set()
        return reply

    monkeypatch.setattr(server_side, "_ask", ask_early)
    (number,) = engine.submit([Sample([1])], FREE)
    engine.collect(max_tokens=2)
    assert engine.abort([number])[number].tokens.tolist() == [1, 2]
    assert late.is_set()
    assert not server_side._streams


def test_weights_arrive_while_the_server_is_paused(
    engine: VllmRolloutEngine, server: tuple[str, StandIn], model: Any
) -> None:
    _, rank = server
    assert engine.weights_checksum() == checksum_of(model.named_parameters())
    assert rank.weights.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(rank.weights[name], w) for name, w in model.named_parameters())

    rank.held.add(1)
    (number,) = engine.submit([Sample([1])], FREE)
    engine.collect(max_tokens=2)
    rank.calls.clear()
    load(engine, model, 4)
    places = [rank.calls.index(path) for path in ("/pause?mode=keep&clear_cache=false", "/resume")]
    assert places == [0, len(rank.calls) - 1]
    assert "/reset_prefix_cache?reset_running_requests=true" in rank.calls
    rank.held.clear()
    sample = engine.collect()[number]
    assert sample.versions.tolist() == [3] * 2 + [4] * (RESPONSE - 2)


def test_weights_reach_a_server_on_another_machine(
    folder: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server gets an address of this machine that others can reach."""
    host = address_toward("192.0.2.1")
    if host.startswith("127."):
        pytest.skip("this machine has no address but loopback")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # as the run's backends set it on one machine
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with stand_in_server(folder, LIMITS, host) as (url, rank):
        engine = engine_of(folder, url)
        assert isinstance(engine.vllm, VllmServer)
        assert engine.vllm._links.new_address().place.startswith(f"{host}:")
        load(engine, model, 3)
        assert rank.weights.keys() == dict(model.named_parameters()).keys()


def test_weights_that_change_on_their_way_are_rejected(
    engine: VllmRolloutEngine, server: tuple[str, StandIn], model: Any
) -> None:
    _, rank = server
    rank.damage = lambda: rank._arrivals.changed.append("lm_head.weight")
    with pytest.raises(WeightSyncError, match="1 changed on their way: lm_head.weight"):
        load(engine, model, 4)
    with pytest.raises(RolloutError, match="has no verified weights"):
        engine.generate([Sample([1])], FREE)


def test_a_server_that_rejects_weights_is_named(
    engine: VllmRolloutEngine, server: tuple[str, StandIn], model: Any
) -> None:
    def fail() -> None:
        raise ValueError("no room")

    server[1].damage = fail
    with pytest.raises(WeightSyncError, match="replies to /collective_rpc with 500: .*no room"):
        load(engine, model, 4)


def test_a_missing_server_is_named_with_the_command_to_start_it(folder: Path, model: Any) -> None:
    words = (
        r"the server http://127.0.0.1:9 \(.*rollout.server_urls\) cannot be reached .*Start it.*: "
        f"VLLM_SERVER_DEV_MODE=1 .*--model {folder} .*--max-model-len {PROMPT + RESPONSE} "
    )
    with pytest.raises(RolloutError, match=words):
        engine_of(folder, "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"vocab_size": 99, "hidden_size": 8},
            "has vocab_size 99 instead of 64, hidden_size 8 ins",
        ),
        ({"async_scheduling": True}, "has async_scheduling True instead of False"),
        ({"quantization": "fp8"}, "has quantization fp8 instead of None"),
        ({"max_model_len": 20}, f"has max_model_len 20, less than {PROMPT + RESPONSE}"),
    ],
)
def test_a_server_with_other_settings_is_rejected(
    folder: Path, server: tuple[str, StandIn], changes: dict[str, Any], words: str
) -> None:
    url, rank = server
    rank.facts_found |= changes
    with pytest.raises(RolloutError, match=words):
        engine_of(folder, url)


def test_a_server_of_another_version_is_rejected(folder: Path, server: tuple[str, StandIn]) -> None:
    url, rank = server
    rank.version = "0.41.0"
    with pytest.raises(ConfigError, match=f"tested with vllm from 0.32 .*found 0.41.0 at {url}"):
        engine_of(folder, url)


def test_a_server_that_dies_during_a_response_ends_the_take(
    engine: VllmRolloutEngine, server: tuple[str, StandIn]
) -> None:
    server[1].dies = True
    engine.submit([Sample([1])], FREE)
    with pytest.raises(RolloutError, match="(closed|lost) the connection .*restart the server"):
        engine.collect()
    assert engine.num_running == 0


@pytest.mark.parametrize("urls", [["http://a:1", "http://b:1"], []])
def test_every_rank_of_the_rollout_needs_its_own_server(
    one_layer_dir: Path, urls: list[str]
) -> None:
    config = tiny_config(one_layer_dir)
    config.actor_rollout_ref.rollout.name = "vllm"
    config.actor_rollout_ref.rollout.server_urls = urls
    if not urls:
        RolloutWorker(config)
        return
    with pytest.raises(
        ConfigError, match="has 2 entries, 2 of them different, .* rollout's 1 process"
    ):
        RolloutWorker(config)
