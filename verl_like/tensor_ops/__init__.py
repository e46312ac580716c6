"""Functions on padded batches: sums inside masks, log-probs of logits, balanced row lengths."""

from verl_like.tensor_ops.balance import (
    get_group_balanced_partitions,
    get_reverse_idx,
    get_seqlen_balanced_partitions,
)
from verl_like.tensor_ops.logprobs import (
    logprobs_and_entropy_from_logits,
    logprobs_from_logits,
    sum_pi_squared_from_logits,
)
from verl_like.tensor_ops.masked import (
    last_places,
    masked_mean,
    masked_sum,
    zero_outside,
)

__all__ = [
    "get_group_balanced_partitions",
    "get_reverse_idx",
    "get_seqlen_balanced_partitions",
    "logprobs_and_entropy_from_logits",
    "logprobs_from_logits",
    "last_places",
    "masked_mean",
    "masked_sum",
    "sum_pi_squared_from_logits",
    "zero_outside",
]
