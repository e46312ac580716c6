"""The table of the batch's columns: name, shape, dtype and writer.

The methods of the roles declare which columns they read (`batch_columns`).

Letters in shapes: P = `data.max_prompt_length`, R = `data.max_response_length`, T = P + R. These
are the widths of padded tensors (rectangles), which have verl's layout: prompts are padded on the
left, responses on the right. Token columns from the rollout are ragged, without padding. A response
mask is 1 at the tokens that the policy sampled, unless a stage has removed them from the loss. It
is 0 at other tokens, such as tool outputs, which are in no loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from torch import Tensor

from verl_like.batch.ragged import ColumnValues, RaggedTensor
from verl_like.errors import MissingColumnError, nearest

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto


@dataclass(frozen=True)
class Column:
    """A column of the batch: its name, shape and dtype, and who writes it.

    Example:

        Column("verdicts", "[rows]", "float32", role="verifier", method="compute_verdicts")

    Args:
        name: the key in `batch` or `non_tensor_batch`.
        shape: the sizes, such as "[rows, R]" for one number per response token.
        dtype: the element type, such as "float32".
        note: text after the writers: another writer, such as a stage, or a condition.
        role: the role that writes the column, if any.
        method: the method of the role that returns the column.
        is_loaded: whether the data loader provides the column, or its prompt part.
    """

    name: str
    shape: str
    dtype: str
    note: str = ""
    role: str = ""
    method: str = ""
    is_loaded: bool = False

    @property
    def written_by(self) -> str:
        """The writers of the column, as text."""
        loader = ["the data loader"] if self.is_loaded else []
        role = [f"{self.role}.{self.method}"] if self.role else []
        return ", then ".join([*loader, *role]) + self.note


@dataclass(frozen=True)
class MethodColumns:
    """Columns that a role's method reads and writes."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    scores: bool
    """True if the score stage calls the method."""


def _generated_column(
    name: str, shape: str, dtype: str, note: str = "", is_loaded: bool = False
) -> Column:
    """Return a column that the rollout writes."""
    return Column(name, shape, dtype, note, "rollout", "generate_sequences", is_loaded)


def _role_column(name: str, writer: str, note: str = "") -> Column:
    """Return a column with one number per response token, written by a role's method."""
    role, _, method = writer.partition(".")
    return Column(name, "[rows, R]", "float32", note, role, method)


def _loaded_column(name: str, note: str = "") -> Column:
    """Return a column with one object per row, from the prompt's row in the data."""
    return Column(name, "[rows]", "object", note, is_loaded=True)


TRAJECTORY = "trajectory"
"""Column with each trajectory's data, except its tokens."""
ROUTED = "routed_experts"
"""Column of the experts that the rollout's routers chose for every token."""
COLUMNS: dict[str, Column] = {
    column.name: column
    for column in (
        _generated_column("prompts", "[rows, P]", "int64"),
        _generated_column("responses", "[rows, R]", "int64"),
        _generated_column("input_ids", "[rows, T]", "int64", is_loaded=True),
        _generated_column("attention_mask", "[rows, T]", "int64", is_loaded=True),
        _generated_column("position_ids", "[rows, T]", "int64", is_loaded=True),
        _generated_column("response_mask", "[rows, R]", "int64"),
        _generated_column("rollout_log_probs", "[rows, R]", "float32"),
        _generated_column(
            "rollout_truncated_log_probs", "[rows, R]", "float32", " (if truncated_log_probs)"
        ),
        _generated_column(
            ROUTED,
            "[rows, T, layers, choices]",
            "uint8",
            " (with actor.router_replay.mode=R3; int16 above 256 experts)",
        ),
        _generated_column("token_versions", "[rows, R]", "int32"),
        _generated_column("policy_version", "[rows]", "int64"),
        _generated_column("sample_hash", "[rows]", "int64"),
        _generated_column("finish_reason", "[rows]", "object"),
        _generated_column("turn", "[rows, R]", "int64", " (trajectories)"),
        _generated_column("environment_rewards", "[rows, R]", "float32", " (trajectories)"),
        _generated_column("ended", "[rows]", "object", " (trajectories)"),
        _generated_column(TRAJECTORY, "[rows]", "object", " (trajectories)"),
        Column("response_text", "[rows]", "object", "the first stage that decodes responses"),
        _role_column("old_log_probs", "actor.compute_log_prob"),
        _role_column("entropys", "actor.compute_log_prob"),
        Column("rollout_is_weights", "[rows, R]", "float32", "the driver's correct_rollout"),
        _role_column("sum_pi_squared", "actor.compute_log_prob", " (for some estimators)"),
        _role_column("ref_log_prob", "ref.compute_ref_log_prob"),
        _role_column("values", "critic.compute_values"),
        Column(
            "value_version", "[rows]", "int64", " (on generators)", "critic_copy", "compute_values"
        ),
        _role_column("rm_scores", "reward_model.compute_rm_score"),
        Column("token_level_scores", "[rows, R]", "float32", "the reward"),
        Column("step_ends", "[rows, R]", "bool", "the reward"),
        Column("token_level_rewards", "[rows, R]", "float32", "the driver's KL penalty"),
        Column("advantages", "[rows, R]", "float32", "the driver's compute_advantage"),
        Column("returns", "[rows, R]", "float32", "the driver's compute_advantage"),
        Column(
            "chosen_tokens",
            "[rows, R]",
            "bool",
            "the driver's add_chosen_tokens (for clip_cov, kl_cov)",
        ),
        Column("sample_index", "[rows]", "int64", "the driver's repeat by rollout.n"),
        Column("sample_number", "[rows]", "int64", "the driver's balance (if it shuffles)"),
        Column("reward_baselines", "[rows]", "float32", "the driver's with_baselines (for remax)"),
        _loaded_column("uid"),
        _loaded_column("raw_prompt"),
        _loaded_column("data_source"),
        _loaded_column("reward_model"),
        _loaded_column("extra_info"),
        _loaded_column("row_columns", " (if rows have further columns)"),
        _loaded_column("players", " (if environments have several players)"),
        _loaded_column("images", " (if rows have images)"),
    )
}

IMAGES = "images"
"""Column with the references to each row's images (`workers.images`); in a pass, the images of its
tokens.
"""
PLAYERS = "players"
"""Column with the names of the players of each row's environment."""
ENVIRONMENT = "environment"
"""Column of the data that names a row's environment, if a run has several environments."""
NAMED = ("uid", "sample_index")
TOKENS = ("input_ids", "attention_mask", "position_ids")
SEQUENCE_COLUMNS = (*TOKENS, "responses", "response_mask", IMAGES, *NAMED)
"""The columns that a pass over the samples reads.

Example:

    @batch_columns(reads=SEQUENCE_COLUMNS)
    def judge(self, data): ...
"""

F = TypeVar("F", bound=Callable[..., Any])


def batch_columns(
    reads: Sequence[str], writes: Sequence[Column] = (), scores: bool = False
) -> Callable[[F], F]:
    """Declare the columns that a role's method may read, and those that it writes.

    Example:

        class Verifier(Worker):
            @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
            @batch_columns(["input_ids"], writes=[Column("verdicts", "[rows]", "float32")])
            def compute_verdicts(self, data: DataProto) -> DataProto: ...

    Args:
        reads: names of the columns that the call sends to the workers.
        writes: columns of the result; leave out those that `COLUMNS` lists for a method of this
            name.
        scores: whether the score stage of PPO calls the method.
    """

    def mark(method: F) -> F:
        name = method.__name__
        COLUMNS.update({column.name: replace(column, method=name) for column in writes})
        written = tuple(c.name for c in COLUMNS.values() if c.method == name)
        declaration = MethodColumns(tuple(reads), written, scores)
        method.batch_columns = declaration  # type: ignore[attr-defined]
        return method

    return mark


def declared_columns(worker_class: type, method: str) -> MethodColumns | None:
    """Return the columns that the class or its nearest base declares for a method, or None."""
    for cls in worker_class.__mro__:
        declaration: MethodColumns | None = getattr(vars(cls).get(method), "batch_columns", None)
        if declaration is not None:
            return declaration
    return None


def method_reads(worker_class: type, method: str) -> tuple[str, ...] | None:
    """Return the columns that a worker's method reads.

    None means that they are unknown, so that the method gets all columns. The attribute `READS` of
    the class (method name -> columns) takes precedence over the declaration of the method
    (`batch_columns`). A method does not inherit the declaration of the method that it overrides.
    """
    declared: dict[str, tuple[str, ...]] = getattr(worker_class, "READS", {})
    declaration: MethodColumns | None = getattr(
        getattr(worker_class, method), "batch_columns", None
    )
    return declared.get(method, None if declaration is None else declaration.reads)


def select_reads(batch: DataProto, worker_class: type, method: str) -> DataProto:
    """Return a batch with only the columns that the method reads, without a copy.

    If they are unknown, return the whole batch.
    """
    names = method_reads(worker_class, method)
    if names is None:
        return batch
    columns = batch.columns
    return batch.select(
        [name for name in names if name in columns],
        [name for name in names if name in batch.non_tensor_batch],
    )


def player_uid(uid: str, player: str) -> str:
    """Return the uid of a player's samples.

    It contains the player, so that advantages compare only samples of the same player.
    """
    return f"{uid}:{player}" if player else uid


def split_player_uid(uid: str) -> tuple[str, str]:
    """Split a player's uid into the prompt's uid and the player."""
    prompt_uid, _, player = uid.partition(":")
    return prompt_uid, player


def require(batch: DataProto, *names: str) -> None:
    """Reject a batch without one of the columns; the error names the writer."""
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
    if not column.role:
        return text
    return f"{text}. Check that the run has the role {column.role} and calls this method first."


def format_like(column: ColumnValues, rectangle: Tensor) -> ColumnValues:
    """Convert a rectangle to the format of a column of the same shape: ragged or padded."""
    return column.like(rectangle) if isinstance(column, RaggedTensor) else rectangle


def read_columns(batch: DataProto, *names: str) -> dict[str, Tensor]:
    """Return name -> column as a padded tensor; docs/dataflow.md lists the shapes.

        columns = read_columns(batch, "responses", "response_mask")     # each [rows, R]

    Raises:
        MissingColumnError: the batch lacks a column; the message names the writer.
    """
    require(batch, *names)
    return {name: batch.padded(name) for name in names}


def read_column(batch: DataProto, name: str) -> Tensor:
    """Return one column as a padded tensor, like `read_columns`."""
    return read_columns(batch, name)[name]


def sample_scores(batch: DataProto) -> Tensor:
    """Return each sample's score, [rows]: the sum of its `token_level_scores`."""
    return read_column(batch, "token_level_scores").sum(dim=-1)


def token_rows(batch: DataProto, *names: str) -> list[list[np.ndarray]]:
    """Return a list of rows for each of these columns, without padding if all are ragged."""
    require(batch, *names)
    columns = [batch.column(name) for name in names]
    ragged = [column for column in columns if isinstance(column, RaggedTensor)]
    if len(ragged) < len(columns):
        return [list(batch.padded(name).numpy()) for name in names]
    return [np.split(c.values.numpy(), c.lengths.cumsum(0)[:-1].numpy()) for c in ragged]


def token_counts(batch: DataProto) -> tuple[Tensor, Tensor]:
    """Return the numbers of prompt and response tokens of every row, in the loss or not."""
    require(batch, "attention_mask", "responses")
    mask, responses = batch.column("attention_mask"), batch.column("responses")
    if isinstance(mask, RaggedTensor) and isinstance(responses, RaggedTensor):
        return mask.lengths - responses.lengths, responses.lengths
    inside = batch.padded("attention_mask").bool()
    width = inside.shape[-1] - responses.shape[-1]
    return inside[:, :width].sum(dim=-1), inside[:, width:].sum(dim=-1)


def count_ones(batch: DataProto, name: str) -> Tensor:
    """Return the number of ones in each row of a mask, [rows]."""
    require(batch, name)
    column = batch.column(name)
    return column.sums() if isinstance(column, RaggedTensor) else column.sum(dim=-1)


def rm_column(role: str) -> str:
    """Return the name of the column with this reward model's scores."""
    return "rm_scores" if role == "reward_model" else f"rm_scores of {role}"


def sampled_log_probs_column(columns: Any) -> str:
    """Return the name of the column with log-probs under the distribution that was sampled from.

    If the rollout sets `truncated_log_probs`, this is the distribution after top-k and top-p.
    """
    truncated = "rollout_truncated_log_probs"
    return truncated if truncated in columns.keys() else "rollout_log_probs"


def write_columns(batch: DataProto, **columns: Tensor) -> DataProto:
    """Add or replace these columns in place, and return the batch.

    Columns with the shape of the response mask are converted to its format: ragged or padded.

    Example:

        batch = write_columns(batch, is_long=batch.batch["response_mask"].sum(dim=-1) > 512)
    """
    mask = batch.columns.get("response_mask")
    formatted: dict[str, ColumnValues] = dict(columns)
    for name, column in columns.items():
        if mask is not None and column.shape == mask.shape:
            formatted[name] = format_like(mask, column)
    return batch.set_columns(formatted)
