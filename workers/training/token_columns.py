"""What a training engine says of every response token, from the logits that it was drawn by.

The logits are those of a whole pass, or of a chunk of it.
"""

from __future__ import annotations

from torch import Tensor

from verl_like.tensor_ops import (
    logprobs_and_entropy_from_logits,
    logprobs_from_logits,
    sum_pi_squared_from_logits,
)


def columns_of_logits(
    logits: Tensor,
    labels: Tensor,
    temperature: float,
    want_entropy: bool = False,
    want_sum_pi_squared: bool = False,
) -> dict[str, Tensor]:
    """The labels' log-probs, and what else is wanted; the backward pass writes over `logits`."""
    found = {}
    if want_sum_pi_squared:
        found["sum_pi_squared"] = sum_pi_squared_from_logits(logits, temperature=temperature)
    if not want_entropy:
        log_probs = logprobs_from_logits(
            logits, labels, temperature=temperature, inplace_backward=True
        )
        return {"log_probs": log_probs, **found}

    log_probs, entropys = logprobs_and_entropy_from_logits(
        logits, labels, temperature=temperature, inplace_backward=True
    )
    return {"log_probs": log_probs, "entropys": entropys, **found}
