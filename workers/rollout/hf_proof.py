"""The proof that transformers' `generate` computes the same with a cache as without.

    reason = why_no_cache(config, longest)      # empty: the cache is right for rows so long

Caches are the classes' own, and some are wrong: a linear attention's state is another than that of
the whole row (minimax), or positions are counted anew. So a tiny stand-in of the class decodes a
few rows greedily, longer than every limit that this run's rows can pass, and each step's logits are
compared with a plain pass over the row. Only where these differ does the row decode without a
cache, too: what a class computes of a part of a row may not be what it computes of the whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from workers.models.support.proof import Proof, Support, relative_error
from workers.models.support.stand_in import VOCABULARY

PROMPTS, NUM_STEPS = (24, 3, 1), 24
"""Tokens of the prompts that prove, one after the other, and of their responses.

A class that keeps its state in its modules takes a prompt of one token for the last row's next.
"""
LARGEST_ERROR = 2e-5
"""Relative error of logits up to which it is rounding; beyond, the slower way is taken."""


def why_no_cache(config: Any, longest: int) -> str:
    """What is wrong with decoding such a model from a cache; nothing is an empty text."""
    support = replace(Support.of(config), config=config)  # the class that generates, not its text's
    return support.why_not(generation_with_cache, longest)


@Proof
def generation_with_cache(model: Any) -> str:
    """Return what is wrong with it on this model."""
    # row after row from the cache, as in a run; a pass without it would clear what a row leaves
    found = [_greedy_logits(model, length, use_cache=True) for length in PROMPTS]
    plain = [_logits_of_row(model, length, own) for length, own in zip(PROMPTS, found, strict=True)]
    if max(map(relative_error, found, plain)) <= LARGEST_ERROR:
        return ""

    plain = [_greedy_logits(model, length, use_cache=False) for length in PROMPTS]
    worst = max(map(relative_error, found, plain))
    return "" if worst <= LARGEST_ERROR else f"a small model of its class is off by {worst:.0e}"


def _prompt_of(length: int) -> Tensor:
    return 3 + torch.arange(length)[None] * 7 % (VOCABULARY - 3)


def _logits_of_row(model: Any, length: int, found: Tensor) -> Tensor:
    """[steps, vocabulary] of one pass over a prompt and the greedy tokens after it."""
    row = torch.cat([_prompt_of(length), found.argmax(dim=1)[None, :-1]], dim=1)
    logits: Tensor = model(row, use_cache=False).logits[0, length - 1 :]
    return logits.float()


def _greedy_logits(model: Any, length: int, use_cache: bool) -> Tensor:
    """[steps, vocabulary] of a response to a prompt of so many tokens."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig()
    prompt = _prompt_of(length)
    made = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NUM_STEPS,
        do_sample=False,
        pad_token_id=0,
        use_cache=use_cache,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.cat(made.logits).float()
