"""Memory from shapes, against the bytes of real tensors and torch's meta device."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, Qwen3MoeConfig

from tests.workers.kept_ranks import run_kept
from tests.workers.models.architectures import build_tiny, tiny_model_config
from tests.workers.samples import tiny_config
from verl_like.batch.protocol import DataProto
from workers.config import ModelConfig, ParallelConfig
from workers.cpu import onednn
from workers.cpu.allocator import keep_freed_memory
from workers.memory import LargestPass, RoleMemory, engine_memory
from workers.models import memory_shapes
from workers.models.attention import layer_configs
from workers.models.memory_shapes import ModelShapes, cached_widths, meta_model, model_shapes
from workers.models.state import local_shard
from workers.parallel import sharding
from workers.roles.actor import ActorWorker
from workers.training.engine import INPUTS
from workers.training.microbatch import RowColumns, Rows
from workers.training.role_model_spec import RoleModelSpec

DEEPSEEK_7B = LlamaConfig(
    hidden_size=4096,
    num_hidden_layers=30,
    num_attention_heads=32,
    intermediate_size=11008,
    vocab_size=102400,
    max_position_embeddings=4096,
    architectures=["LlamaForCausalLM"],
)
SMALL = LlamaConfig(
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=160,
    vocab_size=500,
    max_position_embeddings=256,
)
ROWS, PROMPT, RESPONSE = 3, 96, 64


def shapes_of(folder: Path, compute: torch.dtype = torch.float32) -> ModelShapes:
    return model_shapes(ModelConfig(path=str(folder)), "token", compute)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small Llama under `model`, including weights."""
    folder = tmp_path_factory.mktemp("small")
    AutoModelForCausalLM.from_config(SMALL).save_pretrained(folder / "model")
    return folder


@pytest.fixture
def worker(small: Path, monkeypatch: pytest.MonkeyPatch) -> ActorWorker:
    """An actor that computes as on a GPU, without oneDNN's linear layers."""
    monkeypatch.setattr(onednn, "onednn_linears", nullcontext)
    actor = ActorWorker(tiny_config(small))
    actor.init_model(1)
    return actor


def columns() -> RowColumns:
    width = PROMPT + RESPONSE
    ids = torch.randint(6, 500, (ROWS, width))
    values = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(width).expand(ROWS, width),
        "responses": ids[:, PROMPT:],
        "response_mask": torch.ones(ROWS, RESPONSE, dtype=torch.long),
    }
    batch = DataProto.from_dict({name: values[name] for name in INPUTS})
    return Rows.from_batch(batch, INPUTS, 1).columns


def saved_by(forward: Callable[[], Tensor], weights: list[nn.Parameter]) -> tuple[int, Tensor]:
    """Return bytes that autograd saves in a forward pass without weights, and the pass's result."""
    saved: dict[int, Tensor] = {}

    def save(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(save, lambda tensor: tensor):
        output = forward()
    for weight in weights:
        saved.pop(weight.untyped_storage().data_ptr(), None)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values()), output


def test_weights_and_passes_of_7b_equal_those_of_the_meta_device(tmp_path: Path) -> None:
    DEEPSEEK_7B.save_pretrained(tmp_path)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(DEEPSEEK_7B)
    shapes = shapes_of(tmp_path, torch.bfloat16)
    assert shapes.num_weights == sum(w.numel() for w in module.parameters()) == 6_910_365_696
    assert shapes.num_trained == shapes.num_weights
    assert shapes.num_outside_layers == 2 * 102400 * 4096 + 4096
    assert shapes.key_value_numbers == 2 * 30 * 4096

    # checkpointing saves the inputs of layers, and one layer
    body = shapes.body
    assert body is not None
    of_layer = 16 * 4096 + 8 * 4096 + 8 * 11008
    assert body.saved == pytest.approx(30 * of_layer, rel=0.02)
    less = shapes.trained_pass(8192, head=0, recomputed=99)
    assert less is not None
    beside_inputs = less.in_layer / 8192 - 31 * 2 * 4096
    # next to them: the layer's output, and its gradients (two of the states' width, and of the
    # MLP's one more than is freed meanwhile)
    of_gradients = 2 * (11008 + 3 * 4096)
    assert beside_inputs == pytest.approx(of_layer + of_gradients, rel=0.1)

    # a layer's own gradients are there next to what a pass saves
    saved = 8192 * body.saved
    moments = shapes.trained_pass(8192, head=1000, recomputed=0)
    assert moments is not None
    assert moments.in_layer > saved + 8192 * 2 * 11008
    assert moments.at_head == saved + 1000


@pytest.mark.parametrize(
    "case",
    [
        *("llama", "qwen3", "falcon", "gpt2", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
        "gemma4_text+heads",
    ],
)
def test_keys_and_values_have_the_widths_of_transformers_cache(case: str) -> None:
    model = build_tiny(tiny_model_config(case))
    cache = DynamicCache()
    with torch.no_grad():
        model(torch.arange(6, 16)[None], past_key_values=cache, use_cache=True)
    for layer, config in zip(cache.layers, layer_configs(model.config), strict=True):
        assert layer.keys.numel() + layer.values.numel() == 10 * sum(cached_widths(config))


def test_an_update_uses_the_memory_of_the_shapes(small: Path, worker: ActorWorker) -> None:
    engine, shapes = worker.engine, shapes_of(small / "model")
    with engine.running():
        saved, log_probs = saved_by(
            lambda: engine.reading.outputs(columns())["log_probs"].values, engine.parameters()
        )
        log_probs.sum().backward()
    tokens, reads = ROWS * (PROMPT + RESPONSE), ROWS * RESPONSE
    assert engine.packs
    assert shapes.body is not None
    logits = 4 * reads * shapes.outputs_per_read
    assert tokens * shapes.body.saved + logits == pytest.approx(saved, rel=0.1)

    weights = engine.parameters()
    in_bytes = 4 * shapes.num_trained
    assert in_bytes == sum(weight.nbytes for weight in weights)
    assert in_bytes == sum(weight.grad.nbytes for weight in weights if weight.grad is not None)
    assert engine.optimizer is not None
    engine.optimizer.step()
    moments = [t for state in engine.optimizer.state.values() for t in state.values()]
    assert 2 * in_bytes == pytest.approx(sum(moment.nbytes for moment in moments), rel=0.001)


def bytes_of_a_rank(small: Path) -> tuple[int, int]:
    """Return bytes of the weights and of a pass's activations, over two tensor-parallel ranks."""
    onednn.onednn_linears = nullcontext
    actor = ActorWorker(tiny_config(small, parallel=ParallelConfig(tp=2)))
    actor.init_model(1)
    shards: Any = [local_shard(weight) for weight in actor.engine.parameters()]
    with actor.engine.running():
        saved, _ = saved_by(
            lambda: actor.engine.reading.outputs(columns())["log_probs"].values, shards
        )
    return sum(weight.nbytes for weight in shards), saved


def test_a_tensor_parallel_rank_uses_the_memory_of_the_shapes(small: Path) -> None:
    config = ModelConfig(path=str(small / "model"))
    shapes, whole = (model_shapes(config, "token", torch.float32, tp) for tp in (2, 1))
    tokens, reads = ROWS * (PROMPT + RESPONSE), ROWS * RESPONSE
    for weights, saved in run_kept(2, bytes_of_a_rank, small):
        assert 4 * shapes.num_trained == weights
        expected, expected_whole = (
            tokens * model.body.saved + 4 * reads * model.outputs_per_read
            for model in (shapes, whole)
        )
        assert expected == pytest.approx(saved, rel=0.1)
        assert saved < 0.8 * expected_whole


def test_only_adapters_count_as_trained(small: Path) -> None:
    pytest.importorskip("peft")
    config = ModelConfig(path=str(small / "model"), lora_rank=2)
    shapes = model_shapes(config, "token", torch.float32)
    assert 0 < shapes.num_trained < shapes.num_weights / 20


def test_a_tower_is_outside_of_the_layers_that_fsdp_gathers_one_by_one(tmp_path: Path) -> None:
    module = build_tiny(tiny_model_config("qwen2_vl"))
    module.save_pretrained(tmp_path)
    shapes = model_shapes(ModelConfig(path=str(tmp_path)), "token", torch.float32)
    layers = module.model.language_model.layers.parameters()
    num_in_layers = sum(weight.numel() for weight in layers)
    assert shapes.num_weights - shapes.num_outside_layers == num_in_layers


def test_shapes_are_counted_again_only_for_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SMALL.save_pretrained(tmp_path)
    before = shapes_of(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(memory_shapes, "meta_model", None)
        assert shapes_of(tmp_path) == before

    LlamaConfig(**SMALL.to_dict() | {"num_hidden_layers": 2}).save_pretrained(tmp_path)
    assert shapes_of(tmp_path).num_layers == 2
    assert shapes_of(tmp_path, torch.bfloat16).compute_bytes == 2


def test_counting_a_large_model_takes_no_address_space(
    tmp_path: Path,
) -> None:
    DEEPSEEK_7B.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    if not keep_freed_memory():
        pytest.skip("this process's allocator is the user's choice, or not glibc's")
    before = address_space()
    module = meta_model(ModelConfig(path=str(tmp_path)), "token")
    assert address_space() - before < 2 * 2**30, "as if there were weights"
    del module


def address_space() -> int:
    """Return the bytes that this process has mapped, filled or not."""
    num_pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    return num_pages * os.sysconf("SC_PAGE_SIZE")


def test_a_pass_gathers_only_the_experts_of_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "SMALL_ELEMENTS", 0)
    sizes = {"num_hidden_layers": 3, "hidden_size": 64, "vocab_size": 100, "intermediate_size": 8}
    config = Qwen3MoeConfig(num_experts=8, moe_intermediate_size=32, **sizes)
    config.save_pretrained(tmp_path)
    of_layer = 8 * 3 * 32 * 64
    assert shapes_of(tmp_path).num_in_experts == 3 * of_layer

    def memory(ep: int, strategy: str = "fsdp") -> RoleMemory:
        model = ModelConfig(path=str(tmp_path))
        parallel = ParallelConfig(ep=ep)
        role_model = RoleModelSpec("", model, strategy=strategy, parallel=parallel, trains=True)
        return engine_memory(role_model, "actor", "pool", 8, "cuda", LargestPass(1, 1))

    assert memory(4).weights == memory(1).weights
    left_out = (1 - 1 / 4) * of_layer * 2  # bytes in bfloat16
    assert memory(1).gathered - memory(4).gathered == 2 * 2 * left_out  # two layers, and gradients
    once = "shard_grad_op"
    assert memory(1, once).gathered - memory(4, once).gathered == (3 + 2) * left_out
