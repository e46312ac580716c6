"""The batch's columns as data: name, shape, dtype, who writes it. Roles call `require` before they read.

Letters in shapes: P = `data.max_prompt_length`, R = `data.max_response_length`, T = P + R. Prompts are padded on the
left, responses on the right; masks come from lengths, never from comparing ids with the pad id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_like.errors import MissingColumnError, nearest

if TYPE_CHECKING:
    from verl_like.protocol import DataProto


@dataclass(frozen=True)
class Column:
    """One row of the table."""

    name: str
    shape: str
    dtype: str
    written_by: str


_ROLLOUT = "rollout.generate_sequences"
_DATA = "the data loader"

COLUMNS: dict[str, Column] = {
    column.name: column
    for column in (
        Column("prompts", "[rows, P]", "int64", _ROLLOUT),
        Column("responses", "[rows, R]", "int64", _ROLLOUT),
        Column("input_ids", "[rows, T]", "int64", f"{_DATA} (width P), then {_ROLLOUT}"),
        Column("attention_mask", "[rows, T]", "int64", f"{_DATA} (width P), then {_ROLLOUT}"),
        Column("position_ids", "[rows, T]", "int64", f"{_DATA} (width P), then {_ROLLOUT}"),
        Column("response_mask", "[rows, R]", "int64", _ROLLOUT),
        Column("rollout_log_probs", "[rows, R]", "float32", _ROLLOUT),
        Column("old_log_probs", "[rows, R]", "float32", "actor.compute_log_prob"),
        Column("entropys", "[rows, R]", "float32", "actor.compute_log_prob"),
        Column("ref_log_prob", "[rows, R]", "float32", "ref.compute_ref_log_prob"),
        Column("values", "[rows, R]", "float32", "critic.compute_values"),
        Column("token_level_scores", "[rows, R]", "float32", "the reward"),
        Column("token_level_rewards", "[rows, R]", "float32", "the driver's KL penalty"),
        Column("advantages", "[rows, R]", "float32", "the driver's compute_advantage"),
        Column("returns", "[rows, R]", "float32", "the driver's compute_advantage"),
        Column("sample_index", "[rows]", "int64", "the driver's repeat by rollout.n"),
        Column("uid", "[rows]", "object", _DATA),
        Column("raw_prompt", "[rows]", "object", _DATA),
        Column("data_source", "[rows]", "object", _DATA),
        Column("reward_model", "[rows]", "object", _DATA),
        Column("extra_info", "[rows]", "object", _DATA),
    )
}


def require(batch: DataProto, *names: str) -> None:
    """Refuse a batch that lacks one of the columns, naming who writes it."""
    present = set(batch.non_tensor_batch)
    if batch.batch is not None:
        present |= {str(key) for key in batch.batch.keys()}
    for name in names:
        if name not in present:
            raise MissingColumnError(_missing(name, present))


def _missing(name: str, present: set[str]) -> str:
    column = COLUMNS.get(name)
    if column is None:
        return f"batch has no {name!r}; it has {', '.join(sorted(present)) or 'no columns'}.{nearest(name, present)}"
    text = f"batch has no {name!r} (written by {column.written_by})"
    role, _, method = column.written_by.partition(".")
    if method and " " not in role:
        text += f"; is the {role} role configured?"
    return text
