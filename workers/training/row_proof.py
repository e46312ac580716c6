"""Choose the layout of rows in a pass: packed if that is correct, otherwise padded.

    row_passes = prove_rows(module, support, may_pack=True)     # a ConfigError if neither is right

Packed rows are faster, but wrong for a model that counts positions, carries a state from token to
token or looks at neighboring tokens. Therefore each layout is tested on a small model of the class
and compared with transformers' pass over each row separately. Some test rows exceed the small
model's windows, chunks and original context length, where the run's rows exceed the real model's.

The tokens of a packed row can be split over ranks only if no operation but attention mixes tokens.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl_like.batch.ragged import RaggedTensor
from verl_like.errors import ConfigError, nearest_divisors
from workers.models.classes import model_class
from workers.models.folder import factor_border
from workers.models.support.proof import NO_MODEL, Support, relative_error
from workers.models.support.stand_in import MODEL_ERRORS, POSITIONS, VOCABULARY
from workers.parallel.sequence import AttendRows, SequenceRanks
from workers.training.attention import packed_rows, takes_layout
from workers.training.microbatch import MicroBatchBudget, RowColumns
from workers.training.packing import Kind, RowPasses, model_inputs, read

logger = logging.getLogger(__name__)

LARGEST_ERROR = 3e-4
"""Largest relative error between two correct passes over a row; wrong layouts are off by 2e-3 or
more.

Rounding in float32 causes 1e-6, and 1e-4 where decays multiply up (minimax, gemma3n).
"""
PADDED_BY_USER = "use_remove_padding=false in the model's section"
"""Reason for padded rows when the user chose them."""
LENGTHS = (100, 57, 50, 33, 12, 9)
"""Lengths of the test rows; their sum exceeds the number of positions of a small model."""


def prove_rows(
    module: Any,
    support: Support,
    *,
    may_pack: bool,
    may_share: bool = False,
    group: dist.ProcessGroup | None = None,
) -> RowPasses:
    """Return the layout of this model's rows; log a warning if the model cannot pack them.

    Rows must be packed if there is a `group`, whose ranks share every pass. With `may_share`,
    shared prefixes are computed once if that is correct for this model.
    """
    kind, reason = row_kind(support, may_pack)
    ranks = None
    if group is not None:
        check_split(support, group.size(), reason)
        ranks = SequenceRanks(group, support.config.get_text_config().num_attention_heads)
    if reason not in ("", PADDED_BY_USER):
        logger.warning(
            "model type %s %s packed rows (%s), so it runs on padded rows, which is slower. Set "
            "use_remove_padding=false in the model's section to silence this warning.",
            support.model_type,
            "could not be tested on" if reason.startswith(NO_MODEL) else "does not support",
            reason,
        )
    border = factor_border(module.config)
    is_square = kind == "packed" and support.attention == "eager" and not takes_layout(module)
    may_share = may_share and kind == "packed" and ranks is None and border is None
    shares = may_share and takes_layout(module) and not support.why_not(prefixes_shared)
    return RowPasses(kind, border, is_square, ranks, shares)


def row_kind(support: Support, may_pack: bool = True) -> tuple[Kind, str]:
    """Return the correct layout for a class of models, and why it is not packed.

    Raise a ConfigError if no layout is correct.
    """
    reason = support.why_not(rows_packed) if may_pack else PADDED_BY_USER
    if not reason:
        return "packed", ""
    if reason.startswith(NO_MODEL):
        if not model_class(support.config).__name__.endswith("ForCausalLM"):
            raise ConfigError(
                f"model type {support.model_type} cannot be trained or scored on text: {reason}. "
                "Choose a model of another type."
            )
        return "padded", reason
    wrong = support.why_not(rows_padded)
    if not wrong or wrong.startswith(NO_MODEL):
        return "padded", reason

    in_eager = replace(support, attention="eager")
    if not (in_eager.why_not(rows_packed) and in_eager.why_not(rows_padded)):
        choice = "Set attn_implementation=eager in the model's section; its log-probs are right."
    else:
        choice = "Choose a causal LM of another type."
    raise ConfigError(
        f"model type {support.model_type} cannot be trained or scored, because padded rows do "
        f"not give the log-probs that transformers computes ({wrong}). It may look at later "
        f"tokens. {choice}"
    )


def check_split(
    support: Support, num_ranks: int, why_not_packed: str = "", section: str = "parallel"
) -> None:
    """Raise a ConfigError if ranks cannot share the tokens of this model's packed rows.

    `section` is the key of its `parallel` section.
    """
    # state space models have no heads
    num_heads = getattr(support.config.get_text_config(), "num_attention_heads", num_ranks)
    if num_ranks <= num_heads and num_heads % num_ranks:
        raise ConfigError(
            f"{section}.sp={num_ranks} does not divide the {num_heads} attention heads of model "
            f"type {support.model_type}; nearest that do: {nearest_divisors(num_ranks, num_heads)}."
        )
    reason = why_not_packed or support.why_not(rows_packed)
    if reason:
        reason = f"its rows do not run packed: {reason}"
    else:
        reason = support.why_not(find_split_fault)
    if reason:
        raise ConfigError(
            f"{section}.sp={num_ranks}: model type {support.model_type} cannot split a "
            f"row over several ranks: {reason}. Set {section}.sp=1; {section}.shard "
            "divides weights."
        )


def rows_packed(model: Any) -> str:
    """Return what is wrong with packed rows on this model."""
    return _find_fault(RowPasses("packed"), model)


def prefixes_shared(model: Any) -> str:
    """Return what is wrong with packed rows that share prefixes on this model."""
    return _find_fault(RowPasses("packed", shares=True), model)


def rows_padded(model: Any) -> str:
    """Return what is wrong with padded rows on this model."""
    return _find_fault(RowPasses("padded"), model)


@torch.no_grad()
def _find_fault(row_passes: RowPasses, model: Any) -> str:
    """Return what is wrong with rows in this layout; "" if nothing is."""
    columns, reads = probe_rows()
    expected = []
    try:
        # transformers' logits of each row separately
        for tokens, inside in zip(columns["input_ids"].rows(), reads.rows(), strict=True):
            expected.append(model(tokens[None], use_cache=False).logits[0, inside])
        if not all(row.isfinite().all() for row in expected):
            raise ValueError("its logits are not finite")
    except MODEL_ERRORS as error:
        return f"{NO_MODEL} ({error})"

    row_passes = replace(row_passes, border=factor_border(model.config))
    cpu, budget = torch.device("cpu"), MicroBatchBudget(rows=len(LENGTHS))
    with packed_rows(model) if row_passes.kind == "packed" else nullcontext():
        for rows in row_passes.cut(reads, budget):
            index = torch.tensor(rows)
            picked = {name: column.index_select(0, index) for name, column in columns.items()}
            try:
                feed = row_passes.feed(picked, reads.index_select(0, index), cpu)
                logits = read(model, feed)
            except MODEL_ERRORS as error:
                return f"it rejects such rows: {type(error).__name__}: {error}"
            sizes = [len(expected[row]) for row in rows]
            for row, actual in zip(rows, logits.split(sizes), strict=True):
                off_by = relative_error(actual, expected[row])
                if off_by > LARGEST_ERROR:
                    return (
                        f"a row of {LENGTHS[row]} tokens in a small model of its class is off by "
                        f"{off_by:.0e}"
                    )
    return ""


SLICES = (slice(0, 12), slice(12, 140), slice(140, None))
"""Slices of the packed test row: one below every limit, one that crosses rows, and the rest."""


class _RecordedRank:
    """Simulates ranks: records the inputs and outputs of attention, then returns slices of them."""

    def __init__(self) -> None:
        self.noted: list[list[Tensor]] = []
        self.part: slice | None = None
        self.error = 0.0

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, attend: AttendRows
    ) -> Tensor:
        states = [query, key, value]
        if self.part is None:
            self.noted.append([*states, attend(*states, sinks, None)])
            return self.noted[-1][3]
        *full_states, output = self.noted[self.num_calls]
        self.num_calls += 1
        for actual, expected in zip(states, full_states, strict=True):
            self.error = max(self.error, relative_error(actual, expected[self.part]))
        return output[self.part]

    def look_at(self, part: slice) -> None:
        self.part, self.num_calls = part, 0


def find_split_fault(model: Any) -> str:
    """Return what goes wrong if a packed row is computed in slices, with recorded attention."""
    columns, reads = probe_rows()
    every = reads.with_values(reads.values | True)
    feed = RowPasses("packed").feed(columns, every, torch.device("cpu"))
    ranks = _RecordedRank()
    feed.inputs["row_layout"].ranks = ranks
    with packed_rows(model):
        inputs = model_inputs(model, feed)
        expected = model(**inputs).logits[0]
        if not ranks.noted:
            return "it uses a custom attention function"
        for part in SLICES:
            ranks.look_at(part)
            inputs_here = {name: inputs[name][:, part] for name in ("input_ids", "position_ids")}
            logits = model(**{**inputs, **inputs_here}).logits[0]
            error = max(ranks.error, relative_error(logits, expected[part]))
            if error > LARGEST_ERROR:
                return f"a part of a row in a small model of its class is off by {error:.0e}"
    return ""


def probe_rows() -> tuple[RowColumns, RaggedTensor]:
    """Return test rows, and the positions that are read; their last tokens are not read.

    All rows begin with the same tokens.
    """
    rows = [torch.arange(length) for length in LENGTHS]
    positions = RaggedTensor.from_rows(rows, POSITIONS)
    numbers = torch.arange(len(positions.values))
    numbers = torch.where(positions.values < LENGTHS[3] // 3, positions.values, numbers)
    tokens = 3 + numbers * 7 % (VOCABULARY - 3)
    columns = {"input_ids": positions.with_values(tokens), "position_ids": positions}
    reads = [(row >= len(row) // 3) & (row < len(row) - 2) for row in rows]
    return columns, RaggedTensor.from_rows(reads, POSITIONS)
