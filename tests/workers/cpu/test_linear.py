from __future__ import annotations

import ctypes
import os
import resource
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.distributed import run
from tests.workers.gradients import ACTOR_COLUMNS, gradients
from tests.workers.samples import VOCAB, make_batch, started, tiny_config
from verl_like.process.info import OWN_PROCESS
from workers.cpu import linear, onednn
from workers.cpu.allocator import keep_freed_memory
from workers.cpu.linear import onednn_linears
from workers.roles.actor import ActorWorker
from workers.training.microbatch import MicroBatchBudget

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
}


def model_of(config_name: str, folder: Path) -> Any:
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, config_name)(**SIZES)
    )
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder / "model")
    return model


@pytest.mark.parametrize(
    ("family", "min_multiplications"),
    [("Qwen2Config", 1), ("Qwen3Config", 1), ("GemmaConfig", 2**40)],
)
def test_gradients_through_onednn_match_the_models_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, min_multiplications: int
) -> None:
    model_of(family, tmp_path)
    config = tiny_config(tmp_path, entropy_coeff=0.01, use_kl_loss=True)

    def actor_gradients() -> dict[str, torch.Tensor]:
        actor = started(ActorWorker, config, 1)
        return gradients(actor, make_batch(8), ACTOR_COLUMNS, MicroBatchBudget(rows=3))

    monkeypatch.setattr(linear, "MIN_MULTIPLICATIONS", min_multiplications)
    through_onednn = actor_gradients()
    monkeypatch.setattr(linear, "onednn_linears", lambda module: nullcontext())
    for name, gradient in actor_gradients().items():
        assert (through_onednn[name] - gradient).norm() <= 2e-6 * gradient.norm(), name


@pytest.mark.parametrize("mkl_is_faster", [True, False])
def test_an_engine_replaces_layers_only_on_cpus_where_onednn_is_faster(
    mkl_is_faster: bool, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn, "mkl_is_faster", lambda: mkl_is_faster)
    engine = started(ActorWorker, tiny_config(tiny_dir), 1).engine
    for device, may_replace in (("cpu", True), ("meta", False)):
        engine.device = torch.device(device)
        with engine.running():
            is_replaced = any("forward" in vars(child) for child in engine.module.modules())
        assert is_replaced == (may_replace and not mkl_is_faster)


def test_only_float32_layers_run_through_onednn(tmp_path: Path) -> None:
    module = model_of("Qwen2Config", tmp_path).bfloat16()
    ids = torch.arange(12).view(2, 6)
    plain = module(ids).logits
    with onednn_linears(module):
        assert torch.equal(module(ids).logits, plain)


NUM_ELEMENTS = 16 * 2**20


def page_faults_of_a_tensor(tiny_dir: Path) -> int:
    """Return the page faults of a tensor of 64 MiB, the twentieth one in a process that trains.

    By then the heap's layout is stable.
    """
    os.environ[OWN_PROCESS] = "1"
    started(ActorWorker, tiny_config(tiny_dir), 1)
    for _ in range(20):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(NUM_ELEMENTS)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return faults


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt"), reason="the allocator is not glibc's"
)
def test_a_training_process_reuses_the_memory_of_freed_tensors(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (faults,) = run(1, page_faults_of_a_tensor, tiny_dir)
    assert faults < 4 * NUM_ELEMENTS / resource.getpagesize() / 10
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    assert not keep_freed_memory()  # the user has chosen
