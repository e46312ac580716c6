"""Drawing tokens so that a sample never depends on what else is in the batch. Rollout engines call this at every step.

The noise is counter-based: a 64-bit key per sample (`noise_key`) and one uniform number per (key, token position)
(`uniforms`), so placement, ranks, neighbours and restarts cannot change it. A token is the inverse of the cumulative
distribution, in float64, at that number (`choose_tokens`).
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engines.rollout_base import SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def noise_key(seed: int, uid: str, sample_index: int, attempt: int = 0, stream: str = "train") -> int:
    """The 64-bit key of a sample's noise; `attempt` counts refills of the sample, `stream` parts validation off."""
    name = repr((int(seed), str(uid), int(sample_index), int(attempt), stream))
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) per (key, token position): output `position` of the splitmix64 generator seeded by `key`."""
    state = keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    state = state ^ (state >> np.uint64(31))
    numbers: NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def choose_tokens(logits: Tensor, noise: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Tokens [rows] and their log-probs [rows] from logits [rows, vocabulary] and one uniform number per row.

    The log-prob is that of the whole distribution at the temperature, before top-k, top-p and min-p.
    """
    log_probs = torch.log_softmax(logits.float() / sampling.log_prob_temperature, dim=-1)
    if sampling.do_sample:
        cumulative = filtered_probs(log_probs, sampling).cumsum(dim=-1)
        target = noise.to(cumulative).unsqueeze(1) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp(max=logits.shape[1] - 1)
    else:
        tokens = logits.argmax(dim=-1)
    return tokens, log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def filtered_probs(log_probs: Tensor, sampling: SamplingParams) -> Tensor:
    """Probabilities [rows, vocabulary] in float64, zero outside top-k, top-p and min-p; not normalised again.

    Ties with the k-th likeliest token stay; top-p keeps the fewest likeliest tokens that reach it.
    """
    probs = log_probs.double().exp()
    if 1 <= sampling.top_k < probs.shape[1]:
        smallest = probs.topk(sampling.top_k, dim=-1).values[:, -1:]
        probs = probs.masked_fill(probs < smallest, 0.0)
    if sampling.top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
        beyond = before >= sampling.top_p * probs.sum(dim=-1, keepdim=True)
        probs = torch.zeros_like(probs).scatter(1, order, ordered.masked_fill(beyond, 0.0))
    if sampling.min_p > 0:
        probs = probs.masked_fill(probs < sampling.min_p * probs.max(dim=-1, keepdim=True).values, 0.0)
    return probs
