"""oneDNN's linear layers against torch's own; a row's bits do not depend on its neighbors."""

from __future__ import annotations

import ctypes
import os
import resource
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.workers.cpu.test_allocator import heap_info
from tests.workers.distributed import run
from tests.workers.gradients import ACTOR_COLUMNS, gradients
from tests.workers.samples import VOCAB, make_batch, started, tiny_config
from verl_like.process.info import OWN_PROCESS
from workers.cpu import onednn
from workers.cpu.allocator import keep_freed_memory
from workers.cpu.onednn import (
    MAX_CACHED_KERNELS,
    limit_kernel_caches,
    linear,
    linear_binary,
    linear_silu,
    onednn_linears,
    supports,
)
from workers.roles.actor import ActorWorker
from workers.training.microbatch import MicroBatchBudget

limit_kernel_caches()  # before `supports` builds the first kernel
SIZES = [(64, 128), (80, 48), (512, 64), (33, 70)]


@pytest.mark.parametrize(("width", "out"), SIZES)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_match_torch(width: int, out: int, bias: bool) -> None:
    states, weight, other = torch.randn(37, width), torch.randn(out, width), torch.randn(37, out)
    bias = torch.randn(out) if bias else None
    plain = functional.linear(states, weight, bias)
    for result, expected in (
        (linear(states, weight, bias), plain),
        (linear(states, weight.t().contiguous().t(), bias), plain),
        (linear_silu(states, weight, bias), functional.silu(plain)),
        (linear_binary("add", other, states, weight, bias), other + plain),
        (linear_binary("mul", other, states, weight, bias), other * plain),
    ):
        torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not supports(torch.ones(2, 2)), reason="torch without oneDNN's operation")
@pytest.mark.parametrize(("width", "out"), SIZES)
def test_bits_of_a_row_do_not_depend_on_other_rows(width: int, out: int) -> None:
    states, weight, other = torch.randn(300, width), torch.randn(out, width), torch.randn(300, out)
    for compute in (
        lambda rows: linear(states[rows], weight),
        lambda rows: linear_silu(states[rows], weight),
        lambda rows: linear_binary("mul", other[rows], states[rows], weight),
        lambda rows: linear_binary("add", other[rows], states[rows], weight),
    ):
        whole = compute(slice(None))
        for first, count in ((0, 2), (3, 5), (10, 64), (298, 2), (7, 131)):
            rows = slice(first, first + count)
            assert torch.equal(compute(rows), whole[rows])


def test_other_dtypes_devices_and_torch_builds_use_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not supports(torch.ones(2, 2, dtype=torch.bfloat16))
    assert not supports(torch.ones(2, 2, device="meta"))
    onednn._works.cache_clear()
    try:
        monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda *_: torch.zeros(4, 3))
        assert not supports(torch.ones(2, 2))
    finally:
        onednn._works.cache_clear()


def mebibytes_of_further_kernels() -> float:
    """Return the heap's growth from kernel `MAX_CACHED_KERNELS` to the last of 700 more."""
    limit_kernel_caches()
    states, weight = torch.ones(MAX_CACHED_KERNELS + 700, 32), torch.ones(32, 32)
    for rows in range(1, MAX_CACHED_KERNELS + 701):
        if rows == MAX_CACHED_KERNELS:
            before = heap_info().uordblks
        linear(states[:rows], weight)
    return (heap_info().uordblks - before) / 2**20


@pytest.mark.skipif(not supports(torch.ones(2, 2)), reason="torch without oneDNN's operation")
def test_the_kernel_cache_drops_unused_kernels() -> None:
    """The test measures the heap of a new process: torch's cache of 900 kernels takes 200 MiB."""
    (growth,) = run(1, mebibytes_of_further_kernels)
    assert growth < 40


def test_a_kernel_cache_limit_set_by_the_user_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in onednn.CACHE_LIMITS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    onednn.limit_kernel_caches()
    assert os.environ["LRU_CACHE_CAPACITY"] == "7"
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == str(onednn.MAX_CACHED_KERNELS)


MODEL_SIZES = {
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
        getattr(transformers, config_name)(**MODEL_SIZES)
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

    monkeypatch.setattr(onednn, "MIN_MULTIPLICATIONS", min_multiplications)
    through_onednn = actor_gradients()
    monkeypatch.setattr(onednn, "onednn_linears", lambda module: nullcontext())
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
