"""Split a vocabulary over the ranks of a group, and compute statistics of its logits.

Logits are never gathered: each rank has the logits of its part of the vocabulary. The ranks
exchange one maximum per row, and then sum four numbers per row. The gradient of the logits needs no
further communication.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl_like.tensor_ops import gradient_of_logits, row_chunks, scaled_rows


@dataclass(frozen=True)
class VocabShard:
    """This rank's tokens, divided like rows of a DTensor: the last ranks may have fewer."""

    first: int
    count: int
    most: int
    """Largest number of tokens on a rank."""
    group: dist.ProcessGroup

    @classmethod
    def of(cls, vocabulary: int, group: dist.ProcessGroup) -> VocabShard:
        """Return this rank's tokens of a vocabulary of that size."""
        most = -(-vocabulary // group.size())
        first = min(group.rank() * most, vocabulary)
        return cls(first, min(most, vocabulary - first), most, group)

    def local_indices(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return indices among the rank's tokens, and a mask that marks tokens of other ranks."""
        places = ids - self.first
        is_other = (places < 0) | (places >= self.count)
        return places.masked_fill(is_other, 0), is_other

    def has(self, token: int) -> bool:
        """True if the rank has the logit of this token."""
        return self.first <= token < self.first + self.count


class _Stats(torch.autograd.Function):
    """Computes the label's log-prob, entropy and sum of squared probabilities per row of logits.

    It processes chunks of rows, like `verl_like.tensor_ops`. Each rank sums relative to
    the maximum of its own logits; a factor then makes the sum relative to the global maximum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        vocab: VocabShard,
        temperature: float,
        want_entropy: bool,
        want_squares: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(logits.dtype, torch.float32)
        places, is_other = vocab.local_indices(labels)
        own_max = logits.new_empty(len(logits), dtype=wide)
        label, total, entropy, squares = sums = logits.new_zeros(4, len(logits), dtype=wide)
        for rows in row_chunks(logits):
            scaled = scaled_rows(logits[rows], wide, temperature)
            own_max[rows] = scaled.amax(dim=-1)
            label[rows] = scaled.gather(-1, places[rows, None]).squeeze(-1)
            weights = (scaled - own_max[rows, None]).exp_()
            total[rows] = weights.sum(dim=-1)
            if want_entropy:
                entropy[rows] = torch.special.entr(weights).sum(dim=-1)
            if want_squares:
                squares[rows] = weights.square_().sum(dim=-1)

        most = own_max.clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=vocab.group)
        shift = own_max - most
        factor = shift.exp()
        entropy.sub_(shift * total).mul_(factor)
        total.mul_(factor)
        squares.mul_(factor.square())
        label.sub_(most).masked_fill_(is_other, 0.0)
        dist.all_reduce(sums, group=vocab.group)

        log_total = total.log()
        log_prob, entropy = label - log_total, entropy / total + log_total
        ctx.save_for_backward(logits, labels, most + log_total, entropy)
        ctx.vocab, ctx.temperature = vocab, temperature
        ctx.set_materialize_grads(False)
        squares = squares / total.square()
        ctx.mark_non_differentiable(squares)
        return log_prob, entropy, squares

    @staticmethod
    def backward(
        ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None, _: Any
    ) -> tuple[Tensor | None, ...]:
        if grad_logprob is None and grad_entropy is None:
            return (None,) * 6
        logits, labels, log_norm, entropy = ctx.saved_tensors
        places, is_other = ctx.vocab.local_indices(labels)
        grad_label = None if grad_logprob is None else grad_logprob.masked_fill(is_other, 0.0)
        grads = grad_logprob, grad_label, grad_entropy
        grad = gradient_of_logits(
            logits, places, log_norm, entropy, *grads, ctx.temperature, inplace=True
        )
        return (grad, *(None,) * 5)


def token_stats(
    logits: Tensor,
    labels: Tensor,
    vocab: VocabShard,
    temperature: float = 1.0,
    entropy: bool = False,
    sum_pi_squared: bool = False,
) -> dict[str, Tensor]:
    """Return `log_probs` of the labels, and the requested statistics, of logits [rows, own tokens].

    The backward pass overwrites the logits; sums of squared probabilities have no gradient.
    """
    stats = _Stats.apply(logits, labels, vocab, temperature, entropy, sum_pi_squared)  # type: ignore[no-untyped-call]
    requested = {"log_probs": True, "entropys": entropy, "sum_pi_squared": sum_pi_squared}
    return {
        name: column
        for (name, is_requested), column in zip(requested.items(), stats, strict=True)
        if is_requested
    }
