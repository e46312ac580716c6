from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.workers.gradients import ACTOR_COLUMNS, Gradients, gradients
from tests.workers.kept_ranks import run_kept
from tests.workers.samples import RESPONSE, VOCAB, make_batch, own_chunk, started, tiny_config
from verl_like.batch.protocol import DataProto
from workers.roles.actor import ActorWorker
from workers.training.microbatch import MicroBatchBudget
from workers.training.passes import lm_head
from workers.training.passes.lm_head import (
    TokenOutputs,
    chunking_blocker,
    positions_per_chunk,
    rows_per_chunk,
)

ROWS_OF_A_CHUNK = 3
BATCH = 9
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB}
GATED = {"num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 8}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("LlamaConfig", GATED),
    "tied": ("Qwen2Config", {**GATED, "tie_word_embeddings": True}),
    "with a bias": ("GPTJConfig", {"rotary_dim": 4}),
    "soft-capped": ("Gemma2Config", {**GATED, "final_logit_softcapping": 0.7}),
    "multiplied": ("CohereConfig", {**GATED, "logit_scale": 3.0}),
    "tied, not packed": ("BloomConfig", {}),
}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use chunks of three positions on models of VOCAB words."""
    monkeypatch.setattr(lm_head, "CHUNK_BYTES", 4 * VOCAB * ROWS_OF_A_CHUNK)


def save_model(head: str, folder: Path) -> Path:
    """Save a model with that head below `folder`/model."""
    name, sizes = HEADS[head]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**SIZES | sizes, pad_token_id=0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for weight in model.get_output_embeddings().parameters():
        nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of each kind of head, created once."""
    return functools.cache(lambda head: save_model(head, tmp_path_factory.mktemp("head")))


def actor_of(folder: Path, **model: Any) -> ActorWorker:
    config = tiny_config(folder, model=model, entropy_coeff=0.1, use_kl_loss=True)
    return started(ActorWorker, config, 1)


def assert_equal(grads: Gradients, expected: Gradients) -> None:
    """Compare with a tolerance for large logits, ten times that of other gradient tests."""
    assert grads.keys() == expected.keys()
    for name, grad in expected.items():
        assert (grads[name] - grad).norm() <= 1e-5 * grad.norm(), name


def expected_columns(folder: Path, data: DataProto, temperature: float) -> dict[str, Tensor]:
    """Return log-probs and entropies of each row in float64, from transformers' logits."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").double().eval()
    shape = (len(data), RESPONSE)
    columns = {name: torch.zeros(shape, dtype=torch.float64) for name in ("log_probs", "entropys")}
    for row in range(len(data)):
        tokens = data.batch["input_ids"][row][data.batch["attention_mask"][row].bool()]
        length = int(data.batch["response_mask"][row].sum())
        with torch.no_grad():
            logits = model(input_ids=tokens[None], use_cache=False).logits[0, -length - 1 : -1]
        log_probs = (logits / temperature).log_softmax(-1)
        columns["log_probs"][row, :length] = log_probs.gather(-1, tokens[-length:, None])[:, 0]
        columns["entropys"][row, :length] = -(log_probs.exp() * log_probs).sum(-1)
    return columns


@pytest.mark.parametrize("head", HEADS)
def test_chunks_match_the_columns_and_gradients_of_whole_logits(
    folders: Callable[[str], Path], head: str, small_chunks: None
) -> None:
    data = make_batch(BATCH)
    actor = actor_of(folders(head))
    engine = actor.engine
    assert chunking_blocker(engine.module.config) == ""
    columns = engine.forward_rows(
        data, MicroBatchBudget(rows=BATCH), TokenOutputs(0.7, entropy=True)
    )
    expected = expected_columns(folders(head), data, temperature=0.7)
    for name, column in expected.items():
        torch.testing.assert_close(columns[name].double(), column, atol=2e-5, rtol=0)

    whole = gradients(actor_of(folders(head), use_fused_kernels=False), data, ACTOR_COLUMNS)
    assert_equal(gradients(actor, data, ACTOR_COLUMNS, MicroBatchBudget(rows=2)), whole)


class LargestLogits(TorchDispatchMode):
    """Counts positions of the largest tensor whose last dim is the vocabulary.

    The transposed gradient of the head's weight does not count.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.positions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor) or result.dim() < 2 or result.shape[-1] != VOCAB:
            return result
        if result.shape[-2] != self.hidden_size:
            self.positions = max(self.positions, result.numel() // VOCAB)
        return result


@pytest.fixture
def logits_of_an_update(tiny_dir: Path) -> Callable[..., int]:
    """Return the most positions whose logits exist at once in an update."""

    def measure(**model: Any) -> int:
        actor = actor_of(tiny_dir, **model)
        with LargestLogits(actor.engine.module.config.hidden_size) as largest:
            actor.compute_log_prob(make_batch(BATCH))
            gradients(actor, make_batch(BATCH), ACTOR_COLUMNS, MicroBatchBudget(rows=BATCH))
        return largest.positions

    return measure


def test_no_tensor_has_the_logits_of_more_than_a_chunk(
    logits_of_an_update: Callable[..., int], small_chunks: None
) -> None:
    assert logits_of_an_update() == ROWS_OF_A_CHUNK
    num_tokens = int(make_batch(BATCH).batch["response_mask"].sum())
    assert logits_of_an_update(use_fused_kernels=False) == num_tokens


def test_small_logits_are_not_chunked(logits_of_an_update: Callable[..., int]) -> None:
    num_tokens = int(make_batch(BATCH).batch["response_mask"].sum())
    assert logits_of_an_update() == num_tokens


def on_ranks(folder: Path, num_rows_of_chunk: int) -> dict[str, Any]:
    """Return gradients and log-probs at one row per pass on several ranks."""
    lm_head.CHUNK_BYTES = 4 * VOCAB * num_rows_of_chunk
    actor = actor_of(folder)
    data = own_chunk(make_batch(7), actor.rank, actor.world_size)
    columns = actor.compute_log_prob(data)[0].batch
    return {
        "gradients": gradients(actor, data, ACTOR_COLUMNS, MicroBatchBudget(rows=1)),
        "log_probs": columns["old_log_probs"][: data.num_real_rows],
        "entropys": columns["entropys"][: data.num_real_rows],
    }


def test_two_ranks_in_chunks_match_one_rank_with_whole_logits(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders("tied")
    results = run_kept(2, on_ranks, folder, 2)
    monkeypatch.setattr(lm_head, "CHUNK_BYTES", lm_head.CHUNK_BYTES)
    one_rank = on_ranks(folder, 10_000)
    assert_equal(results[0]["gradients"], one_rank["gradients"])
    for name in ("log_probs", "entropys"):
        column = torch.cat([result[name] for result in results])
        torch.testing.assert_close(column, one_rank[name], atol=2e-5, rtol=0)


@pytest.mark.parametrize("target", ["all-linear", ["q_proj", "lm_head"]])
def test_adapters_get_the_same_gradients_in_chunks(
    folders: Callable[[str], Path], target: Any, small_chunks: None
) -> None:
    pytest.importorskip("peft")
    settings = {"lora_rank": 2, "target_modules": target}
    results = []
    for chunks in (True, False):
        actor = actor_of(folders("plain"), use_fused_kernels=chunks, **settings)
        with torch.no_grad():
            for name, weight in actor.engine.module.named_parameters():
                if ".lora_B." in name:  # initially zero, which makes the gradients of A zero
                    weight.copy_(torch.linspace(-0.1, 0.1, weight.numel()).view_as(weight))
                elif not weight.requires_grad:
                    weight.grad = torch.zeros_like(weight)
        results.append(gradients(actor, make_batch(4), ACTOR_COLUMNS))
    assert any(name.startswith("lm_head.lora") for name in results[0]) == ("lm_head" in target)
    assert_equal(*results)


def test_a_model_that_bypasses_its_base_model_keeps_whole_logits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert "OPTForCausalLM" in chunking_blocker(transformers.OPTConfig())
    assert "all logits of a pass are stored at once" in caplog.text


def test_a_chunk_on_a_gpu_has_at_least_1024_rows() -> None:
    for words, rows in ((151_936, 1024), (32_000, 2097)):
        config = transformers.Qwen2Config(vocab_size=words)
        assert rows_per_chunk(config, device_type="cuda") == rows
        assert positions_per_chunk(config, 5000, device_type="cuda") == rows


def test_a_pass_uses_the_chunk_size_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[Any] = []

    def record_device(*args: Any) -> int:
        devices.append(args[-1])
        return 4

    monkeypatch.setattr(lm_head, "positions_per_chunk", record_device)
    monkeypatch.setattr(lm_head, "read", lambda *_: torch.empty(4, VOCAB, device="meta"))
    module, labels = nn.Module(), torch.zeros(4, dtype=torch.long, device="meta")
    module.config = None
    lm_head.token_columns(module, None, labels, TokenOutputs())
    assert devices == ["meta"]
