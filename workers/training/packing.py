"""Arguments and outputs of a forward pass over rows without their padding.

    feed = packed_feed(columns, reads, device)      # one row of all tokens, with its layout
    feed = padded_feed(columns, reads, device)      # a rectangle, for models that cannot be packed
    numbers = read(module, feed)                    # [positions read, vocabulary or 1]

Position t of a row predicts token t + 1. The head is computed only at positions that a loss reads,
and each row is cut off after its last such position, since later tokens cannot change the output
there. In a rectangle every row starts at the first column, so padding comes after all real tokens
and affects neither recurrent states nor position counts.

`workers.training.row_proof` chooses between the two feeds.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_like.batch.ragged import RaggedTensor
from verl_like.errors import BatchError, ConfigError
from workers.models.causal_lm import ScalarHeadModel, body_of
from workers.models.routing import COLUMN as ROUTED
from workers.parallel.offload import to_device
from workers.parallel.sequence import SequenceRanks, Split
from workers.training.attention import RowLayout
from workers.training.microbatch import Columns, RowColumns
from workers.training.prefixes import share_prefixes


def response_reads(columns: RowColumns) -> RaggedTensor:
    """Mark the tokens whose next token is a response token inside the mask."""
    ids, mask = columns["input_ids"], columns["response_mask"]
    ends = ids.lengths.flatten().cumsum(0)
    shifts = ends - mask.lengths.flatten().cumsum(0) - 1  # responses are at the end of their rows
    places = torch.arange(len(mask.values)) + shifts.repeat_interleave(mask.lengths.flatten())
    inside = mask.values != 0
    first = (ids.lengths <= mask.lengths).flatten().nonzero().squeeze(1)
    if len(first):  # rows without a prompt: no earlier token predicts their first token
        lengths = mask.lengths.flatten()
        begins = (lengths.cumsum(0) - lengths)[first]
        if inside[begins[lengths[first] > 0]].any():
            raise BatchError(
                "a row's first token is inside its response_mask; its log-prob would be read at "
                "the token before it, which does not exist. Use a prompt of at least one token."
            )
    reads = torch.zeros(len(ids.values), dtype=torch.bool)
    reads[places[inside]] = True
    result: RaggedTensor = ids.with_values(reads)
    return result


def last_token_reads(columns: RowColumns) -> RaggedTensor:
    """Mark the last token of every row."""
    ids: RaggedTensor = columns["input_ids"]
    reads = torch.zeros(len(ids.values), dtype=torch.bool)
    lengths = ids.lengths.flatten()
    reads[(lengths.cumsum(0) - 1)[lengths > 0]] = True
    return ids.with_values(reads)


def split_segments(columns: RowColumns, reads: RaggedTensor) -> RaggedTensor:
    """Return the reads with one row per segment; a segment begins where positions restart at 0.

    A trajectory has several segments if the chat template rewrote its history.
    """
    lengths = reads.lengths.flatten()
    of_rows = (lengths.cumsum(0) - lengths)[lengths > 0]
    begins = columns["position_ids"].values == 0
    begins[of_rows] = True
    places = begins.nonzero().squeeze(1)
    if len(places) == len(of_rows):
        return reads
    ends = torch.tensor([len(begins)])
    return RaggedTensor(reads.values, torch.cat([places, ends]).diff(), reads.width)


def needed_lengths(reads: RaggedTensor, *, whole_rows: bool = False) -> Tensor:
    """Return the length of each row up to its last token that is read; 0 if none is read.

    With `whole_rows`, rows keep the tokens after that token.
    """
    lengths, rows = reads.lengths.flatten(), reads.value_rows()
    if whole_rows:
        return lengths * (reads.sums().flatten() > 0)
    up_to = _places_in_rows(reads) + 1
    zeros = torch.zeros(len(lengths), dtype=torch.int64)
    return zeros.scatter_reduce(0, rows, up_to * reads.values, "amax")


def _places_in_rows(column: RaggedTensor) -> Tensor:
    lengths = column.lengths.flatten()
    return torch.arange(len(column.values)) - (lengths.cumsum(0) - lengths)[column.value_rows()]


@dataclass(frozen=True)
class Feed:
    """Keyword arguments of one forward pass, and the positions at which its output is read."""

    inputs: dict[str, Any]
    reads: Tensor
    """Packed: positions in the one row. Padded: [rows, width] mask."""
    first: int = 0
    """Padded: the first column that any row reads."""
    packed: bool = True
    split: Split | None = None
    """Packed: this rank's tokens of the row, if the row is split over ranks."""
    is_real: Tensor | None = None
    """True for tokens that are not padding; None if all are real."""
    routed: Tensor | None = None
    """[tokens, layers, choices]: the experts of each token.

    The routers choose if it is None, and for padding, which has -1.
    """

    def of_rank(self, column: Tensor) -> Tensor:
        """Return this rank's part of a column that has one number per position read on any rank."""
        return column if self.split is None else self.split.of_rank(column)

    def gathered(self, columns: Columns) -> Columns:
        """Gather columns over the positions read here into columns over those read on all ranks."""
        if self.split is None:
            return columns
        together = self.split.gather(torch.stack(list(columns.values()), dim=-1))
        return dict(zip(columns, together.unbind(dim=-1), strict=True))


def packed_feed(
    columns: RowColumns,
    reads: RaggedTensor,
    device: torch.device,
    *,
    whole_rows: bool = False,
    ranks: SequenceRanks | None = None,
    shares: bool = False,
) -> Feed:
    """Return a feed of all needed tokens, concatenated in the order of the rows.

    With `shares`, a prefix that neighboring rows have in common is computed once.

    With `ranks`, the feed contains this rank's part of the tokens; a row of padding at the end
    makes all parts equally long.
    """
    tokens, lengths = _needed(columns, reads, whole_rows)
    rows = [length for length in lengths.tolist() if length]
    split = is_real = None
    if ranks is None:
        layout = RowLayout(rows, device)
        shared = share_prefixes(tokens, rows, device) if shares else None
        if shared is not None:
            layout = shared.layout
            tokens = {name: values[shared.computed] for name, values in tokens.items()}
        reads_here = tokens["reads"].nonzero().squeeze(1)
    else:
        num_real = sum(rows)
        padding = ranks.padded(num_real) - num_real
        for name, values in tokens.items():
            tokens[name] = torch.cat([values, values.new_zeros(padding, *values.shape[1:])])
        split = ranks.split(tokens["reads"])
        tokens = {name: values[split.places] for name, values in tokens.items()}
        layout = RowLayout([*rows, padding] if padding else rows, device, ranks)
        reads_here, is_real = split.reads, to_device(split.places < num_real, device)
    inputs = {name: to_device(tokens[name][None], device) for name in ("input_ids", "position_ids")}
    return Feed(
        {**inputs, "row_layout": layout},
        to_device(reads_here, device),
        split=split,
        is_real=is_real,
        routed=_choices(tokens.get(ROUTED), device),
    )


def _choices(counted: Tensor | None, device: torch.device) -> Tensor | None:
    """Convert expert numbers that count from 1 (see `_needed`) to numbers that count from 0."""
    return None if counted is None else to_device(counted, device) - 1


def padded_feed(
    columns: RowColumns, reads: RaggedTensor, device: torch.device, *, whole_rows: bool = False
) -> Feed:
    """Return a feed of the needed tokens of each row, starting at the first column, then zeros."""
    tokens, lengths = _needed(columns, reads, whole_rows)
    width = int(lengths.max())
    padded = {
        name: RaggedTensor(values, lengths, width).padded() for name, values in tokens.items()
    }
    mask, routed = padded.pop("reads"), padded.pop(ROUTED, None)
    padded["attention_mask"] = (torch.arange(width) < lengths[:, None]).long()
    inputs = {name: to_device(column, device) for name, column in padded.items()}

    read_columns = mask.any(dim=0).nonzero()
    first = int(read_columns[0]) if len(read_columns) else width - 1
    return Feed(
        inputs,
        to_device(mask, device),
        first,
        packed=False,
        is_real=inputs["attention_mask"].flatten() != 0,
        routed=_choices(None if routed is None else routed.flatten(0, 1), device),
    )


def _needed(
    columns: RowColumns, reads: RaggedTensor, whole_rows: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """Return columns with the needed tokens of all rows, and the number of such tokens per row.

    Each segment is a separate row. If no row is read, there is one dummy token, which is not read.
    """
    reads = split_segments(columns, reads)
    lengths = needed_lengths(reads, whole_rows=whole_rows)
    needed = _places_in_rows(reads) < lengths[reads.value_rows()]
    tokens = {name: columns[name].values[needed] for name in ("input_ids", "position_ids")}
    tokens["reads"] = reads.values[needed]
    if ROUTED in columns:  # counted from 1, so that 0 marks padding
        tokens[ROUTED] = columns[ROUTED].values[needed].short() + 1
    if not lengths.any():
        tokens = {name: values.new_zeros(1, *values.shape[1:]) for name, values in tokens.items()}
        lengths = torch.ones(1, dtype=torch.int64)
    return tokens, lengths


def model_inputs(module: Any, feed: Feed) -> dict[str, Any]:
    """Return the arguments of the feed that this module's `forward` accepts."""
    body = body_of(module)
    inputs = {**feed.inputs, "use_cache": False}
    attention = body.config.get_text_config()._attn_implementation
    if feed.packed and attention == "eager":
        del inputs["row_layout"]  # its mask gets the row boundaries from the position ids
    for name in {"position_ids", "attention_mask"} - inspect.signature(
        body.forward
    ).parameters.keys():
        inputs.pop(name, None)
    return inputs


def read(module: Any, feed: Feed) -> Tensor:
    """Return the head's output at the positions read: [positions, vocabulary or 1]."""
    inputs = model_inputs(module, feed)
    if isinstance(module, ScalarHeadModel):
        return picked(module(**inputs), feed)
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        return picked(module(**inputs).logits, feed)

    output: Tensor
    if feed.packed:
        # indexing the logits would copy their gradient, which can reuse the logits' memory
        output = module(**inputs, logits_to_keep=feed.reads).logits.squeeze(0)
    else:
        width = feed.reads.shape[1] - feed.first
        output = module(**inputs, logits_to_keep=width).logits[feed.reads[:, feed.first :]]
    return output


def picked(output: Tensor, feed: Feed) -> Tensor:
    """Pick the positions read from an output of every position: [positions, size]."""
    return output[0].index_select(0, feed.reads) if feed.packed else output[feed.reads]


def check_rows(module: Any, ids: RaggedTensor) -> None:
    """Reject rows that are longer than the model supports, and unknown token ids."""
    config = body_of(module).config.get_text_config()
    if not len(ids.values):
        return

    limit = getattr(config, "max_position_embeddings", None)
    longest = int(ids.lengths.max())
    if limit is not None and longest > limit:
        raise ConfigError(
            f"a row of {longest} tokens is longer than the model's {limit} positions. Lower "
            "the keys that limit its length, such as data.max_prompt_length and "
            "data.max_response_length, or data.max_length."
        )

    vocabulary = config.vocab_size
    highest = int(ids.values.max())
    if highest >= vocabulary:
        raise ConfigError(
            f"token id {highest} is outside the model's vocabulary of {vocabulary}: the tokenizer "
            "has more tokens than the model. Use the model's own tokenizer, and in PPO a critic, "
            "reference and reward model with the actor's tokenizer."
        )
