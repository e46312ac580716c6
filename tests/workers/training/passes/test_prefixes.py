from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.gradients import ACTOR_COLUMNS, assert_equal_gradients, gradients
from tests.workers.samples import PROMPT, RESPONSE, make_batch, started, tiny_config
from tests.workers.training.passes.test_row_layout import saved_model
from verl_like.batch.protocol import DataProto
from verl_like.batch.ragged import RaggedTensor
from workers.columns import ROUTED
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.training.mfu import needed_flops
from workers.training.microbatch import Cuts, MicroBatchBudget
from workers.training.passes.packing import RowPasses, prefix_order, share_prefixes, shared_lengths

CPU = torch.device("cpu")


def samples_of_prompts(num_prompts: int, num_samples: int) -> DataProto:
    """Return samples of ragged prompts; the samples of a prompt are not neighbors."""
    batch = make_batch(num_prompts * num_samples).batch
    for name in ("input_ids", "attention_mask"):
        batch[name][:, :PROMPT] = batch[name][:num_prompts, :PROMPT].repeat(num_samples, 1)
    batch["prompts"] = batch["input_ids"][:, :PROMPT].clone()
    batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return DataProto(batch=batch)


def ragged(*rows: list[int]) -> RaggedTensor:
    return RaggedTensor.from_rows([torch.tensor(row) for row in rows], 16)


def last_read(*lengths: int) -> RaggedTensor:
    """Marks of rows that are read at their last token."""
    return RaggedTensor.from_rows([torch.arange(n) == n - 1 for n in lengths], 16)


def cut_by_prefixes(ids: RaggedTensor, reads: RaggedTensor, budget: MicroBatchBudget) -> Cuts:
    row_passes = RowPasses("packed", shares=True)
    return row_passes.cut(reads, budget, row_passes.prefixes(ids, reads))


def worker(cls: type, folder: Any, *, shares: bool, **model: Any) -> Any:
    sizes = {"ppo_mini_batch_size": 12, "ppo_micro_batch_size_per_gpu": 6}
    config = tiny_config(folder, model={"share_prefixes": shares, **model}, **sizes)
    config.critic.ppo_micro_batch_size_per_gpu = 6
    return started(cls, config, 10)


@pytest.mark.parametrize(
    ("cls", "columns", "option"),
    [(CriticWorker, ("values", "returns"), "lora"), (ActorWorker, ACTOR_COLUMNS, "checkpointing")],
)
def test_shared_prefixes_have_the_gradients_of_separate_rows(
    cls: type, columns: tuple[str, ...], option: str, tiny_dir: Path
) -> None:
    model = {"lora": {"lora_rank": 4}, "checkpointing": {"enable_gradient_checkpointing": True}}
    batch = samples_of_prompts(3, 4)
    shared, separate = (
        worker(cls, tiny_dir, shares=shares, **model[option]) for shares in (True, False)
    )
    assert shared.engine.row_passes.shares
    assert not separate.engine.row_passes.shares
    budget = MicroBatchBudget(rows=6)
    assert_equal_gradients(
        gradients(shared, batch, columns, budget), gradients(separate, batch, columns, budget)
    )


def test_a_pass_computes_every_prefix_once() -> None:
    rows = [[1, 2, 3, 4, 10], [1, 2, 3, 4, 11, 12], [1, 2, 5, 13], [7, 8]]
    ids, reads = ragged(*rows), last_read(5, 6, 4, 2)
    positions = ragged(*[list(range(len(row))) for row in rows])
    columns = {"input_ids": ids, "position_ids": positions}
    feed = RowPasses("packed", shares=True).feed(columns, reads, CPU)
    assert feed.inputs["input_ids"].tolist() == [[1, 2, 3, 4, 10, 11, 12, 5, 13, 7, 8]]
    assert feed.inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4, 4, 5, 2, 3, 0, 1]]
    assert feed.reads.tolist() == [4, 6, 8, 10]

    layout = feed.inputs["row_layout"]
    assert (layout.lengths, layout.queries) == ([5, 6, 4, 2], [5, 2, 2, 2])
    whole = feed.inputs["input_ids"][0][layout.sources].split(layout.lengths)
    assert [row.tolist() for row in whole] == rows

    copied, sources, results = layout.copied
    assert copied.lengths == [6, 5, 4, 2], "the longest first, for rectangles"
    copies = feed.inputs["input_ids"][0][sources].split(copied.lengths)
    assert [row.tolist() for row in copies] == [rows[1], rows[0], rows[2], rows[3]]
    assert sources[results].equal(torch.arange(11))


def test_tokens_that_are_read_are_not_shared() -> None:
    rows = [torch.tensor([1, 2, 3, 4])[:, None]] * 2
    reads = torch.tensor([False, False, True, True])
    assert shared_lengths(rows, [reads, reads]) == [0, 2]


@pytest.mark.parametrize("positions", [[0, 1, 2, 3, 1, 2, 3, 4], [5, 6, 7, 8, 0, 1, 2, 3]])
def test_rows_with_other_positions_are_not_shared(positions: list[int]) -> None:
    tokens = {
        "input_ids": torch.tensor([1, 2, 3, 4] * 2),
        "position_ids": torch.tensor(positions),
        "reads": torch.tensor([False, False, False, True] * 2),
    }
    assert share_prefixes(tokens, [4, 4], CPU) is None
    assert share_prefixes(tokens | {"position_ids": torch.arange(4).repeat(2)}, [4, 4], CPU)


def test_tokens_with_other_experts_are_not_shared() -> None:
    experts = torch.tensor([[0, 1], [2, 3], [0, 2], [1, 3]])
    tokens = {
        "input_ids": torch.tensor([1, 2, 3, 4] * 2),
        "position_ids": torch.arange(4).repeat(2),
        "reads": torch.tensor([False, False, False, True] * 2),
        ROUTED: torch.stack([experts, experts]).view(8, 1, 2),
    }
    prefixes = share_prefixes(tokens, [4, 4], CPU)
    assert prefixes is not None
    assert int(prefixes.computed.sum()) == 5
    tokens[ROUTED][5] = 1
    prefixes = share_prefixes(tokens, [4, 4], CPU)
    assert prefixes is not None
    assert int(prefixes.computed.sum()) == 7


def test_few_equal_tokens_are_not_shared() -> None:
    rows = [[1, *range(10 * row, 10 * row + 9)] for row in range(1, 6)]
    ids, reads = ragged(*rows), last_read(*[10] * 5)
    assert prefix_order(ids, reads, [10] * 5) is None


def test_samples_of_a_prompt_are_in_one_pass() -> None:
    prompts, responses = [[1, 2, 3], [9, 8, 7], [4, 4, 4]], [[11], [12, 13], [14, 15, 16]]
    rows = [prompt + response for response in responses for prompt in prompts]
    ids, reads = ragged(*rows), last_read(*[len(row) for row in rows])
    cuts = cut_by_prefixes(ids, reads, MicroBatchBudget(rows=3))
    assert [{tuple(rows[row][:3]) for row in cut} for cut in cuts] == [
        {(1, 2, 3)},
        {(4, 4, 4)},
        {(9, 8, 7)},
    ]
    longest_first = RowPasses("packed").cut(reads, MicroBatchBudget(rows=3))
    assert {len(rows[row]) for row in longest_first[0]} == {6}


def test_a_copied_token_costs_a_quarter_of_a_token() -> None:
    rows = [[*range(start, start + 8), sample] for start in (100, 200) for sample in range(9)]
    ids, reads = ragged(*rows), last_read(*[9] * 18)
    cuts = cut_by_prefixes(ids, reads, MicroBatchBudget(tokens=9 + 7 * 3))
    assert [len(rows_of_pass) for rows_of_pass in cuts] == [8, 6, 4]


def test_operations_count_a_shared_prefix_once(tiny_dir: Path) -> None:
    batch = samples_of_prompts(1, 8)
    batch.batch["attention_mask"][:] = batch.batch["response_mask"][:] = 1
    batch.batch["position_ids"][:] = torch.arange(PROMPT + RESPONSE)
    shared, separate = (worker(ActorWorker, tiny_dir, shares=shares) for shares in (True, False))
    for role in (shared, separate):
        role.update_actor(batch)
    difference = needed_flops(separate.engine, trains=True) - needed_flops(
        shared.engine, trains=True
    )
    per_token = 6 * sum(
        weight.numel()
        for name, weight in shared.engine.module.named_parameters()
        if weight.dim() > 1 and "embed" not in name and "lm_head" not in name
    )
    assert difference == 7 * (PROMPT - 1) * per_token


def test_windowed_attention_sees_the_shared_prefix(tmp_path: Path) -> None:
    saved_model(tmp_path, "mistral", {"sliding_window": 3})
    batch = samples_of_prompts(3, 4)
    shared, separate = (worker(ActorWorker, tmp_path, shares=shares) for shares in (True, False))
    assert shared.engine.row_passes.shares
    assert_equal_gradients(
        gradients(shared, batch, ACTOR_COLUMNS, MicroBatchBudget(rows=12)),
        gradients(separate, batch, ACTOR_COLUMNS, MicroBatchBudget(rows=12)),
    )
