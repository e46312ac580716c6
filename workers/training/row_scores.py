"""Scores of rows and of pairs, for reward models and preference losses: what a pass reads of them.

Example:

    engine = ScoreTrainEngine(RoleModelSpec("model.path", model_config, head="score"))
    engine.build(worker)                                        # frozen: no optim_config
    scores = engine.score_rows(data, MicroBatchBudget(rows=8))  # [rows]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl_like.batch.ragged import ColumnValues, RaggedTensor, join_ragged
from verl_like.errors import ConfigError
from workers.config.rows import SCORE_AT
from workers.parallel.offload import to_device
from workers.training.engine import TrainEngine
from workers.training.microbatch import MicroBatchBudget, RowColumns
from workers.training.passes.forward_backward import TOKENS, Reading
from workers.training.passes.lm_head import DEFAULT, TokenOutputs
from workers.training.passes.packing import Feed, read

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto
    from workers.training.role_model_spec import RoleModelSpec
    from workers.training.sharded_model import Model


class RowScores(Reading):
    """Reads a row's score from the scalar head; padding is never read."""

    inputs = TOKENS

    def __init__(self, score_at: str | None = None) -> None:
        """Set the position of the score.

        `score_at` is last_token (the head's output at the last real token of a row), legacy_mean
        (the mean of its outputs over all real tokens), or None to use the setting in the model's
        folder.
        """
        self.score_at = score_at

    def begin(self, model: Model) -> None:
        """Look up the position of the score in the model's folder."""
        super().begin(model)
        if self.score_at is None:
            self.score_at = getattr(model.module.config, "score_at", "last_token")
        if self.score_at not in SCORE_AT:
            raise ConfigError(
                f"the model {model.model_config.path!r}: config.json has "
                f"score_at={self.score_at!r}; valid: {', '.join(SCORE_AT)}."
            )
        self.folder_settings = {"score_at": self.score_at}

    def reads(self, columns: RowColumns) -> RaggedTensor:
        """Mark the tokens at which the score is read."""
        ids: RaggedTensor = columns["input_ids"]
        reads = torch.full((len(ids.values),), self.score_at == "legacy_mean")
        lengths = ids.lengths.flatten()
        reads[(lengths.cumsum(0) - 1)[lengths > 0]] = True
        return ids.with_values(reads)

    def outputs(self, columns: RowColumns, token_outputs: TokenOutputs = DEFAULT) -> RowColumns:
        """Run a forward pass; return `scores` [rows]."""
        model, device = self.model, self.model.device
        reads = self.reads(columns)
        feed = model.feed(columns, reads)
        numbers = feed.gathered({"": read(model.module, feed)[:, 0].float()})[""]
        rows = to_device(reads.value_rows()[reads.values], device)
        sums = torch.zeros(len(reads), device=device).index_add(0, rows, numbers)
        return {"scores": sums / to_device(reads.sums().clamp(min=1), device)}


SIDES = ("chosen", "rejected")
"""The names of a pair's two rows, in order."""


class Pairs(Reading):
    """Reads both rows of each pair, which a loss compares.

    A pair is one row of the batch, so neither the dispatch nor a pass can separate the two. Its
    columns are [pairs, 2, T]; passes run [2 * pairs, T], and the outputs are [pairs, 2, ...].
    """

    def __init__(self, of_rows: Reading) -> None:
        self.of_rows = of_rows
        self.inputs = of_rows.inputs

    def begin(self, model: Model) -> None:
        """Pass the loaded model to the reading of single rows."""
        super().begin(model)
        self.of_rows.begin(model)
        self.folder_settings = self.of_rows.folder_settings

    def reads(self, columns: RowColumns) -> RaggedTensor:
        """Mark the tokens of both sides at which the head is computed."""
        return self.of_rows.reads(rows_of_pairs(columns)).unflatten(0, (-1, 2))

    def feeds(self, columns: RowColumns) -> list[Feed]:
        """Return the arguments of every forward pass over a micro-batch of pairs."""
        parts = self._passes(columns)
        return [self.model.feed(part, self.of_rows.reads(part)) for part in parts]

    def outputs(self, columns: RowColumns, token_outputs: TokenOutputs = DEFAULT) -> RowColumns:
        """Run a forward pass over both sides; return [pairs, 2, ...] columns."""
        parts = self._passes(columns)
        outputs = [self.of_rows.outputs(part, token_outputs) for part in parts]
        if len(outputs) == 1:
            return {name: column.unflatten(0, (-1, 2)) for name, column in outputs[0].items()}
        chosen, rejected = outputs
        return {name: _paired(chosen[name], rejected[name]) for name in chosen}

    def _passes(self, columns: RowColumns) -> list[RowColumns]:
        """Return the rows of both sides, or of each side alone if rows may not share a pass."""
        sides = rows_of_pairs(columns)
        if not self.model.row_passes.apart:
            return [sides]
        places = [torch.arange(side, len(sides["input_ids"]), 2) for side in (0, 1)]
        return [{name: c.index_select(0, rows) for name, c in sides.items()} for rows in places]


def rows_of_pairs(columns: RowColumns) -> RowColumns:
    """Return the [pairs, 2, T] columns as [2 * pairs, T]: chosen and rejected alternate."""
    return {name: c.flatten() for name, c in columns.items() if isinstance(c, RaggedTensor)}


def _paired(chosen: ColumnValues, rejected: ColumnValues) -> ColumnValues:
    """Combine two [pairs, ...] columns into [pairs, 2, ...]."""
    if isinstance(chosen, Tensor) and isinstance(rejected, Tensor):
        return torch.stack([chosen, rejected], dim=1)
    assert isinstance(chosen, RaggedTensor), "both sides give one kind of column"
    assert isinstance(rejected, RaggedTensor), "both sides give one kind of column"
    in_turn = torch.arange(2 * len(chosen)).view(2, -1).T.flatten()
    return join_ragged([chosen, rejected]).index_select(0, in_turn).unflatten(0, (-1, 2))


class ScoreTrainEngine(TrainEngine):
    """A training engine that gives one score per row, for example for a reward model.

    Example:

        spec = RoleModelSpec("verifier.path", ModelConfig(path="models/verifier"), head="score")
        engine = ScoreTrainEngine(spec)
        engine.build(worker)                                # in `init_model`, on every rank
        scores = engine.score_rows(data, MicroBatchBudget(rows=8))          # [rows]
    """

    def __init__(
        self, model: RoleModelSpec, *, score_at: str | None = None, **settings: Any
    ) -> None:
        """Store the options; `build` loads the model.

        Args:
            model: the role's model, its sharding and its head.
            score_at: the position of the score; None takes `score_at` of the model's config.json.
            settings: keyword arguments of `workers.training.engine.TrainEngine`.
        """
        super().__init__(model, reading=RowScores(score_at), **settings)

    def score_rows(self, data: DataProto, budget: MicroBatchBudget) -> torch.Tensor:
        """Return scores [rows] of `data`, in passes of `budget`; 0 for a row without tokens."""
        scores: torch.Tensor = self.forward_rows(data, budget)["scores"]
        return scores
