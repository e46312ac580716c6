"""Prove that the native engine decodes a class of models as transformers computes it.

    check_decoding(config, longest)         # a ConfigError names the model type and the problem

A slot cache stores the keys and values of every token, and nothing else: no recurrent state, no
window, no index. Classes differ in masks and caches, so each is tested. A tiny stand-in of the
class decodes a few rows greedily, longer than every limit that this run's rows can exceed, and the
logits of each step are compared with transformers' pass over the single row. One row is also
decoded separately, from below the limits to beyond them: rotary factors that change with the
longest row of a pass (longrope) would leave keys with other factors in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl_like.errors import ConfigError
from workers.models.support.proof import LONGEST, Proof, Support, relative_error
from workers.models.support.stand_in import LIMIT, VOCABULARY
from workers.rollout.native.grouped_attention import grouped_decoding
from workers.rollout.native.kv_cache import (
    SlotCache,
    Slots,
    least_window,
    prefill_width,
    slot_width,
)
from workers.rollout.native.module_forward import ModuleForward

PROMPTS = ((30, 3, 17, 24), (3,))
"""Lengths of the test prompts, by group."""
PROMPT_WIDTH, NUM_STEPS = 32, 24
"""Width and steps such that the cache grows once."""
LARGEST_ERROR = 3e-4
"""Largest relative error of correct logits; wrong ones are off by 2e-3 or more."""


def check_decoding(config: Any, longest: int) -> None:
    """Reject a model whose class this engine decodes incorrectly on rows of `longest` tokens."""
    reason = why_not_native(config, longest)
    if reason:
        raise ConfigError(
            f"rollout.name=native does not decode model type {config.model_type!r} as transformers "
            f"computes it: {reason}. Choose actor_rollout_ref.rollout.name=hf or vllm."
        )


def why_not_native(config: Any, longest: int) -> str:
    """Return what is wrong with this engine's decoding of such a model; "" if nothing is."""
    return Support.of(config).why_not(slot_cache_decoding, longest)


@Proof
def slot_cache_decoding(model: Any) -> str:
    """Return what is wrong with slot cache decoding on this model."""
    decoded = [row for lengths in PROMPTS for row in _decoded(model, lengths)]
    worst = max(_error_of_row(model, row, logits) for row, logits in decoded)
    if worst <= LARGEST_ERROR:
        return ""

    size = f"off by {worst:.0e}" if worst < torch.inf else "not finite"
    return (
        f"logits of a small model of its class are {size} (its windows, chunks and original "
        f"lengths are {LIMIT} tokens where this run's rows, of up to {LONGEST} tokens, are longer "
        "than the model's)"
    )


def _decoded(model: Any, lengths: tuple[int, ...]) -> list[tuple[list[int], Tensor]]:
    """Return each prompt's tokens with the greedy ones after it, and the logits of every step."""
    prompts = [
        tuple(6 + (7 + row) * place % (VOCABULARY - 6) for place in range(length))
        for row, length in enumerate(lengths)
    ]
    config, positions = model.config, torch.tensor(lengths)
    width = slot_width(config, PROMPT_WIDTH, NUM_STEPS)
    slots = Slots(len(prompts), width, least_window(config), positions.device)
    cache = SlotCache(config.num_hidden_layers, slots)

    with grouped_decoding(model):
        forward = ModuleForward(model, cache)
        cache.fit(1 + PROMPT_WIDTH, 0)
        width = prefill_width(max(lengths), PROMPT_WIDTH)
        logits = [forward.prefill(prompts, width, torch.arange(len(prompts)), 0)]
        for step in range(NUM_STEPS - 1):
            cache.fit(max(lengths) + step + 2, len(prompts))
            logits.append(forward.decode(logits[-1].argmax(dim=1), positions + step))

    steps = torch.stack(logits, dim=1).float()
    tokens = steps.argmax(dim=2).tolist()
    return [
        ([*prompt, *new[:-1]], row) for prompt, new, row in zip(prompts, tokens, steps, strict=True)
    ]


def _error_of_row(model: Any, row: list[int], logits: Tensor) -> float:
    """Return the error of a row's logits against transformers' pass over the row."""
    plain = model(torch.tensor([row]), use_cache=False).logits[0, -len(logits) :].float()
    return relative_error(logits, plain)


def check_model(config: Any, width: int) -> None:
    """Reject models without full attention, and rows longer than a model's positions."""
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and width > limit:
        raise ConfigError(
            f"data.max_prompt_length + data.max_response_length = {width} tokens, but the model "
            f"has {limit} positions; lower one of them."
        )

    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    has_window = getattr(config, "use_sliding_window", True)
    window = getattr(config, "sliding_window", None) if has_window else None
    if kinds - {"full_attention", "sliding_attention"} or (window is not None and window < width):
        raise ConfigError(
            f"rollout.name=native decodes full attention only; model type {config.model_type!r} "
            f"has layers {', '.join(sorted(kinds))} and a sliding window of {window} (this run is "
            f"{width} tokens wide). Choose actor_rollout_ref.rollout.name=hf or vllm."
        )
