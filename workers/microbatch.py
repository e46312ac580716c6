"""Cutting a rank's piece of a batch into mini- and micro-batches so that the cut never shows. Engines call this.

- The real rows of the piece are kept, pad rows of the dispatch are dropped (`Rows.take`), results are put back in place
  with zeros for the pad rows (`Rows.restore`).
- Mini-batch k of K is the set of global rows `g % K == k`: the same samples at every number of ranks (`mini_batch`).
- Every rank runs the same number of forward and backward passes: a rank with fewer rows runs dummy rows that nothing
  attends to in the loss (`micro_batches`), so that collectives match.
- Denominators are counts over the whole mini-batch, all ranks (`MiniBatch.num_rows`, `num_tokens`): losses divided by
  them are added up over micro-batches and ranks, never averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from verl_like.errors import BatchError, ConfigError
from workers.batch_keys import require

if TYPE_CHECKING:
    from verl_like.protocol import DataProto
    from workers.losses import Denominators

Columns = dict[str, Tensor]


@dataclass(frozen=True)
class Rows:
    """The real rows of one rank's piece: the columns asked for, and where they stand in the whole batch."""

    columns: Columns
    start: int
    total: int
    padded: int
    names: list[str]

    @classmethod
    def take(cls, data: DataProto, names: Sequence[str], device: torch.device, world_size: int = 1) -> Rows:
        """Columns of the real rows on `device`; a piece that no dispatch cut is refused on more than one rank."""
        require(data, *names)
        if data.shard is None and world_size > 1:
            raise BatchError(
                f"a batch of {len(data)} rows reached one of {world_size} ranks without its place in the whole batch; "
                "call the method through its worker group, which splits the batch."
            )
        real = data.num_real_rows
        columns = {name: data.batch[name][:real].to(device) for name in names}
        start, total = (0, real) if data.shard is None else (data.shard.start, data.shard.total)
        return cls(columns, start, total, len(data), sample_names(data, start)[:real])

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def restore(self, column: Tensor) -> Tensor:
        """A result for the real rows as a float32 CPU column of the piece's length, zero in the pad rows."""
        result = torch.zeros((self.padded, *column.shape[1:]), dtype=torch.float32)
        result[: len(column)] = column
        return result


def sample_names(data: DataProto, start: int) -> list[str]:
    """What messages call the rows: uid and sample index where the batch has them, else the row's number."""
    uids, index = data.non_tensor_batch.get("uid"), data.batch.get("sample_index")
    if uids is None:
        return [f"row {start + row}" for row in range(len(data))]
    return [str(uid) if index is None else f"{uid} sample {int(index[row])}" for row, uid in enumerate(uids)]


@dataclass(frozen=True)
class MiniBatch:
    """This rank's rows of one optimizer step, and the counts of the step over all ranks."""

    columns: Columns
    num_rows: int
    num_tokens: int
    num_micro_batches: int
    names: list[str]

    @property
    def denominators(self) -> Denominators:
        """What the losses divide by: response tokens, and rows that have any."""
        return {"batch_num_tokens": self.num_tokens, "global_batch_size": self.num_rows}


def count_mini_batches(total: int, mini_batch_size: int) -> int:
    """How many mini-batches a batch of `total` samples has; sizes that do not divide it are refused."""
    if total > 0 and 0 < mini_batch_size <= total and total % mini_batch_size == 0:
        return total // mini_batch_size
    valid = [size for size in range(1, total + 1) if total % size == 0]
    below = max((size for size in valid if size < mini_batch_size), default=None)
    above = min((size for size in valid if size > mini_batch_size), default=None)
    ways = " or ".join(str(size) for size in (below, above) if size is not None)
    raise ConfigError(
        f"a mini-batch of {mini_batch_size} samples does not divide the batch of {total} samples; nearest that do: "
        f"{ways or 'none, the batch is empty'}. ppo_mini_batch_size counts prompts: samples = prompts × rollout.n."
    )


def mini_batch(rows: Rows, index: int, count: int, micro_size: int, group: dist.ProcessGroup | None) -> MiniBatch:
    """Mini-batch `index` of `count` on this rank; collective over `group`, which shares the counts."""
    numbers = torch.arange(rows.start, rows.start + len(rows))
    mine = (numbers % count == index).nonzero().squeeze(1)
    columns = {name: column[mine.to(column.device)] for name, column in rows.columns.items()}
    mask = columns["response_mask"]
    counts = all_reduce(torch.stack([mask.any(dim=-1).sum(), mask.sum()]), group)
    passes = common_passes(len(mine), micro_size, mask.device, group)
    names = [rows.names[row] for row in mine.tolist()]
    return MiniBatch(columns, int(counts[0]), int(counts[1]), passes, names)


def common_passes(num_rows: int, micro_size: int, device: torch.device, group: dist.ProcessGroup | None) -> int:
    """The largest number of micro-batches that any rank of `group` needs."""
    if micro_size < 1:
        raise ConfigError(f"a micro-batch of {micro_size} samples per rank is none; set it to 1 or more.")
    mine = torch.tensor([-(-num_rows // micro_size)], device=device)
    return int(all_reduce(mine, group, dist.ReduceOp.MAX))


def micro_batches(columns: Columns, micro_size: int, num_passes: int) -> Iterator[tuple[Columns, int]]:
    """`num_passes` pairs of (columns, real rows): the rows in order, then dummies of one row with no real row."""
    num_rows = len(next(iter(columns.values())))
    for start in range(0, num_passes * micro_size, micro_size):
        real = min(micro_size, num_rows - start)
        if real > 0:
            yield {name: column[start : start + real] for name, column in columns.items()}, real
        else:
            yield _dummy(columns), 0


def _dummy(columns: Columns) -> Columns:
    """One row of zeros that may be attended to (no NaN) and that no loss counts (its response mask is zero)."""
    dummy = {name: column.new_zeros((1, *column.shape[1:])) for name, column in columns.items()}
    dummy["attention_mask"] = torch.ones_like(dummy["attention_mask"])
    return dummy


def all_reduce(
    values: Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """`values` reduced over the ranks of `group`, in place; None is this rank alone."""
    if group is not None:
        dist.all_reduce(values, op=op, group=group)
    return values
