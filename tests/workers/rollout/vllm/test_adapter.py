"""A LoRA adapter goes to vLLM as files, and its base model stays there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.workers.rollout.vllm.fakes import engine_on
from tests.workers.rollout_engines import make_model
from verl_like.errors import ConfigError, WeightSyncError
from workers.config import ActorRolloutRefConfig, ModelConfig, RolloutConfig
from workers.models.lora import add_adapter
from workers.models.state import is_adapter
from workers.rollout.build_engine import takes_adapter
from workers.rollout.vllm.handover import AdapterFiles
from workers.rollout.vllm.setup import check_options

pytest.importorskip("peft")


def adapter_of(folder: Path, rank: int = 2) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return the configuration and an adapter of the model that this writes."""
    config = ModelConfig(path=str(folder), lora_rank=rank)
    module = make_model(folder)
    add_adapter(module, config)
    tensors = {n: torch.randn(p.shape) for n, p in module.named_parameters() if is_adapter(n)}
    return config, tensors


def test_the_files_are_a_peft_adapter_with_the_sent_numbers(tmp_path: Path) -> None:
    config, sent = adapter_of(tmp_path)
    files = AdapterFiles(config, str(tmp_path))
    assert files.num_elements == sum(tensor.numel() for tensor in sent.values())
    for _ in range(2):
        with files.written(sent.items()) as folder:
            stored = load_file(folder / "adapter_model.safetensors")
        assert not folder.exists()
        assert len(stored) == len(sent)
        for name, tensor in sent.items():
            assert stored[f"base_model.model.{name.replace('.default.', '.')}"].equal(tensor)
        sent = {name: tensor + 1 for name, tensor in sent.items()}


def test_an_adapter_that_does_not_fit_is_rejected(tmp_path: Path) -> None:
    config, sent = adapter_of(tmp_path)
    files = AdapterFiles(config, str(tmp_path))
    first, second = list(sent)[:2]
    del sent[first]
    sent[second] = torch.zeros(3, 3)
    sent["lm_head.weight"] = torch.zeros(1)
    words = f"missing.*{first}.*unknown.*lm_head.*of another shape.*{second}.*was sent"
    with pytest.raises(WeightSyncError, match=words), files.written(sent.items()):
        pass


def test_the_base_of_an_adapter_sleeps_in_host_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config, sent = adapter_of(tmp_path)
    log: list[Any] = []
    engine = engine_on(monkeypatch, tmp_path, log, adapter=config)
    engine.load_weights(sent.items())
    engine.commit(1)
    engine.sleep()
    assert log.count("load_adapter") == 1
    assert "load_tensors" not in log
    assert "sleep 1" in log


def test_only_vllm_in_process_gets_unmerged_adapters() -> None:
    rollout = RolloutConfig(name="vllm")
    policy = ActorRolloutRefConfig(model=ModelConfig(path="any", lora_rank=8), rollout=rollout)
    assert takes_adapter(policy)
    for other in (
        replace(policy, model=replace(policy.model, lora_rank=0)),
        replace(policy, rollout=replace(rollout, merge_lora=True)),
        replace(policy, rollout=replace(rollout, name="native")),
        replace(policy, rollout=replace(rollout, server_urls=["http://here:8000"])),
    ):
        assert not takes_adapter(other)


def test_setting_the_size_of_the_adapter_is_rejected() -> None:
    with pytest.raises(ConfigError, match="max_lora_rank: the engine sets this argument"):
        check_options({"max_lora_rank": 8})


@pytest.mark.vllm
def test_a_rank_larger_than_vllm_supports_is_rejected() -> None:
    from workers.rollout.vllm.in_process import lora_options

    assert lora_options(9)["max_lora_rank"] == 16
    with pytest.raises(ConfigError, match="lora_rank=1000: vLLM's largest adapter has rank 512"):
        lora_options(1000)
