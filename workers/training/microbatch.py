"""Cutting a rank's piece of a batch into mini- and micro-batches so that the cut never shows.

- The real rows of the piece are kept, pad rows of the dispatch are dropped (`Rows.take`), results
  are put back in place with zeros for the pad rows (`Rows.restore`).
- Mini-batch k of K is the set of global rows `g % K == k`: the same samples at every number of
  ranks (`mini_batch`); `workers.training.shuffle` gives the rows other places.
- Micro-batches are cut by rows or by tokens (`Budget`), longest rows first, so that one pass has
  rows of like length; rows of which nothing is asked are in none (`cut`).
- Every rank runs the same number of forward and backward passes: a rank with fewer runs passes over
  a dummy row of which nothing is asked (`passes`), so that collectives match.
- Denominators are counts over the whole mini-batch, all ranks (`MiniBatch.num_rows`,
  `num_tokens`): losses divided by them are added up over micro-batches and ranks, never averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from verl_like.errors import BatchError, ConfigError
from workers.columns import require
from workers.config.passes import LARGEST_PASS, tokens_per_pass

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto
    from workers.config import WorkersConfig
    from workers.losses.aggregate import Denominators

Columns = dict[str, Tensor]


@dataclass(frozen=True)
class Budget:
    """What one forward pass may hold on one rank: a number of rows, or of their real tokens."""

    rows: int | None = None
    tokens: int | None = None

    @classmethod
    def of(cls, use_dynamic_bsz: bool, rows: int, tokens: int) -> Budget:
        """The budget that a role's section sets: by tokens if `use_dynamic_bsz`, else by rows."""
        return cls(tokens=tokens) if use_dynamic_bsz else cls(rows=rows)


def pass_budget(config: WorkersConfig, rows: int, tokens: int | None = None) -> Budget:
    """What a pass of a role of PPO may hold: by rows if the actor is cut so, else by tokens.

    `tokens` are the role's own; by default it has the actor's.
    """
    if not config.actor_rollout_ref.actor.use_dynamic_bsz:
        return Budget(rows=rows)
    return Budget(tokens=tokens or tokens_per_pass(config))


def budget_of_actor(config: WorkersConfig) -> Budget:
    """As the actor's passes are cut; by tokens where a recipe samples a policy that none trains."""
    actor = getattr(config.actor_rollout_ref, "actor", None)
    if actor is None:
        width = config.data.max_prompt_length + config.data.max_response_length
        return Budget(tokens=max(LARGEST_PASS, width))
    return pass_budget(config, actor.ppo_micro_batch_size_per_gpu)


@dataclass(frozen=True)
class Rows:
    """The real rows of one rank's piece, on the CPU, and their place in the whole batch."""

    columns: Columns
    start: int
    total: int
    padded: int
    names: list[str]
    places: Tensor | None = None
    """What says each row's mini-batch; None is its place in the whole batch."""

    @classmethod
    def take(cls, data: DataProto, names: Sequence[str], world_size: int = 1) -> Rows:
        """Columns of the real rows; on several ranks a piece that no dispatch cut is refused."""
        require(data, *names)
        if data.shard is None and world_size > 1:
            raise BatchError(
                f"a batch of {len(data)} rows reached one of {world_size} ranks without its place "
                "in the whole batch; call the method through its worker group, which splits the "
                "batch."
            )

        real = data.num_real_rows
        columns = {name: data.batch[name][:real].cpu() for name in names}
        start, total = (0, real) if data.shard is None else (data.shard.start, data.shard.total)
        return cls(columns, start, total, len(data), sample_names(data, start)[:real])

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def restore(self, pieces: Sequence[Tensor], order: Sequence[Sequence[int]]) -> Tensor:
        """Results of the micro-batches `order` as one float32 CPU column of the piece.

        Rows that are in no micro-batch are zero.
        """
        result = torch.zeros((self.padded, *pieces[0].shape[1:]), dtype=torch.float32)
        for piece, numbers in zip(pieces, order, strict=False):
            result[list(numbers)] = piece.float().cpu()
        return result


def sample_names(data: DataProto, start: int) -> list[str]:
    """What messages call the rows: uid and sample index if the batch has them, or a number."""
    uids, index = data.non_tensor_batch.get("uid"), data.batch.get("sample_index")
    if uids is None:
        return [f"row {start + row}" for row in range(len(data))]
    if index is None:
        return [str(uid) for uid in uids]
    return [f"{uid} sample {int(index[row])}" for row, uid in enumerate(uids)]


@dataclass(frozen=True)
class MiniBatch:
    """This rank's rows of one optimizer step, and the counts of the step over all ranks."""

    columns: Columns
    num_rows: int
    num_tokens: int
    names: list[str]

    @property
    def denominators(self) -> Denominators:
        """What the losses divide by: response tokens, and rows that have any."""
        return {"batch_num_tokens": self.num_tokens, "global_batch_size": self.num_rows}


def count_mini_batches(total: int, mini_batch_size: int) -> int:
    """How many mini-batches a batch of `total` samples has; the size must divide it."""
    if total > 0 and 0 < mini_batch_size <= total and total % mini_batch_size == 0:
        return total // mini_batch_size

    valid = [size for size in range(1, total + 1) if total % size == 0]
    below = max((size for size in valid if size < mini_batch_size), default=None)
    above = min((size for size in valid if size > mini_batch_size), default=None)
    ways = " or ".join(str(size) for size in (below, above) if size is not None)
    raise ConfigError(
        f"a mini-batch of {mini_batch_size} samples does not divide the batch of {total} samples; "
        f"nearest that do: {ways or 'none, the batch is empty'}. ppo_mini_batch_size counts "
        "prompts: samples = prompts × rollout.n."
    )


def mini_batch(
    rows: Rows,
    index: int,
    count: int,
    group: dist.ProcessGroup | None,
    device: torch.device | None = None,
) -> MiniBatch:
    """Mini-batch `index` of `count` on this rank.

    Collective over `group`, whose ranks add up their counts on `device`.
    """
    places = rows.places
    if places is None:
        places = torch.arange(rows.start, rows.start + len(rows))
    mine = (places % count == index).nonzero().squeeze(1)
    columns = {name: column[mine] for name, column in rows.columns.items()}

    mask = columns["response_mask"] != 0
    own_counts = torch.stack([mask.any(dim=-1).sum(), mask.sum()])
    num_rows, num_tokens = all_reduce(own_counts.to(device), group).tolist()
    return MiniBatch(columns, num_rows, num_tokens, [rows.names[row] for row in mine.tolist()])


def cut(
    lengths: Sequence[int],
    budget: Budget,
    *,
    rectangles: bool = False,
    border: int | None = None,
    single: bool = False,
) -> list[list[int]]:
    """Row numbers of every micro-batch: longest rows first, none of length 0.

    With `rectangles` a row takes as many tokens of the budget as the longest of its micro-batch.
    Rows of more than `border` tokens share none with others; `single` rows share none at all.
    """
    if (budget.rows or budget.tokens or 0) < 1:
        raise ConfigError(f"{budget}: a micro-batch holds 1 row or token at least; raise its size.")

    asked = [row for row, length in enumerate(lengths) if length]
    order = sorted(asked, key=lambda row: -lengths[row])
    limit = budget.tokens
    if order and limit is not None and lengths[order[0]] > limit:
        raise ConfigError(
            f"a row of {lengths[order[0]]} tokens exceeds the budget of {limit} tokens per "
            "micro-batch; raise ppo_max_token_len_per_gpu to the longest prompt plus response."
        )

    if single:
        return [[row] for row in order]
    num_long = 0 if border is None else sum(lengths[row] > border for row in order)
    sides = (order[:num_long], order[num_long:])
    return [piece for side in sides for piece in _fill(side, lengths, budget, rectangles)]


def _fill(
    order: Sequence[int], lengths: Sequence[int], budget: Budget, rectangles: bool
) -> list[list[int]]:
    """The rows `order` in micro-batches as large as the budget."""
    if budget.rows is not None:
        size = budget.rows
        return [list(order[start : start + size]) for start in range(0, len(order), size)]

    limit = budget.tokens or 0
    cuts: list[list[int]] = []
    room = 0
    for row in order:
        size = lengths[cuts[-1][0]] if rectangles and room else lengths[row]
        if size > room:
            cuts.append([])
            room, size = limit, lengths[row]
        cuts[-1].append(row)
        room -= size
    return cuts


def passes(
    columns: Columns,
    cuts: Sequence[Sequence[int]],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Iterator[tuple[Columns, int, bool]]:
    """(columns, number of real rows, is the last) for every micro-batch, and for dummies after.

    Every rank runs as many passes as the one with the most, and one at least. Collective over
    `group`, by way of `device`. A dummy is one row of one token, which no loss counts: its response
    mask is zero.
    """
    count = max(1, len(cuts))
    if group is not None:
        own_count = torch.tensor([count], device=device)
        count = int(all_reduce(own_count, group, dist.ReduceOp.MAX))
    for number, rows in enumerate(cuts, 1):
        index = torch.tensor(rows)
        picked = {name: column[index] for name, column in columns.items()}
        yield picked, len(rows), number == count

    for number in range(len(cuts) + 1, count + 1):
        dummy = {name: column.new_zeros((1, *column.shape[1:])) for name, column in columns.items()}
        dummy["attention_mask"][..., 0] = 1
        yield dummy, 0, number == count


def all_reduce(
    values: Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """`values` reduced over the ranks of `group`, in place; None is this rank alone."""
    if group is not None:
        dist.all_reduce(values, op=op, group=group)
    return values
