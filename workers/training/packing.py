"""What goes into a forward pass and what is read from it: rows without their padding.

    feed = packed_feed(columns, reads, device)      # one row of all tokens end to end, its layout
    feed = padded_feed(columns, reads, device)      # a rectangle, for models that cannot be packed
    numbers = read(module, feed)                    # [positions read, vocabulary or 1]

Position t of a row says something about token t + 1. Only positions that a loss reads get a head,
and a row ends at the last of them: what comes after it cannot change it. Left or right padding is
all the same: in a rectangle every row starts at the first column, so padding comes after all that
is real, where neither a state nor a count of places can pick it up.

Which of the two a model takes is proven in `workers.training.row_proof`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_like.errors import ConfigError
from verl_like.tensor_ops.masked import last_places
from workers.models.causal_lm import ScalarHeadModel, body_of
from workers.training.attention import RowLayout
from workers.training.microbatch import Columns


def response_reads(columns: Columns) -> Tensor:
    """[rows, T]: the position before each response token inside the mask."""
    mask = columns["response_mask"] != 0
    reads = torch.zeros(columns["input_ids"].shape, dtype=torch.bool, device=mask.device)
    start = reads.shape[1] - mask.shape[1] - 1
    reads[:, start : start + mask.shape[1]] = mask
    return reads


def last_token_reads(columns: Columns) -> Tensor:
    """[rows, T]: the last real token of each row; none in a row without tokens."""
    mask = columns["attention_mask"] != 0
    return mask & (torch.arange(mask.shape[1]) == last_places(mask)[:, None])


def needed_tokens(columns: Columns, reads: Tensor, *, whole: bool = False) -> Tensor:
    """[rows, T]: real tokens up to the last position that is read, none in a row without reads.

    `whole` rows keep what comes after it.
    """
    if whole:
        return ((columns["attention_mask"] != 0) & reads.any(dim=1, keepdim=True)) | reads
    ahead = reads.flip(1).cumsum(dim=1).flip(1) > 0
    return ((columns["attention_mask"] != 0) & ahead) | reads


@dataclass(frozen=True)
class Feed:
    """Keyword arguments of one forward pass, and where its output is read."""

    inputs: dict[str, Any]
    reads: Tensor
    """Packed: places in the one row. Padded: [rows, width] mask."""
    first: int = 0
    """Padded: the first column that any row reads."""
    packed: bool = True


def packed_feed(
    columns: Columns, reads: Tensor, device: torch.device, *, whole: bool = False
) -> Feed:
    """All needed tokens of all rows end to end, in the order of the rows."""
    needed = needed_tokens(columns, reads, whole=whole)
    if not needed.any():  # a dummy: one token, nothing read
        needed[:, 0] = True
    lengths = [length for length in needed.sum(dim=1).tolist() if length]
    inputs = {
        "input_ids": columns["input_ids"][needed][None].to(device),
        "position_ids": columns["position_ids"][needed][None].to(device),
        "row_layout": RowLayout(lengths, device),
    }
    return Feed(inputs, reads[needed].nonzero().squeeze(1).to(device))


def padded_feed(
    columns: Columns, reads: Tensor, device: torch.device, *, whole: bool = False
) -> Feed:
    """The needed tokens of each row from the first column on, zeros after them."""
    needed = needed_tokens(columns, reads, whole=whole)
    if not needed.any():
        needed[:, 0] = True
    width = int(needed.sum(dim=1).max())
    places = needed.int().argsort(dim=1, descending=True, stable=True)[:, :width]
    real = needed.gather(1, places)
    inputs = {
        name: (columns[name].gather(1, places) * real).to(device)
        for name in ("input_ids", "position_ids")
    }
    inputs["attention_mask"] = real.long().to(device)

    mask = reads.gather(1, places) & real
    read_columns = mask.any(dim=0).nonzero()
    first = int(read_columns[0]) if len(read_columns) else width - 1
    return Feed(inputs, mask.to(device), first, packed=False)


def model_inputs(module: Any, feed: Feed) -> dict[str, Any]:
    """The keyword arguments that this module's `forward` takes of the feed's."""
    body = body_of(module)
    inputs = {**feed.inputs, "use_cache": False}
    attention = body.config.get_text_config()._attn_implementation
    if feed.packed and attention in ("eager", "flash_attention_2"):
        del inputs["row_layout"]  # they read the rows' bounds from the position ids
    for name in {"position_ids", "attention_mask"} - inspect.signature(
        body.forward
    ).parameters.keys():
        inputs.pop(name, None)
    return inputs


def read(module: Any, feed: Feed) -> Tensor:
    """The head's output where it is read, row by row: [positions, vocabulary or 1]."""
    inputs = model_inputs(module, feed)
    if isinstance(module, ScalarHeadModel):
        return picked(module(**inputs), feed)
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        return picked(module(**inputs).logits, feed)

    kept: Tensor
    if feed.packed:
        kept = module(**inputs, logits_to_keep=feed.reads).logits[0]
    else:
        width = feed.reads.shape[1] - feed.first
        kept = module(**inputs, logits_to_keep=width).logits[feed.reads[:, feed.first :]]
    return kept


def picked(output: Tensor, feed: Feed) -> Tensor:
    """What was computed at every position, where it is read: [positions, size]."""
    return output[0].index_select(0, feed.reads) if feed.packed else output[feed.reads]


def check_rows(module: Any, columns: Columns, names: Sequence[str]) -> None:
    """Refuse rows with a gap, or longer than the model's positions, and unknown tokens."""
    config = body_of(module).config.get_text_config()
    if not columns["input_ids"].numel():
        return

    real = columns["attention_mask"] != 0
    begins = real & ~real.roll(1, dims=1).index_fill(1, torch.tensor([0]), False)
    gaps = (begins.sum(dim=1) > 1).nonzero()
    if len(gaps):
        row = int(gaps[0])
        first, second = begins[row].nonzero().squeeze(1)[:2].tolist()
        raise ConfigError(
            f"{names[row]} has a gap: its attention_mask is 1 from column {first}, then 0, and 1 "
            f"again from column {second}. The log-prob of the first token after the gap would be "
            "read at a pad token; pad prompts on the left and responses on the right "
            "(tokenizer.padding_side='left')."
        )

    limit = getattr(config, "max_position_embeddings", None)
    longest = int(real.sum(dim=1).max())
    if limit is not None and longest > limit:
        raise ConfigError(
            f"a row of {longest} tokens is longer than the model's {limit} positions; "
            "lower data.max_prompt_length or data.max_response_length."
        )

    vocabulary = config.vocab_size
    highest = int((columns["input_ids"] * real).max())
    if highest >= vocabulary:
        raise ConfigError(
            f"token id {highest} is outside the model's vocabulary of {vocabulary}; the tokenizer "
            "that made the rows is not this model's. Critic and reward model need the actor's "
            "tokenizer."
        )
