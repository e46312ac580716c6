from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.workers.gradients import ACTOR_COLUMNS, gradients
from tests.workers.samples import VOCAB, make_batch, started, tiny_config
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError
from workers.models.causal_lm import empty_model
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.training.engine import INPUTS
from workers.training.microbatch import MicroBatchBudget, Rows
from workers.training.passes.attention import LocalMask, RowLayout, packed_attention
from workers.training.passes.forward_backward import Reading
from workers.training.passes.packing import RowPasses, needed_lengths
from workers.training.row_scores import RowScores

CPU = torch.device("cpu")


def odd_batch() -> DataProto:
    """Return ragged rows with an empty response, one of one token, and a mask with a hole."""
    batch = make_batch(8)
    batch.batch["response_mask"][0] = 0
    batch.batch["response_mask"][1, 1:] = 0
    batch.batch["attention_mask"][1, 7:] = 0
    batch.batch["response_mask"][2, 0] = 0
    return batch


def workers(folder: Path, packed: bool) -> tuple[ActorWorker, CriticWorker]:
    config = tiny_config(folder, entropy_coeff=0.01, use_kl_loss=True)
    config.actor_rollout_ref.model.use_remove_padding = packed
    return started(ActorWorker, config, 1), started(CriticWorker, config, 1)


def test_packed_rows_match_padded_rows(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64}
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        **sizes, word_embed_proj_dim=32, vocab_size=VOCAB, pad_token_id=0
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    batch, results = odd_batch(), []
    for packed in (True, False):
        actor, critic = workers(tmp_path, packed)
        with torch.no_grad():
            critic.engine.module.score.weight.normal_(generator=torch.Generator().manual_seed(0))
        assert actor.engine.packs == critic.engine.packs == packed
        results.append(
            (
                actor.compute_log_prob(batch)[0].batch,
                critic.compute_values(batch).batch,
                gradients(actor, batch, ACTOR_COLUMNS, MicroBatchBudget(rows=8)),
                gradients(critic, batch, ("values", "returns"), MicroBatchBudget(tokens=30)),
            )
        )
    (log_probs, values, *grads), (other_log_probs, other_values, *other_grads) = results
    torch.testing.assert_close(log_probs, other_log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(values, other_values, atol=1e-5, rtol=0)
    for mine, other in zip(grads, other_grads, strict=True):
        for name, grad in other.items():
            # the gradient of a key's bias is only rounding
            assert (mine[name] - grad).norm() <= 1e-5 * grad.norm() + 1e-7, name


def test_a_pack_has_only_the_needed_tokens(one_layer_dir: Path) -> None:
    columns = Rows.from_batch(odd_batch(), INPUTS).columns
    needed = needed_lengths(Reading().reads(columns))
    assert needed[0] == 0
    assert (needed <= columns["attention_mask"].lengths).all()
    assert RowScores().reads(columns).sums().tolist() == [1] * 8


def test_a_family_that_cannot_be_packed_is_padded_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = transformers.BloomConfig(
        hidden_size=32, n_layer=1, n_head=4, vocab_size=VOCAB, pad_token_id=0
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    with caplog.at_level(logging.WARNING):
        actor = started(ActorWorker, tiny_config(tmp_path), 1)
    assert not actor.engine.packs

    assert caplog.text.count("model type bloom runs on padded rows") == 1


@pytest.mark.parametrize("in_mask", [False, True])
@pytest.mark.parametrize("window", [None, 3, 50])
@pytest.mark.parametrize("lengths", [[7, 7, 7], [9, 8, 3, 1], [100, 95, 40, 2]])
def test_packed_attention_matches_attention_of_single_rows(
    lengths: list[int], window: int | None, in_mask: bool
) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, sum(lengths), 8) for heads in (4, 2, 2))
    mask, argument = (LocalMask(window), None) if in_mask else (None, window)
    packed, _ = packed_attention(
        None, query, key, value, mask, 0.3, RowLayout(lengths, CPU), argument
    )
    start = 0
    for length in lengths:
        q, k, v = (states[0, :, start : start + length] for states in (query, key, value))
        scores = q @ k.repeat_interleave(2, 0).transpose(1, 2) * 0.3
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance >= (window or length))
        expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 0)
        torch.testing.assert_close(
            packed[0, start : start + length], expected.transpose(0, 1), atol=1e-5, rtol=0
        )
        start += length


@pytest.mark.parametrize("lengths", [[100, 95, 40, 2], [9, 8, 3]])
def test_bfloat16_states_attend_in_float32_on_a_cpu(lengths: list[int]) -> None:
    torch.manual_seed(0)
    layout, results = RowLayout(lengths, CPU), []
    states = [torch.randn(1, heads, sum(lengths), 8).bfloat16() for heads in (4, 2, 2)]
    for dtype in (torch.bfloat16, torch.float32):
        leaves = [state.to(dtype).requires_grad_() for state in states]
        query, key, value = leaves
        output, _ = packed_attention(None, query, key, value, None, row_layout=layout)
        gradients = torch.autograd.grad(output.float().square().sum(), leaves)
        results.append([output, gradients[2]])  # a value's gradient is of one rounded output
    (ours, ours_grad), (theirs, theirs_grad) = results
    assert torch.equal(ours, theirs.bfloat16())
    torch.testing.assert_close(ours_grad.float(), theirs_grad, rtol=1e-2, atol=1e-2)


def test_a_token_outside_the_vocabulary_names_the_tokenizer(one_layer_dir: Path) -> None:
    actor, batch = started(ActorWorker, tiny_config(one_layer_dir), 1), make_batch(2)
    batch.batch["input_ids"][0, 5] = 10_000
    with pytest.raises(
        ConfigError, match="token id 10000 is outside the model's vocabulary of .* tokenizer"
    ):
        actor.compute_log_prob(batch)


def test_an_empty_model_has_buffers_and_no_weights(one_layer_dir: Path) -> None:
    module = empty_model(tiny_config(one_layer_dir).actor_rollout_ref.model, "token", CPU)
    assert all(parameter.is_meta for parameter in module.parameters())
    assert not any(buffer.is_meta for buffer in module.buffers())


def test_inputs_of_a_gpu_are_copied_from_locked_memory_without_a_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    columns = Rows.from_batch(odd_batch(), INPUTS).columns
    gpu, locked, sent = torch.device("cuda"), set(), []

    def lock(tensor: torch.Tensor) -> torch.Tensor:
        locked.add(id(tensor))
        return tensor

    def to(tensor: torch.Tensor, *args: Any, non_blocking: bool = False) -> torch.Tensor:
        if gpu in args:
            sent.append((id(tensor) in locked, non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", lock)
    monkeypatch.setattr(torch.Tensor, "to", to)
    for row_passes in (RowPasses("packed"), RowPasses("padded")):
        feed = row_passes.feed(columns, Reading().reads(columns), gpu)
        layout = feed.inputs.get("row_layout")
        if layout is not None:
            assert layout.rectangles[0].gather is not None
            assert len(layout.bounds) == len(layout.lengths) + 1
    assert len(sent) > 8
    assert set(sent) == {(True, True)}
