"""Responses that go on in a later call: from the samples of one call to the prompts of the next.

    batch = trainer.roll_out(prompts)                     # some have the finish reason "abort"
    rest = unfinished_rows(batch)                         # prompts, with what they have so far
    batch = trainer.roll_out(join_prompts(rest, more_prompts))

A response is unfinished where the generation was aborted, or where its call drew all that
`rollout.max_new_tokens_per_call` allows. `rollout.generate_sequences` reads the columns. It draws
the rest with the noise of the `attempt` in its own `meta_info`: give it that of the first call.
"""

from __future__ import annotations

import numpy as np
import torch

from verl_like.batch.protocol import DataProto
from workers.columns import COLUMNS, PARTIAL_RESPONSE, has_column, require
from workers.rollout.base import Output

_OPTIONAL = "partial_truncated_log_probs"
_NEEDED = {name: column for name, column in PARTIAL_RESPONSE.items() if name != _OPTIONAL}


def unfinished_rows(samples: DataProto) -> DataProto:
    """The rows whose responses are unfinished, as prompts that go on where they ended.

    They keep uid, sample index and all that the prompts brought with them.
    """
    require(samples, "finish_reason", "prompts", "uid", "sample_index", *_NEEDED.values())
    reasons = samples.non_tensor_batch["finish_reason"]
    rows = samples.select_idxs(np.flatnonzero(reasons == "abort"))
    tensors = {name: rows.batch[name] for name in rows.batch.keys() if not _is_made(name)}
    tensors["input_ids"] = rows.batch["prompts"]
    width = tensors["input_ids"].shape[1]
    for name in ("attention_mask", "position_ids"):
        tensors[name] = rows.batch[name][:, :width]
    for name, column in PARTIAL_RESPONSE.items():
        if has_column(rows, column):
            tensors[name] = rows.batch[column]
    objects = {name: v for name, v in rows.non_tensor_batch.items() if name != "finish_reason"}
    return DataProto.from_dict(tensors, objects, rows.meta_info)


def join_prompts(unfinished: DataProto, prompts: DataProto) -> DataProto:
    """One batch of rows that go on and, behind them, of rows that begin."""
    names = [name for name in PARTIAL_RESPONSE if has_column(unfinished, name)]
    shapes = {name: (len(prompts), *unfinished.batch[name].shape[1:]) for name in names}
    empty = {name: unfinished.batch[name].new_zeros(shape) for name, shape in shapes.items()}
    return DataProto.concat([unfinished, prompts.select().union(DataProto.from_dict(empty))])


def partial_outputs(data: DataProto) -> list[Output | None]:
    """What each real row of a batch of prompts has so far; None where it is yet to begin."""
    num_rows = data.num_real_rows
    if not has_column(data, "partial_responses"):
        return [None] * num_rows
    require(data, *_NEEDED)

    columns = {name: data.batch[name] for name in PARTIAL_RESPONSE if has_column(data, name)}
    lengths = columns.pop("partial_mask").sum(dim=1).tolist()
    outputs: list[Output | None] = []
    for row in range(num_rows):
        made = {name: column[row, : int(lengths[row])] for name, column in columns.items()}
        output = Output(
            made["partial_responses"],
            made["partial_log_probs"],
            "abort",
            made["partial_versions"].to(torch.int32),
            made.get(_OPTIONAL),
        )
        outputs.append(output if len(output.tokens) else None)
    return outputs


def _is_made(name: str) -> bool:
    """Whether the rollout writes this column."""
    return name in COLUMNS and COLUMNS[name].written_by.startswith("rollout.generate_sequences")
