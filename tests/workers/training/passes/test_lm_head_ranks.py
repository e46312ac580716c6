"""A head whose vocabulary is split over two ranks, in chunks of positions, next to a whole one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.workers.kept_ranks import run_kept
from tests.workers.models.architectures import VOCAB, build_tiny, tiny_model_config
from verl_like.batch.ragged import RaggedTensor
from verl_like.process.worker import Worker
from workers.parallel import tensor
from workers.training.passes import lm_head
from workers.training.passes.lm_head import TokenOutputs, token_columns
from workers.training.passes.packing import RowPasses

POSITIONS = 20


def errors(is_tied: bool) -> dict[str, float]:
    """Return relative errors of columns and gradients; the vocabulary is uneven."""
    Worker().open_process_group()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    config = tiny_model_config("qwen2")
    config.tie_word_embeddings, config.vocab_size = is_tied, VOCAB - 3
    whole, split = build_tiny(config).double(), build_tiny(config).double()
    vocab = tensor.split_module(split, mesh).vocab
    lm_head.CHUNK_BYTES = 4 * 64 * 3

    positions = RaggedTensor.from_rows([torch.arange(POSITIONS)] * 2, POSITIONS)
    tokens = torch.arange(2 * POSITIONS) * 7 % config.vocab_size
    inputs = {"input_ids": positions.with_values(tokens), "position_ids": positions}
    feed = RowPasses().feed(
        inputs, positions.with_values(positions.values > 2), torch.device("cpu")
    )
    labels = tokens.view(2, -1).roll(-1, dims=1)[feed.reads]

    results: list[dict[str, Any]] = []
    for model, shard, may_chunk in ((whole, None, False), (split, vocab, True)):
        token_outputs = TokenOutputs(0.7, entropy=True, sum_pi_squared=True)
        columns = token_columns(
            model, feed, labels, token_outputs, may_chunk=may_chunk, vocab=shard
        )
        (columns["log_probs"] * labels.sin() + columns["entropys"].cos()).sum().backward()
        numbers = {name: column.detach() for name, column in columns.items()}
        for name, weight in model.named_parameters():
            grad = weight.grad
            numbers[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        results.append(numbers)
    expected, ours = results
    return {n: float((ours[n] - value).norm() / value.norm()) for n, value in expected.items()}


@pytest.mark.parametrize("is_tied", [False, True])
def test_chunks_of_a_split_vocabulary_match_whole_logits(is_tied: bool) -> None:
    for by_name in run_kept(2, errors, is_tied):
        assert "sum_pi_squared" in by_name
        assert max(by_name.values()) < 1e-6, by_name
