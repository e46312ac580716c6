"""Prove that transformers' `generate` computes the same with a cache as without.

    reason = why_no_cache(config, longest)      # "": the cache is correct for rows of this length

Each class has its own cache, and some are wrong: the state of a linear attention differs from that
of the whole row (minimax), or positions restart. So a tiny stand-in of the class decodes a few rows
greedily, longer than every limit that this run's rows can exceed, and the logits of each step are
compared with a plain pass over the row. If they differ, the row is also decoded without a cache,
because a class may compute a part of a row differently from the whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from workers.models.support.proof import Proof, Support, relative_error
from workers.models.support.stand_in import VOCABULARY

PROMPTS, NUM_STEPS = (24, 3, 1), 24
"""Lengths of the test prompts, one after the other, and of their responses.

A class that stores its state in its modules takes a prompt of one token for the next token of the
previous row.
"""
LARGEST_ERROR = 2e-5
"""Largest relative error of logits that counts as rounding; beyond it, the cache is not used."""


def why_no_cache(config: Any, longest: int) -> str:
    """Return what is wrong with decoding such a model from a cache; "" if nothing is."""
    support = replace(Support.of(config), config=config)  # not its text model's
    return support.why_not(generation_with_cache, longest)


@Proof
def generation_with_cache(model: Any) -> str:
    """Return what is wrong with cached decoding on this model."""
    # row after row from the cache, as in a run; a pass without cache would clear left-over state
    cached = [_greedy_logits(model, length, use_cache=True) for length in PROMPTS]
    plain = [_logits_of_row(model, n, steps) for n, steps in zip(PROMPTS, cached, strict=True)]
    if max(map(relative_error, cached, plain)) <= LARGEST_ERROR:
        return ""

    plain = [_greedy_logits(model, length, use_cache=False) for length in PROMPTS]
    worst = max(map(relative_error, cached, plain))
    return "" if worst <= LARGEST_ERROR else f"a small model of its class is off by {worst:.0e}"


def _prompt_of(length: int) -> Tensor:
    return 3 + torch.arange(length)[None] * 7 % (VOCABULARY - 3)


def _logits_of_row(model: Any, length: int, greedy: Tensor) -> Tensor:
    """Return [steps, vocabulary] of one pass over a prompt and the greedy tokens after it."""
    row = torch.cat([_prompt_of(length), greedy.argmax(dim=1)[None, :-1]], dim=1)
    logits: Tensor = model(row, use_cache=False).logits[0, length - 1 :]
    return logits.float()


def _greedy_logits(model: Any, length: int, use_cache: bool) -> Tensor:
    """Return [steps, vocabulary] of a response to a prompt of `length` tokens."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig()
    prompt = _prompt_of(length)
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NUM_STEPS,
        do_sample=False,
        pad_token_id=0,
        use_cache=use_cache,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.cat(output.logits).float()
