"""What goes into a forward pass and what is read from it: rows without their padding.

    feed = packed_feed(columns, reads)      # one row of all tokens end to end, and its layout
    feed = padded_feed(columns, reads)      # a rectangle, for models that cannot be packed
    numbers = read(module, feed)            # [positions read, vocabulary or 1]

Position t of a row says something about token t + 1. Only positions that a loss reads get a head,
and a row ends at the last of them: what comes after it cannot change it. Left or right padding is
all the same.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_like.errors import ConfigError
from workers.models.causal_lm import ScalarHeadModel, body_of
from workers.training.attention import RowLayout, packed_rows
from workers.training.microbatch import Columns

logger = logging.getLogger(__name__)


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
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return mask & (places == (mask * places).amax(dim=1, keepdim=True))


def needed_tokens(columns: Columns, reads: Tensor) -> Tensor:
    """[rows, T]: real tokens up to the last position that is read, none in a row without reads."""
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


def packed_feed(columns: Columns, reads: Tensor, device: torch.device) -> Feed:
    """All needed tokens of all rows end to end, in the order of the rows."""
    needed = needed_tokens(columns, reads)
    if not needed.any():  # a dummy: one token, nothing read
        needed[:, 0] = True
    lengths = [length for length in needed.sum(dim=1).tolist() if length]
    inputs = {
        "input_ids": columns["input_ids"][needed][None].to(device),
        "position_ids": columns["position_ids"][needed][None].to(device),
        "row_layout": RowLayout(lengths, device),
    }
    return Feed(inputs, reads[needed].nonzero().squeeze(1).to(device))


def padded_feed(columns: Columns, reads: Tensor, device: torch.device) -> Feed:
    """The rows as they are, without the columns that no row needs."""
    needed = needed_tokens(columns, reads)
    if not needed.any():
        needed[:, 0] = True
    used = needed.any(dim=0).nonzero().squeeze(1)
    window = slice(int(used[0]), int(used[-1]) + 1)
    names = ("input_ids", "position_ids")
    inputs = {name: columns[name][:, window].to(device) for name in names}
    inputs["attention_mask"] = needed[:, window].long().to(device)

    mask = reads[:, window]
    read_columns = mask.any(dim=0).nonzero()
    first = int(read_columns[0]) if len(read_columns) else mask.shape[1] - 1
    return Feed(inputs, mask.to(device), first, packed=False)


def read(module: Any, feed: Feed) -> Tensor:
    """The head's output where it is read, row by row: [positions, vocabulary or 1]."""
    body = body_of(module)
    inputs = {**feed.inputs, "use_cache": False}
    attention = body.config.get_text_config()._attn_implementation
    if feed.packed and attention in ("eager", "flash_attention_2"):
        del inputs["row_layout"]  # they read the rows' bounds from the position ids
    if "position_ids" not in inspect.signature(body.forward).parameters:
        del inputs["position_ids"]

    if isinstance(module, ScalarHeadModel):
        return _picked(module(**inputs), feed)
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        return _picked(module(**inputs).logits, feed)

    kept: Tensor
    if feed.packed:
        kept = module(**inputs, logits_to_keep=feed.reads).logits[0]
    else:
        width = feed.reads.shape[1] - feed.first
        kept = module(**inputs, logits_to_keep=width).logits[feed.reads[:, feed.first :]]
    return kept


def _picked(output: Tensor, feed: Feed) -> Tensor:
    """The output of a head that was computed everywhere, where it is read."""
    return output[0].index_select(0, feed.reads) if feed.packed else output[feed.reads]


def can_pack(module: Any, device: torch.device) -> bool:
    """Whether two short rows come out alike packed and padded; a warning names a model that fails.

    Every rank of a sharded module calls it.
    """
    body = body_of(module)
    reason = _why_not_packed(module, device)
    if reason:
        logger.warning(
            "model type %s is not computed right from packed rows (%s); it runs on padded rows, "
            "which takes longer. model.use_remove_padding=False says so without this test.",
            body.config.model_type,
            reason,
        )
    return not reason


def _why_not_packed(module: Any, device: torch.device) -> str:
    columns = _probe_rows(body_of(module).get_input_embeddings().num_embeddings)
    reads = columns["attention_mask"] != 0
    try:
        with packed_rows(module):
            packed = _before_scalar_head(module, packed_feed(columns, reads, device))
        padded = _before_scalar_head(module, padded_feed(columns, reads, device))
    except (TypeError, ValueError, RuntimeError) as error:
        return f"it refuses a packed row: {error}"

    limit = 1e-4 if packed.dtype == torch.float32 else 3e-2
    error_norm = float((packed - padded).float().norm() / padded.float().norm())
    if error_norm <= limit:
        return ""
    return f"relative error {error_norm:.1e} over a limit of {limit:.0e}"


@torch.no_grad()
def _before_scalar_head(module: Any, feed: Feed) -> Tensor:
    """Logits at every position; under a scalar head, which may be all zeros, the hidden states."""
    if not isinstance(module, ScalarHeadModel):
        return read(module, feed)
    states: list[Tensor] = []
    hook = module.score.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    try:
        read(module, feed)
    finally:
        hook.remove()
    return states[0][0] if feed.packed else states[0][feed.reads]


def _probe_rows(vocabulary: int) -> Columns:
    """Rows of 7 and 5 tokens, padded on the left."""
    mask = torch.tensor([[1] * 7, [0, 0] + [1] * 5])
    tokens = torch.arange(14).view(2, 7) * 7 % max(vocabulary, 1)
    return {
        "input_ids": tokens * mask,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
    }


def check_rows(module: Any, columns: Columns) -> None:
    """Refuse rows longer than the model has positions, and tokens that it has no embedding for."""
    config = body_of(module).config.get_text_config()
    if not columns["input_ids"].numel():
        return

    real = columns["attention_mask"] != 0
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
