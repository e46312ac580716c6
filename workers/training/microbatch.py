"""Split a rank's chunk of a batch into mini- and micro-batches.

- The real rows of the chunk are stored without padding, and pad rows of the dispatch are dropped
  (`Rows.from_batch`). Results are restored to the order of the rows, with zeros for pad rows
  (`Rows.restore`).
- Mini-batch k of K contains the global rows `g % K == k`: the same samples at every number of ranks
  (`mini_batch`); `workers.training.update` permutes the rows.
- Micro-batches are limited by rows or by tokens (`MicroBatchBudget`), longest rows first, so that
  the rows of a pass have similar lengths; rows that share prefixes are neighbors. Rows in which no
  token is read are in no micro-batch (`workers.training.passes.packing.RowPasses.cut`).
- Every rank runs the same number of forward and backward passes, so that collectives match. A rank
  with fewer micro-batches runs passes over a dummy row whose outputs are ignored (`micro_batches`).
- Denominators are counts over the whole mini-batch on all ranks (`MiniBatch.num_rows`,
  `num_tokens`). Losses divided by them are summed over micro-batches and ranks, never averaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl_like.batch.ragged import ColumnValues, RaggedTensor, join_ragged, to_padded
from verl_like.errors import BatchError, ConfigError, nearest_divisors
from workers.columns import require
from workers.config import LARGEST_PASS, tokens_per_pass

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto
    from workers.config import WorkersConfig
    from workers.config.rows import RowDataConfig
    from workers.losses.aggregate import Denominators

Columns = dict[str, Tensor]
"""Padded columns by name, as losses read them."""
RowColumns = dict[str, Any]
"""Columns of rows: a `RaggedTensor` for token columns, a tensor for the others."""
MicroBatches = Sequence[tuple[RowColumns, int]]
"""The columns and the number of real rows of every micro-batch."""
Cuts = list[list[int]]
"""The rows of every micro-batch."""
PassOutputs = dict[str, list[ColumnValues]]
"""Name -> one column of outputs per micro-batch."""


@dataclass(frozen=True)
class MicroBatchBudget:
    """The maximum size of a micro-batch on one rank: either `rows` or `tokens`, with prompts.

        MicroBatchBudget(tokens=16384)

    The padding of padded rows counts; packed rows have none.

    Args:
        rows: maximum rows.
        tokens: maximum tokens; a single longer row raises an error.
    """

    rows: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.rows is None) == (self.tokens is None):
            raise ValueError(
                f"a MicroBatchBudget needs either rows or tokens, not rows={self.rows} and "
                f"tokens={self.tokens}."
            )

    @classmethod
    def of(cls, data: RowDataConfig) -> MicroBatchBudget:
        """Return the budget of a recipe's passes: tokens if `use_dynamic_bsz`, otherwise rows."""
        if data.use_dynamic_bsz:
            return cls(tokens=data.max_token_len_per_gpu)
        return cls(rows=data.micro_batch_size_per_gpu)

    def halved(self) -> MicroBatchBudget | None:
        """Return half of this budget, or None if it is one row or one token."""
        rows = None if self.rows is None else self.rows // 2
        tokens = None if self.tokens is None else self.tokens // 2
        return MicroBatchBudget(rows, tokens) if rows or tokens else None

    def with_room(self, longest: int) -> MicroBatchBudget:
        """Return this budget, raised to a row of `longest` tokens if it counts tokens."""
        return self if self.tokens is None else MicroBatchBudget(tokens=max(self.tokens, longest))

    @property
    def keys(self) -> str:
        """The keys that set the budget of a trained model, for messages."""
        key = "micro_batch_size_per_gpu" if self.tokens is None else "max_token_len_per_gpu"
        return f"ppo_{key} of the actor or critic (data.{key} without PPO)"

    def __str__(self) -> str:
        return f"{self.rows} rows" if self.tokens is None else f"{self.tokens} tokens"


def pass_budget(config: WorkersConfig, rows: int, tokens: int | None = None) -> MicroBatchBudget:
    """Return the budget of a PPO role: `rows` if the actor counts rows, otherwise tokens.

    `tokens` is the role's own limit; the default is the limit of the actor.
    """
    if not config.actor_rollout_ref.actor.use_dynamic_bsz:
        return MicroBatchBudget(rows=rows)
    return MicroBatchBudget(tokens=tokens or tokens_per_pass(config))


def budget_of_actor(config: WorkersConfig) -> MicroBatchBudget:
    """Return the budget of the actor's passes; tokens if the policy is not trained."""
    actor = getattr(config.actor_rollout_ref, "actor", None)
    if actor is None:
        width = config.data.max_prompt_length + config.data.max_response_length
        return MicroBatchBudget(tokens=max(LARGEST_PASS, width))
    return pass_budget(config, actor.ppo_micro_batch_size_per_gpu)


@dataclass(frozen=True)
class Rows:
    """The real rows of one rank's chunk, on the CPU, and their positions in the whole batch."""

    columns: RowColumns
    places: Tensor
    """Position of each row in the whole or shuffled batch; it determines the mini-batch."""
    total: int
    """Rows of the whole batch."""
    names: list[str]
    mask: ColumnValues
    """The response mask (or the first column) as this rank received it, with pad rows."""

    @classmethod
    def from_batch(cls, data: DataProto, names: Sequence[str], num_ranks: int = 1) -> Rows:
        """Take columns of the real rows; reject a chunk for another number of ranks."""
        require(data, *names)
        if data.shard is None and num_ranks > 1:
            raise BatchError(
                f"a batch of {len(data)} rows reached one of {num_ranks} ranks without its place "
                "in the whole batch. Call the method through its worker group, which splits the "
                "batch."
            )
        if data.shard is not None and data.shard.count != num_ranks:
            raise BatchError(
                f"a batch was split for {data.shard.count} ranks, but the model's rows are "
                f"divided over {num_ranks}. Register the method with dispatch_mode="
                "verl_like.make_nd_compute_dataproto_dispatch_fn('train')."
            )

        real = data.num_real_rows
        columns_in = {name: data.column(name) for name in names}
        start, total = (0, real) if data.shard is None else (data.shard.start, data.shard.total)
        called = [f"row {start + row}" for row in range(real)]
        uids, index = data.non_tensor_batch.get("uid"), data.columns.get("sample_index")
        if uids is not None:
            called = [str(uid) for uid in uids[:real]]
            if isinstance(index, Tensor):
                called = [f"{uid} sample {int(index[row])}" for row, uid in enumerate(called)]
        columns = without_padding({name: c[:real].cpu() for name, c in columns_in.items()}, called)
        mask = columns_in.get("response_mask", columns_in[names[0]])
        return cls(columns, torch.arange(start, start + real), total, called, mask)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def restore(
        self, chunks: Sequence[ColumnValues], order: Sequence[Sequence[int]]
    ) -> ColumnValues:
        """Return the results `chunks` (`on_host`) as one column, in the order of the rows.

        `order` has the row numbers of each chunk's micro-batch; rows in no micro-batch are zero.
        Ragged results become a column of the same kind as the response mask.
        """
        rows = torch.tensor([row for numbers in order for row in numbers], dtype=torch.int64)
        if isinstance(chunks[0], Tensor):
            column = torch.cat([chunk for chunk in chunks if isinstance(chunk, Tensor)])
            result = torch.zeros((len(self.mask), *column.shape[1:]))
            result[rows] = column
            return result

        mask: RaggedTensor = self.columns["response_mask"]
        values = torch.zeros(len(mask.values))
        places = mask.with_values(torch.arange(len(values))).index_select(0, rows).values
        ragged = [chunk for chunk in chunks if isinstance(chunk, RaggedTensor)]
        values[places] = torch.cat([chunk.values for chunk in ragged])
        restored: RaggedTensor = mask.with_values(values)
        num_padded = len(self.mask) - len(self)
        if not isinstance(self.mask, RaggedTensor):
            return torch.cat([restored.padded(), torch.zeros(num_padded, *restored.shape[1:])])
        padding = self.mask[len(self) :]
        return join_ragged([restored, padding.with_values(torch.zeros(len(padding.values)))])


def without_padding(columns: Mapping[str, ColumnValues], names: Sequence[str]) -> RowColumns:
    """Return token columns as ragged columns; error messages call the rows `names`.

    A column that is as wide as `attention_mask` keeps the tokens that this mask marks. A column
    that is as wide as `response_mask` keeps the marked tokens of the response.
    """
    mask = columns.get("attention_mask")
    if mask is None:
        return dict(columns)
    if not (isinstance(mask, RaggedTensor) and bool((mask.values != 0).all())):
        columns = {name: to_padded(column) for name, column in columns.items()}
        mask = _real_tokens(to_padded(mask) != 0, names)

    spans = {mask.shape: mask}
    responses = columns.get("response_mask")
    if isinstance(responses, RaggedTensor):
        spans[responses.shape] = responses
    elif responses is not None:
        begin = mask.width - responses.shape[-1]  # the first column of responses
        starts = (mask.starts - begin).clamp(min=0)
        lengths = (mask.starts + mask.lengths - begin).clamp(min=0) - starts
        spans[responses.shape] = RaggedTensor.from_rectangle(responses, lengths, starts)

    ragged: RowColumns = {}
    for name, column in columns.items():
        span = spans.get(column.shape[: len(mask.shape)])
        is_kept = isinstance(column, RaggedTensor) and (
            span is None or torch.equal(column.lengths, span.lengths)
        )
        ragged[name] = column if span is None or is_kept else span.like(to_padded(column))
    return ragged


def _real_tokens(mask: Tensor, names: Sequence[str]) -> RaggedTensor:
    """Return the span of real tokens per row of a mask [..., T]; reject a row with a gap."""
    flat = mask.flatten(0, -2)
    begins = flat & ~flat.roll(1, dims=1).index_fill(1, torch.tensor([0]), False)
    gaps = (begins.sum(dim=1) > 1).nonzero()
    if len(gaps):
        row = int(gaps[0])
        first, second = begins[row].nonzero().squeeze(1)[:2].tolist()
        raise ConfigError(
            f"{names[row * len(mask) // len(flat)]} has a gap: its attention_mask is 1 from "
            f"column {first}, then 0, and 1 again from column {second}. The log-prob of the first "
            "token after the gap would be read at a pad token. Pad prompts on the left "
            "(tokenizer.padding_side='left') and responses on the right."
        )
    starts, lengths = begins.int().argmax(dim=1), flat.sum(dim=1)
    shape = mask.shape[:-1]
    return RaggedTensor.from_rectangle(mask, lengths.view(shape), starts.view(shape))


@dataclass(frozen=True)
class MiniBatch:
    """One rank's rows of a mini-batch, with the row and token counts over all ranks.

    Example:

        loss = losses.sum() / max(mini_batch.num_rows, 1)   # a contribution: ranks add them up

    Args:
        columns: this rank's rows.
        num_rows: rows over all ranks that have a token inside the response mask.
        num_tokens: tokens over all ranks inside the response mask.
        names: names of this rank's rows, for messages.
    """

    columns: RowColumns
    num_rows: int
    num_tokens: int
    names: list[str]
    prepared: dict[MicroBatchBudget, tuple[Cuts, MicroBatches]] = field(default_factory=dict)
    """Micro-batches under a budget, as `TrainEngine.prepare` returned them."""

    @property
    def denominators(self) -> Denominators:
        """The divisors of losses: the number of response tokens, and of rows with such tokens."""
        return {"batch_num_tokens": self.num_tokens, "global_batch_size": self.num_rows}


def count_mini_batches(total: int, mini_batch_size: int) -> int:
    """Return the number of mini-batches of `total` samples; the size must divide it.

    A smaller batch is one mini-batch: the last batch under `data.total_prompts` can be smaller.
    """
    if 0 < total < mini_batch_size:
        return 1
    if total > 0 and 0 < mini_batch_size and total % mini_batch_size == 0:
        return total // mini_batch_size

    ways = nearest_divisors(mini_batch_size, total)
    raise ConfigError(
        f"a mini-batch of {mini_batch_size} samples does not divide the batch of {total} samples; "
        f"nearest that do: {ways or 'none, the batch is empty'}. ppo_mini_batch_size counts "
        "prompts: samples = prompts × actor_rollout_ref.rollout.n."
    )


def mini_batch(
    rows: Rows,
    index: int,
    count: int,
    group: dist.ProcessGroup | None,
) -> MiniBatch:
    """Return mini-batch `index` of `count` on this rank.

    Collective: every rank of `group` must call this. The ranks add up their row and token counts on
    their hosts, so nothing waits for a device.
    """
    mine = (rows.places % count == index).nonzero().squeeze(1)
    columns = rows.columns
    if len(mine) < len(rows):
        columns = {name: column.index_select(0, mine) for name, column in columns.items()}

    in_loss = columns["response_mask"]
    per_row = in_loss.with_values(in_loss.values != 0).sums()
    counts = torch.stack([per_row.count_nonzero(), per_row.sum()])
    num_rows, num_tokens = all_reduce(counts, group).tolist()
    return MiniBatch(columns, num_rows, num_tokens, [rows.names[row] for row in mine.tolist()])


def split_largest(cuts: Sequence[Sequence[int]], lengths: Sequence[int], num_passes: int) -> Cuts:
    """Split the largest micro-batches until there are `num_passes`, or only single rows."""
    batches = [list(rows) for rows in cuts]
    while len(batches) < num_passes:
        several = [place for place, rows in enumerate(batches) if len(rows) > 1]
        if not several:
            break
        largest = max(several, key=lambda place: sum(lengths[row] for row in batches[place]))
        rows = batches[largest]
        batches[largest : largest + 1] = [rows[::2], rows[1::2]]
    return batches


def micro_batches(
    columns: RowColumns, cuts: Sequence[Sequence[int]], group: dist.ProcessGroup | None
) -> list[tuple[RowColumns, int]]:
    """Return the columns and the number of real rows of every micro-batch, followed by dummy ones.

    Every rank gets as many micro-batches as the rank with the most, and at least one. A dummy is
    one row without tokens, which no loss counts. Collective: every rank of `group` must call this.
    """
    most = all_reduce(torch.tensor([max(1, len(cuts))]), group, dist.ReduceOp.MAX)
    batches: list[tuple[RowColumns, int]] = []
    for rows in cuts:
        index = torch.tensor(rows)
        picked = {name: column.index_select(0, index) for name, column in columns.items()}
        batches.append((picked, len(rows)))
    for _ in range(int(most) - len(cuts)):
        batches.append(dummy_micro_batch(columns))
    return batches


def dummy_micro_batch(columns: RowColumns) -> tuple[RowColumns, int]:
    """Return a micro-batch of one row without tokens."""
    return {name: _dummy(column) for name, column in columns.items()}, 0


def _dummy(column: ColumnValues) -> ColumnValues:
    if isinstance(column, RaggedTensor):
        lengths = torch.zeros((1, *column.lengths.shape[1:]), dtype=torch.int64)
        return RaggedTensor(column.values[:0], lengths, column.width)
    return column.new_zeros((1, *column.shape[1:]))


def on_host(outputs: PassOutputs) -> PassOutputs:
    """Return the outputs in float32 on the CPU, which waits for the device only once."""
    columns = [column for chunks in outputs.values() for column in chunks]
    parts = [column.values if isinstance(column, RaggedTensor) else column for column in columns]
    if not parts:
        return outputs
    flat = torch.cat([part.float().flatten() for part in parts]).cpu()
    copies = iter(flat.split([part.numel() for part in parts]))

    def copy_of(column: ColumnValues) -> ColumnValues:
        part: Tensor = next(copies)
        if isinstance(column, RaggedTensor):
            return column.with_values(part.view(column.values.shape))
        return part.view(column.shape)

    return {name: [copy_of(column) for column in chunks] for name, chunks in outputs.items()}


def detached(column: ColumnValues) -> ColumnValues:
    """Return the column detached from the autograd graph, in the same memory."""
    if isinstance(column, RaggedTensor):
        return column.with_values(column.values.detach())
    return column.detach()


def floats(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Return metrics as numbers on the host, which waits for the device once."""
    if not metrics:
        return {}
    return dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))


def all_reduce(
    values: Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """Reduce `values` over the ranks of `group`, in place; None means only this rank."""
    if group is not None:
        dist.all_reduce(values, op=op, group=group)
    return values
