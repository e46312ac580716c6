"""The forward pass of Hugging Face causal LMs with full attention, through the module itself.

With grouped-query attention, transformers repeats the whole cache for every query head at every
token, which costs more than the arithmetic. `grouped_attention` copies nothing: a decode step has
one query per head, so the queries of all heads in a group are multiplied as the rows of one matrix.

`check_decoding` rejects a class that this pass does not decode like transformers. A slot cache
stores only the keys and values of every token: no recurrent state, no window, no index.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from verl_like.errors import ConfigError
from workers.models.attention import override_attention
from workers.models.support import Support
from workers.rollout.native.direct_forward import MIN_ROWS_OF_MKL
from workers.rollout.native.kv_cache import SlotCache

AddImages = Callable[[dict[str, Tensor]], dict[str, Tensor]]


class ModuleForward:
    """Reads tokens into a slot cache and returns the logits of the next token."""

    def __init__(self, module: Any, cache: SlotCache) -> None:
        self.module, self.cache, self.slots = module, cache, cache.slots
        parameters = inspect.signature(module.forward).parameters
        self.takes_positions = "position_ids" in parameters
        self.takes_logits_to_keep = "logits_to_keep" in parameters

    def prefill(
        self,
        prompts: Sequence[tuple[int, ...]],
        width: int,
        sources: Tensor,
        first: int,
        images: AddImages | None = None,
    ) -> Tensor:
        """Read prompts into consecutive slots; return the logits after each prompt.

        Slot `first + i` gets prompt `sources[i]`, padded to `width`. The logits are
        [prompts, vocabulary]. `images` maps input_ids and position_ids to the further arguments of
        a pass over prompts with images.
        """
        device = self.slots.columns.device
        padded = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        ids = torch.tensor(padded, device=device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        positions = (self.slots.columns[:width] - (width - lengths)[:, None]).clamp(min=0)
        mask = self.slots.target_prefill(lengths, width, sources, first)
        # the head needs `MIN_ROWS_OF_MKL` rows, too
        num_logits = -(-MIN_ROWS_OF_MKL // len(prompts))
        inputs = images({"input_ids": ids, "position_ids": positions}) if images else {}
        positions = inputs.pop("position_ids", positions)
        return self._logits(ids, positions, mask, num_logits, **inputs)

    def decode(self, ids: Tensor, positions: Tensor, shifts: Tensor | None = None) -> Tensor:
        """Read one token into each of the slots 0, 1, ...; return the logits after it.

        The logits are [rows, vocabulary]. `shifts` [rows] are added to positions on three axes.
        """
        mask, places = self.slots.target_decode(positions), positions[:, None]
        if shifts is not None:
            axes = (places + shifts[:, None]).expand(3, -1, -1)
            places = torch.cat([places[None], axes])
        return self._logits(ids[:, None], places, mask, 1)

    def _logits(
        self,
        ids: Tensor,
        positions: Tensor,
        attention_mask: Tensor,
        num_logits: int,
        **inputs: Any,
    ) -> Tensor:
        """Run the module on new tokens; return the last one's logits, [rows, vocabulary]."""
        inputs |= {
            "attention_mask": attention_mask,
            "past_key_values": self.cache,
            "use_cache": True,
        }
        if self.takes_positions:
            inputs["position_ids"] = positions
        if self.takes_logits_to_keep:
            inputs["logits_to_keep"] = num_logits
        logits: Tensor = self.module(input_ids=ids, **inputs).logits[:, -1]
        return logits


NAME = "grouped_sdpa"
"""Name of `grouped_attention` in the attention interface of transformers."""


def grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend from queries [rows, heads, queries, size] to keys [rows, groups, columns, size].

    With more than one query per row, use transformers' "sdpa".
    """
    rows, heads, num_queries, size = query.shape
    groups, columns = key.shape[1], key.shape[2]
    if num_queries > 1:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return output, None

    grouped = query.reshape(rows * groups, heads // groups, size)
    keys = key.flatten(0, 1).transpose(1, 2)
    scale = size**-0.5 if scaling is None else scaling
    unused = grouped.new_empty(())  # beta=0: it is not read
    scores = torch.baddbmm(unused, grouped, keys, beta=0, alpha=scale)
    scores.view(rows, heads, columns).add_(attention_mask[:, 0])

    probs = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    output = torch.bmm(probs, value.flatten(0, 1))
    return output.view(rows, 1, heads, value.shape[3]), None


def grouped_mask(*args: Any, q_length: int, **kwargs: Any) -> Tensor | None:
    """Return the mask that all layers share: additive for one query, otherwise sdpa's mask."""
    mask: Tensor | None = sdpa_mask(*args, **(kwargs | {"q_length": q_length}))
    if q_length > 1 or mask is None:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -torch.inf)


@contextmanager
def grouped_decoding(module: Any) -> Iterator[None]:
    """Context in which a module with "sdpa" attention decodes by `grouped_attention`."""
    config = module.config.get_text_config()
    has_interface = getattr(module, "_supports_attention_backend", False)
    if config._attn_implementation != "sdpa" or not has_interface:
        yield
        return

    with override_attention(module, NAME, grouped_attention, grouped_mask):
        yield


def check_decoding(config: Any, longest: int) -> None:
    """Reject a model whose class fails the test of decoding on rows of up to `longest` tokens."""
    reason = Support.of(config).why_not("native", longest)
    if reason:
        raise ConfigError(
            "actor_rollout_ref.rollout.name=native is not known to decode model type "
            f"{config.model_type!r} correctly: {reason}. Set actor_rollout_ref.rollout.name=hf or "
            "vllm."
        )


def can_decode(config: Any, longest: int) -> bool:
    """Return True if this engine decodes rows of up to `longest` tokens with this model."""
    try:
        check_model(config.get_text_config(), longest)
        check_decoding(config, longest)
    except ConfigError:
        return False
    return True


def check_model(config: Any, width: int) -> None:
    """Reject rows that the model does not attend to in full, or longer than its positions."""
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and width > limit:
        raise ConfigError(
            f"data.max_prompt_length + data.max_response_length = {width} tokens, but the model "
            f"has {limit} positions. Lower one of the two."
        )

    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    has_window = getattr(config, "use_sliding_window", True)
    window = getattr(config, "sliding_window", None) if has_window else None
    if kinds - {"full_attention", "sliding_attention"} or (window is not None and window < width):
        with_window = "" if window is None else f" and a sliding window of {window} tokens"
        raise ConfigError(
            "actor_rollout_ref.rollout.name=native decodes only full attention, but model type "
            f"{config.model_type!r} has layers of kind {', '.join(sorted(kinds))}{with_window} "
            f"(rows of this run have up to {width} tokens). Set actor_rollout_ref.rollout.name=hf "
            "or vllm."
        )
