"""Forward and backward passes: the outputs that are read from them, and their order.

reading.outputs(columns, token_outputs)                # runs the passes of one micro-batch
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl_like.batch.ragged import RaggedTensor
from verl_like.errors import BatchError
from workers.parallel.fsdp import begin_pass
from workers.parallel.offload import to_device
from workers.training.loss import Loss
from workers.training.microbatch import MicroBatches, RowColumns
from workers.training.passes.lm_head import DEFAULT, TokenOutputs, token_columns
from workers.training.passes.packing import Feed, read

if TYPE_CHECKING:
    from workers.training.sharded_model import Model

TOKENS = ("input_ids", "attention_mask", "position_ids")
INPUTS = (*TOKENS, "responses", "response_mask")
"""Columns that every pass over responses reads."""


class Reading:
    """Reads the log-probs (token head) or the values (scalar head) of the response tokens."""

    inputs: Sequence[str] = INPUTS
    """Columns that a forward pass reads."""
    folder_settings: Mapping[str, Any] = {}
    """Fields that `config.json` of an exported folder has in addition to the model's fields."""
    model: Model

    def begin(self, model: Model) -> None:
        """Called once with the loaded model."""
        self.model = model

    def reads(self, columns: RowColumns) -> RaggedTensor:
        """Mark the tokens whose next token is a response token inside the mask."""
        ids, mask = columns["input_ids"], columns["response_mask"]
        lengths = mask.lengths.flatten()
        # responses are at the end of their rows
        shifts = ids.lengths.flatten().cumsum(0) - lengths.cumsum(0) - 1
        places = torch.arange(len(mask.values)) + shifts.repeat_interleave(lengths)
        inside = mask.values != 0
        first = (ids.lengths <= mask.lengths).flatten().nonzero().squeeze(1)
        if len(first):  # rows without a prompt: no earlier token predicts their first token
            begins = (lengths.cumsum(0) - lengths)[first]
            if inside[begins[lengths[first] > 0]].any():
                raise BatchError(
                    "a row's first token is inside its response_mask; its log-prob would be read "
                    "at the token before it, which does not exist. Use a prompt of at least one "
                    "token."
                )
        reads = torch.zeros(len(ids.values), dtype=torch.bool)
        reads[places[inside]] = True
        result: RaggedTensor = ids.with_values(reads)
        return result

    def feeds(self, columns: RowColumns) -> list[Feed]:
        """Return the arguments of the forward passes over a micro-batch: one pass."""
        return [self.model.feed(columns, self.reads(columns))]

    def outputs(self, columns: RowColumns, token_outputs: TokenOutputs = DEFAULT) -> RowColumns:
        """Run a forward pass; return [rows, R] columns, zero outside the response mask."""
        model, device = self.model, self.model.device
        mask = columns["response_mask"]
        inside = mask.values != 0
        feed = model.feed(columns, self.reads(columns))
        if model.head == "token":
            labels = columns["responses"].values[inside]
            if feed.split is not None:
                labels = feed.split.local_part(labels)
            numbers = token_columns(
                model.module,
                feed,
                to_device(labels, device),
                token_outputs,
                may_chunk=model.model_config.use_fused_kernels,
                vocab=model.vocab,
                fused=model.is_compiled,
            )
        else:
            numbers = {"values": read(model.module, feed)[:, 0].float()}
        numbers = feed.gathered(numbers)

        inside = to_device(inside, device)
        return {
            name: mask.with_values(column.new_zeros(len(inside)).masked_scatter(inside, column))
            for name, column in numbers.items()
        }


Named = Iterator[tuple[str, Tensor]]


class AllLayers:
    """Runs passes one after the other, on a rank that has all layers.

    `PipelineLayers` has the same methods for a rank that has some of the layers.

    Example:

        for outputs, columns, num_real, losses in layers.train(reading, micro_batches, loss):
            losses.append(...)                  # adds to the gradients
        metrics = layers.from_last(metrics)     # from the rank with the last layer
    """

    has_last = True
    """True if this rank has the last layer, and with it the model's outputs."""
    copies: frozenset[str] = frozenset()
    """Names of weights on this rank that are copies of another rank's weights."""

    def forward(
        self, reading: Reading, micro_batches: MicroBatches, token_outputs: TokenOutputs = DEFAULT
    ) -> Iterator[tuple[RowColumns, int]]:
        """Yield the outputs of each micro-batch, and its number of real rows."""
        for columns, num_real in micro_batches:
            yield reading.outputs(columns, token_outputs), num_real

    def train(
        self, reading: Reading, micro_batches: MicroBatches, loss: Loss
    ) -> Iterator[tuple[RowColumns, RowColumns, int, list[Tensor]]]:
        """Yield the outputs, the columns and the number of real rows of each micro-batch.

        The caller adds the micro-batch's loss to the yielded list; then its backward pass runs.
        """
        model, num_left = reading.model, len(micro_batches)
        for columns, num_real in micro_batches:
            losses: list[Tensor] = []
            yield reading.outputs(columns, loss.token_outputs), columns, num_real, losses
            num_left -= 1
            begin_pass(
                model.module, model.is_one_unit, num_left == 0, strategy=model.sharding.strategy
            )
            total = losses.pop()
            # the gradient of a non-finite loss is NaN, even if the formula clamps it
            total.backward(1 + (total - total).detach())

    def from_last(self, result: Any) -> Any:
        """Return the result of the rank with the last layer, on all ranks."""
        return result

    def sum_tied_gradients(self) -> None:
        """Do nothing: embeddings and head are on the same rank."""

    def gather_stages(self, tensors: Named, shapes: Named, on_all_ranks: bool) -> Named:
        """Yield the tensors of all pipeline stages; without stages, this rank has all of them."""
        return tensors
