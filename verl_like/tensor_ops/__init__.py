"""Functions on padded batches: sums inside masks, and log-probs of logits.

`verl_like.tensor_ops.balance` divides rows among ranks by their lengths.
"""

from verl_like.tensor_ops.logprobs import (
    logprobs_and_entropy_from_logits,
    logprobs_from_logits,
    sum_pi_squared_from_logits,
)
from verl_like.tensor_ops.masked import last_places, masked_mean, masked_sum, zero_outside

__all__ = [
    "logprobs_and_entropy_from_logits",
    "logprobs_from_logits",
    "last_places",
    "masked_mean",
    "masked_sum",
    "sum_pi_squared_from_logits",
    "zero_outside",
]
