"""The batch's columns as data: name, shape, dtype, who writes it, which method reads it.

Letters in shapes: P = `data.max_prompt_length`, R = `data.max_response_length`, T = P + R. These
are widths of rectangles: columns of tokens are ragged, and hold no padding. In verl's layout
prompts are padded on the left, responses on the right. A response mask is 1 at the tokens that the
policy drew; it may have holes, and what lies in them is real, but read by no loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from torch import Tensor

from verl_like.batch.ragged import Column as TensorColumn
from verl_like.batch.ragged import Ragged
from verl_like.errors import MissingColumnError, nearest

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto


@dataclass(frozen=True)
class Column:
    """One row of the table."""

    name: str
    shape: str
    dtype: str
    note: str = ""
    """Which part of the driver writes it, or when and how its writers do."""
    role: str = ""
    """The role that writes it, if one does."""
    method: str = ""
    is_loaded: bool = False
    """Whether the data loader gives it, a prompt's part of it where a role writes it, too."""

    @property
    def written_by(self) -> str:
        """Who writes it, in words."""
        loader = ["the data loader"] if self.is_loaded else []
        role = [f"{self.role}.{self.method}"] if self.role else []
        return ", then ".join([*loader, *role]) + self.note


@dataclass(frozen=True)
class MethodColumns:
    """What a method of a role reads and writes."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    scores_as: str
    """Of a method that the score stage calls: what it is called in tables of sizes."""


_GENERATED = "rollout", "generate_sequences"


def _of_role(name: str, writer: str, note: str = "") -> Column:
    """A number for every response token, from a role's method."""
    role, _, method = writer.partition(".")
    return Column(name, "[rows, R]", "float32", note, role, method)


def _loaded(name: str, note: str = "") -> Column:
    """What a prompt's row brings with it."""
    return Column(name, "[rows]", "object", note, is_loaded=True)


COLUMNS: dict[str, Column] = {
    column.name: column
    for column in (
        Column("prompts", "[rows, P]", "int64", "", *_GENERATED),
        Column("responses", "[rows, R]", "int64", "", *_GENERATED),
        Column("input_ids", "[rows, T]", "int64", "", *_GENERATED, is_loaded=True),
        Column("attention_mask", "[rows, T]", "int64", "", *_GENERATED, is_loaded=True),
        Column("position_ids", "[rows, T]", "int64", "", *_GENERATED, is_loaded=True),
        Column("response_mask", "[rows, R]", "int64", "", *_GENERATED),
        Column("rollout_log_probs", "[rows, R]", "float32", "", *_GENERATED),
        Column(
            "rollout_truncated_log_probs",
            "[rows, R]",
            "float32",
            ", if truncated_log_probs",
            *_GENERATED,
        ),
        Column(
            "routed_experts",
            "[rows, T, layers, choices]",
            "uint8",
            ", if actor.router_replay.mode=R3 (int16 of more than 256 experts)",
            *_GENERATED,
        ),
        Column("token_versions", "[rows, R]", "int32", "", *_GENERATED),
        Column("policy_version", "[rows]", "int64", ": that of the oldest token", *_GENERATED),
        Column("draw_hash", "[rows]", "int64", "", *_GENERATED),
        Column("finish_reason", "[rows]", "object", "", *_GENERATED),
        Column("turn", "[rows, R]", "int64", ", of trajectories", *_GENERATED),
        Column("environment_rewards", "[rows, R]", "float32", ", of trajectories", *_GENERATED),
        Column("ended", "[rows]", "object", ", of trajectories", *_GENERATED),
        Column("episode", "[rows]", "object", ", of trajectories", *_GENERATED),
        Column("response_text", "[rows]", "object", "whoever decodes the responses first"),
        _of_role("old_log_probs", "actor.compute_log_prob"),
        _of_role("entropys", "actor.compute_log_prob"),
        Column("rollout_is_weights", "[rows, R]", "float32", "the driver's correct_rollout"),
        _of_role("sum_pi_squared", "actor.compute_log_prob", ", for an estimator"),
        _of_role("ref_log_prob", "ref.compute_ref_log_prob"),
        _of_role("values", "critic.compute_values"),
        Column(
            "value_version", "[rows]", "int64", ", for generators", "critic_copy", "compute_values"
        ),
        _of_role("rm_scores", "reward_model.compute_rm_score"),
        Column("token_level_scores", "[rows, R]", "float32", "the reward"),
        Column("step_ends", "[rows, R]", "bool", "the reward: where it put a score"),
        Column("token_level_rewards", "[rows, R]", "float32", "the driver's KL penalty"),
        Column("advantages", "[rows, R]", "float32", "the driver's compute_advantage"),
        Column("returns", "[rows, R]", "float32", "the driver's compute_advantage"),
        Column(
            "chosen_tokens", "[rows, R]", "bool", "the driver's choose_tokens, for clip_cov, kl_cov"
        ),
        Column("sample_index", "[rows]", "int64", "the driver's repeat by rollout.n"),
        Column("sample_number", "[rows]", "int64", "the driver's balance, if it shuffles"),
        Column("reward_baselines", "[rows]", "float32", "the driver's greedy_scores, for remax"),
        _loaded("uid"),
        _loaded("raw_prompt"),
        _loaded("data_source"),
        _loaded("reward_model"),
        _loaded("extra_info"),
        _loaded("row_columns", ", if rows have columns of their own"),
    )
}

NAMED = ("uid", "sample_index")
SEQUENCES = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask", *NAMED)
"""What a pass over the samples reads."""

F = TypeVar("F", bound=Callable[..., Any])


def batch_columns(
    reads: Sequence[str], writes: Sequence[Column] = (), scores_as: str = ""
) -> Callable[[F], F]:
    """Say of a role's method what it reads of a batch, under any configuration, and writes into it.

    Columns that stand in the table with this method need not be said. A method that the score stage
    is to call says what its passes are called in tables of sizes, `scores_as="teacher"`.
    """

    def mark(method: F) -> F:
        name = method.__name__
        COLUMNS.update({each.name: replace(each, method=name) for each in writes})
        written = tuple(each.name for each in COLUMNS.values() if each.method == name)
        said = MethodColumns(tuple(reads), written, scores_as)
        method.batch_columns = said  # type: ignore[attr-defined]
        return method

    return mark


def columns_of(worker_class: type, method: str) -> MethodColumns | None:
    """What a class, or the nearest one that it inherits from, says of a method."""
    for cls in worker_class.__mro__:
        said: MethodColumns | None = getattr(vars(cls).get(method), "batch_columns", None)
        if said is not None:
            return said
    return None


def reads_of(worker_class: type, method: str) -> tuple[str, ...] | None:
    """The columns that a worker's method reads; None where that is not known: it gets them all.

    The method says it (`batch_columns`), or its class in an attribute `READS`, method name ->
    columns, which is looked at first. A method that overrides another says it anew.
    """
    own: dict[str, tuple[str, ...]] = getattr(worker_class, "READS", {})
    said: MethodColumns | None = getattr(getattr(worker_class, method), "batch_columns", None)
    return own.get(method, None if said is None else said.reads)


def select_reads(batch: DataProto, worker_class: type, method: str) -> DataProto:
    """The batch with only those columns that the method reads and the batch has, by reference."""
    names = reads_of(worker_class, method)
    if names is None:
        return batch
    columns = batch.columns
    return batch.select(
        [name for name in names if name in columns],
        [name for name in names if name in batch.non_tensor_batch],
    )


def require(batch: DataProto, *names: str) -> None:
    """Refuse a batch that lacks one of the columns, naming who writes it."""
    present = {*batch.columns, *batch.non_tensor_batch}
    for name in names:
        if name not in present:
            raise MissingColumnError(_missing(name, present))


def _missing(name: str, present: set[str]) -> str:
    column = COLUMNS.get(name)
    if column is None:
        return (
            f"batch has no {name!r}; it has "
            f"{', '.join(sorted(present)) or 'no columns'}.{nearest(name, present)}"
        )
    text = f"batch has no {name!r} (written by {column.written_by})"
    return f"{text}; is the {column.role} role configured?" if column.role else text


def as_responses(batch: DataProto, rectangle: Tensor) -> TensorColumn:
    """A rectangle [rows, R] as the batch holds its responses: ragged, or as it is."""
    return held_as(batch.column("response_mask"), rectangle)


def held_as(column: TensorColumn, rectangle: Tensor) -> TensorColumn:
    """A rectangle as a column of its shape is held."""
    return column.like(rectangle) if isinstance(column, Ragged) else rectangle


def read_columns(batch: DataProto, *names: str) -> dict[str, Tensor]:
    """These columns as rectangles; a missing one is an error that says who writes it."""
    require(batch, *names)
    return {name: batch.padded(name) for name in names}


def token_rows(batch: DataProto, *names: str) -> list[list[np.ndarray]]:
    """The rows of each of these columns: without padding if all are ragged, else with it."""
    require(batch, *names)
    columns = [batch.column(name) for name in names]
    ragged = [column for column in columns if isinstance(column, Ragged)]
    if len(ragged) < len(columns):
        return [list(batch.padded(name).numpy()) for name in names]
    return [np.split(c.values.numpy(), c.lengths.cumsum(0)[:-1].numpy()) for c in ragged]


def token_counts(batch: DataProto) -> tuple[Tensor, Tensor]:
    """(prompt tokens, response tokens) of every row: what it attends to, in the loss or not."""
    require(batch, "attention_mask", "responses")
    whole, responses = batch.column("attention_mask"), batch.column("responses")
    if isinstance(whole, Ragged) and isinstance(responses, Ragged):
        return whole.lengths - responses.lengths, responses.lengths
    inside = batch.padded("attention_mask").bool()
    width = inside.shape[-1] - responses.shape[-1]
    return inside[:, :width].sum(dim=-1), inside[:, width:].sum(dim=-1)


def count_ones(batch: DataProto, name: str) -> Tensor:
    """[rows]: the sum of each row of a mask."""
    require(batch, name)
    column = batch.column(name)
    return column.sums() if isinstance(column, Ragged) else column.sum(dim=-1)


def rm_column(role: str) -> str:
    """The column of a reward model's scores in a batch that may hold those of several."""
    return "rm_scores" if role == "reward_model" else f"rm_scores of {role}"


def has_column(batch: DataProto, name: str) -> bool:
    """Whether the batch has this tensor column."""
    return name in batch.columns


def drawn_from(columns: Any) -> str:
    """The column of log-probs under the distribution that tokens were drawn from."""
    truncated = "rollout_truncated_log_probs"
    return truncated if truncated in columns.keys() else "rollout_log_probs"


def write_columns(batch: DataProto, **columns: Tensor) -> DataProto:
    """The batch with these columns added or replaced.

    Columns of the responses' shape are held as the responses are.
    """
    responses = batch.columns.get("response_mask")
    shape = None if responses is None else responses.shape
    return batch.set_columns(
        {
            name: as_responses(batch, column) if column.shape == shape else column
            for name, column in columns.items()
        }
    )
