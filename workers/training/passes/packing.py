"""Split rows into forward passes, and run a pass over rows without their padding.

    prefixes = row_passes.prefixes(ids, reads)      # None if rows share little
    cuts = row_passes.cut(reads, budget, prefixes)  # the rows of every micro-batch
    feed = row_passes.feed(columns, reads, device)  # one packed row, or a rectangle
    numbers = read(module, feed)                    # [positions read, vocabulary or 1]

Position t of a row predicts token t + 1. The head is computed only at positions that a loss reads,
and each row is cut off after its last such position, since later tokens cannot change the output
there. In a rectangle every row starts at the first column, so padding comes after all real tokens
and affects neither recurrent states nor position counts.

A packed row has all tokens and their layout; a rectangle is for models that cannot be packed.
`workers.training.passes.row_layout` chooses between the two.

A prefix that several rows of a pass share is computed only once.
Samples of one prompt begin with the same tokens, and so do the two sides of a pair, or trajectories
with one system prompt. If attention is the only operation that mixes tokens, equal prefixes have
equal hidden states, so layers compute them once. Attention sees a copy in every row, and the
gradients of the copies add up. A token at which the head is read is never shared.

    order = prefix_order(ids, reads, lengths)           # equal prefixes are neighbors
    shared = share_prefixes(tokens, lengths, device)    # what a pass computes, and its layout
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from verl_like.batch.ragged import RaggedTensor
from verl_like.errors import ConfigError
from workers.columns import IMAGES, ROUTED
from workers.models.causal_lm import ScalarHeadModel, body_of
from workers.parallel.offload import to_device
from workers.training.microbatch import Columns, Cuts, MicroBatchBudget, RowColumns
from workers.training.passes.attention import RowLayout

if TYPE_CHECKING:
    from workers.parallel.sequence import SequenceRanks, Split


Kind = Literal["packed", "padded"]
SEGMENTS_MAY_NOT_SHARE = (
    "environment.history_tokens=retokenized: rows of this model may not share a pass (longrope: "
    "rotary factors depend on the length of a row), so the segments of a trajectory may not share "
    "one either. Set environment.history_tokens=sampled."
)
LARGEST_SQUARE = 2048
"""Largest pass, in tokens, if attention is quadratic in them; a single row may be longer."""


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
    lengths = reads.lengths.flatten()
    if whole_rows:
        return lengths * (reads.sums().flatten() > 0)
    ends, places = lengths.cumsum(0), reads.values.nonzero().squeeze(1)
    up_to = torch.cat([places.new_zeros(1), places + 1])  # each place read, counted from 1
    last = up_to[torch.searchsorted(places, ends)]
    return (last - (ends - lengths)).clamp(min=0)


def _places_in_rows(column: RaggedTensor) -> Tensor:
    lengths = column.lengths.flatten()
    return torch.arange(len(column.values)) - (lengths.cumsum(0) - lengths)[column.value_rows()]


@dataclass
class PassCounts:
    """Counts of what rows need from a model, summed over their passes."""

    tokens: int = 0
    reads: int = 0
    """Positions at which the head is read."""
    pairs: int = 0
    """Pairs of tokens of a row: the sum of the squared lengths."""

    def add(self, columns: RowColumns, reads: RaggedTensor, prefixes: PrefixOrder | None) -> None:
        """Count one pass over each of these rows."""
        lengths = needed_lengths(split_segments(columns, reads))
        self.tokens += int(lengths.sum()) - (sum(prefixes.shared) if prefixes else 0)
        self.reads += int(reads.values.sum())
        self.pairs += int(lengths.square().sum())


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
    images: Tensor | None = None
    """[tokens, 1 or 4], on the CPU: 1 + the number of the token's image (0: text), positions."""

    def gathered(self, columns: Columns) -> Columns:
        """Gather columns over the positions read here into columns over those read on all ranks."""
        if self.split is None:
            return columns
        together = self.split.gather(torch.stack(list(columns.values()), dim=-1))
        return dict(zip(columns, together.unbind(dim=-1), strict=True))


@dataclass(frozen=True)
class RowPasses:
    """Splits rows into passes and builds the arguments of each pass, in one layout of the rows."""

    kind: Kind = "padded"
    border: int | None = None
    """Row length beyond which rotary factors change (longrope); a pass has one set of them."""
    is_square: bool = False
    """True if packed rows use a dense mask over all tokens of a pass."""
    ranks: SequenceRanks | None = None
    """The ranks over which the tokens of every packed pass are split."""
    shares: bool = False
    """True if a prefix that several packed rows of a pass have in common is computed once."""

    @property
    def apart(self) -> bool:
        """True if rows may not share a pass because their rotary factors may differ."""
        return self.border is not None

    def lengths(self, reads: RaggedTensor) -> list[int]:
        """Return the number of tokens per row, or per pair of rows, that a pass computes."""
        tokens = needed_lengths(reads, whole_rows=self.apart)
        if reads.lengths.dim() == 2:
            sides = tokens.view(reads.lengths.shape)
            # with padding, the cost of a pair is twice the length of its longer side
            tokens = 2 * sides.amax(dim=1) if self.kind == "padded" else sides.sum(dim=1)
        lengths: list[int] = tokens.tolist()
        return lengths

    def prefixes(self, ids: RaggedTensor, reads: RaggedTensor) -> PrefixOrder | None:
        """Return an order in which rows share prefixes; None if they share little or nothing."""
        if not self.shares:
            return None
        ids, reads = ids.flatten(), reads.flatten()
        return prefix_order(ids, reads, self.lengths(reads))

    def cut(
        self,
        reads: RaggedTensor,
        budget: MicroBatchBudget,
        prefixes: PrefixOrder | None = None,
    ) -> Cuts:
        """Return the numbers of the rows, or of the pairs of rows, of every micro-batch.

        Rows in which no token is read are in none. The longest rows come first, or rows that share
        a prefix are neighbors, and the shared tokens then cost little of the budget. A padded row
        costs as many tokens as the longest row of its micro-batch. Rows above the border never
        share a micro-batch with shorter rows. Ranks that share a pass add up their budgets.
        """
        lengths, are_pairs = self.lengths(reads), reads.lengths.dim() == 2
        longest, most_rows, limit = max(lengths, default=0), budget.rows, budget.tokens
        if limit is not None and self.ranks is not None:
            limit *= self.ranks.size
        if limit is not None and self.is_square and not are_pairs:
            limit = min(limit, max(longest, LARGEST_SQUARE))
        size = limit if most_rows is None else most_rows
        if (size or 0) < 1:
            raise ConfigError(
                f"a micro-batch needs at least 1 row or token, not {size}. Raise {budget.keys}."
            )
        if limit is not None and longest > limit:
            raise ConfigError(
                f"a row of {longest} tokens exceeds the budget of {limit} tokens per micro-batch. "
                f"Raise {budget.keys} to the length of the longest row."
            )

        order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
        saved = [0] * len(order)
        if prefixes is not None and not are_pairs:
            order = prefixes.rows
            saved = [int((1 - COST_OF_COPY) * shared) for shared in prefixes.shared]
        cuts: Cuts = []
        room, was_long = 0, False
        for row, num_saved in zip(order, saved, strict=True):
            if not lengths[row]:
                continue
            rows = cuts[-1] if cuts else []
            cost = lengths[row] - num_saved
            if rows and self.kind == "padded":
                cost = lengths[rows[0]]
            is_full = len(rows) == most_rows or (limit is not None and cost > room)
            is_long = self.border is not None and lengths[row] > self.border
            if not rows or is_full or is_long != was_long or (are_pairs and self.apart):
                rows, room, cost = [], limit or 0, lengths[row]
                cuts.append(rows)
            rows.append(row)
            room, was_long = room - cost, is_long
        return cuts

    def feed(self, columns: RowColumns, reads: RaggedTensor, device: torch.device) -> Feed:
        """Return the arguments of a pass over the needed tokens, with each segment as its own row.

        If no row is read, there is one dummy token, which is not read.
        """
        segments = split_segments(columns, reads)
        if self.apart and segments is not reads:
            raise ConfigError(SEGMENTS_MAY_NOT_SHARE)
        lengths = needed_lengths(segments, whole_rows=self.apart)
        needed = _places_in_rows(segments) < lengths[segments.value_rows()]
        tokens = {name: columns[name].values[needed] for name in ("input_ids", "position_ids")}
        tokens["reads"] = segments.values[needed]
        if ROUTED in columns:  # counted from 1, so that 0 marks padding
            tokens[ROUTED] = columns[ROUTED].values[needed].short() + 1
        if IMAGES in columns:
            tokens[IMAGES] = columns[IMAGES].values[needed]
        if not lengths.any():
            tokens = {
                name: values.new_zeros(1, *values.shape[1:]) for name, values in tokens.items()
            }
            lengths = torch.ones(1, dtype=torch.int64)
        if self.kind == "packed":
            return self._packed(tokens, [length for length in lengths.tolist() if length], device)
        return _padded(tokens, lengths, device)

    def _packed(self, tokens: Columns, rows: list[int], device: torch.device) -> Feed:
        """Return a feed of the tokens, concatenated in the order of the rows.

        Ranks that share a pass get equally long parts; a row of padding at the end evens them out.
        """
        split = is_real = None
        if self.ranks is None:
            layout = RowLayout(rows, device)
            shared = share_prefixes(tokens, rows, device) if self.shares else None
            if shared is not None:
                layout = shared.layout
                tokens = {name: values[shared.computed] for name, values in tokens.items()}
            reads_here = tokens["reads"].nonzero().squeeze(1)
        else:
            num_real = sum(rows)
            padding = self.ranks.padded(num_real) - num_real
            for name, values in tokens.items():
                tokens[name] = torch.cat([values, values.new_zeros(padding, *values.shape[1:])])
            split = self.ranks.split(tokens["reads"])
            tokens = {name: values[split.places] for name, values in tokens.items()}
            layout = RowLayout([*rows, padding] if padding else rows, device, self.ranks)
            reads_here, is_real = split.reads, to_device(split.places < num_real, device)
        ids, positions = tokens["input_ids"][None], tokens["position_ids"][None]
        return Feed(
            {
                "input_ids": to_device(ids, device),
                "position_ids": to_device(positions, device),
                "row_layout": layout,
            },
            to_device(reads_here, device),
            split=split,
            is_real=is_real,
            routed=to_device(tokens[ROUTED], device) - 1 if ROUTED in tokens else None,
            images=tokens.get(IMAGES),
        )


def _padded(tokens: Columns, lengths: Tensor, device: torch.device) -> Feed:
    """Return a feed of rows that start at the first column, with zeros after their tokens."""
    width = int(lengths.max())
    padded = {
        name: RaggedTensor(values, lengths, width).padded() for name, values in tokens.items()
    }
    mask, routed = padded.pop("reads"), padded.pop(ROUTED, None)
    images = padded.pop(IMAGES, None)
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
        routed=None if routed is None else to_device(routed.flatten(0, 1), device) - 1,
        images=None if images is None else images.flatten(0, 1),
    )


def model_inputs(module: Any, feed: Feed) -> dict[str, Any]:
    """Return the arguments of the feed that this module's `forward` accepts."""
    body = body_of(module)
    inputs = {**feed.inputs, "use_cache": False}
    attention = body.config.get_text_config()._attn_implementation
    if feed.packed and attention == "eager":
        del inputs["row_layout"]  # its mask gets the row boundaries from the position ids
    elif feed.packed and "row_layout" in inputs:
        # without a mask, transformers searches the positions for rows and waits for the device
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"], dtype=torch.bool)
    for name in {"position_ids", "attention_mask"} - inspect.signature(
        body.forward
    ).parameters.keys():
        inputs.pop(name, None)
    return inputs


def read(module: Any, feed: Feed) -> Tensor:
    """Return the head's output at the positions read: [positions, vocabulary or 1]."""
    inputs = model_inputs(module, feed)
    if isinstance(module, ScalarHeadModel):
        return select_reads(module(**inputs), feed)
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        return select_reads(module(**inputs).logits, feed)

    output: Tensor
    if feed.packed:
        # indexing the logits would copy their gradient, which can reuse the logits' memory
        output = module(**inputs, logits_to_keep=feed.reads).logits.squeeze(0)
    else:
        width = feed.reads.shape[1] - feed.first
        output = module(**inputs, logits_to_keep=width).logits[feed.reads[:, feed.first :]]
    return output


def select_reads(output: Tensor, feed: Feed) -> Tensor:
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


COST_OF_COPY = 0.25
"""Cost of a copy of a shared token, in tokens of the budget: attention stores its states."""
SMALLEST_SHARE = 0.1
"""Prefixes are shared if that saves more than this fraction of the tokens; copying costs 2 %."""


class SharedPrefixes(NamedTuple):
    """Tokens that a pass computes, and the layout of its rows."""

    computed: Tensor
    """True for tokens of the rows that are computed; the others are copies."""
    layout: RowLayout


class PrefixOrder(NamedTuple):
    """An order in which rows with equal prefixes are neighbors."""

    rows: list[int]
    shared: list[int]
    """Number of tokens that each row, in this order, shares with the row before it."""


def prefix_order(
    ids: RaggedTensor, reads: RaggedTensor, lengths: Sequence[int]
) -> PrefixOrder | None:
    """Return an order in which rows share prefixes; None if they share little."""
    rows = [row[:length, None] for row, length in zip(ids.rows(), lengths, strict=True)]
    words, starts = ids.values.numpy().astype(">u4"), ids.lengths.cumsum(0) - ids.lengths
    spans = zip(starts.tolist(), lengths, strict=True)
    texts = [words[start : start + length].tobytes() for start, length in spans]
    order, marks = sorted(range(len(rows)), key=texts.__getitem__), reads.rows()
    shared = shared_lengths([rows[row] for row in order], [marks[row] for row in order])
    return PrefixOrder(order, shared) if sum(shared) > SMALLEST_SHARE * sum(lengths) else None


def shared_lengths(rows: Sequence[Tensor], reads: Sequence[Tensor]) -> list[int]:
    """Return how many tokens each row shares with the previous row, up to the first token read.

    Rows are [tokens, numbers]; two tokens are equal if all their numbers are.
    """
    lengths = [0]
    for before, row, read in zip(rows, rows[1:], reads[1:], strict=False):
        size = min(len(before), len(row))
        unequal = ((before[:size] != row[:size]).any(dim=1) | read[:size]).numpy()
        lengths.append(int(unequal.argmax()) if unequal.any() else size)
    return lengths


def share_prefixes(
    tokens: dict[str, Tensor], lengths: Sequence[int], device: torch.device
) -> SharedPrefixes | None:
    """Return how a pass over these rows shares the prefixes of neighbors; None if it does not pay
    off.

    `tokens` has the columns input_ids, position_ids and reads of all rows, concatenated. If rows
    name the experts or the images of their tokens, these must be equal, too.
    """
    places = torch.cat([torch.arange(length) for length in lengths])
    if len(lengths) < 2 or not torch.equal(tokens["position_ids"], places):
        return None
    compared = tokens["input_ids"][:, None]
    for name in (ROUTED, IMAGES):
        if name in tokens:
            compared = torch.cat([compared, tokens[name].flatten(1)], dim=1)
    rows, reads = (column.split(list(lengths)) for column in (compared, tokens["reads"]))
    shared = shared_lengths(rows, reads)
    if sum(shared) <= SMALLEST_SHARE * sum(lengths):
        return None

    computed = torch.cat(
        [torch.arange(length) >= first for length, first in zip(lengths, shared, strict=True)]
    )
    return SharedPrefixes(computed, RowLayout(lengths, device, shared=shared))
