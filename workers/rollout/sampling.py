"""Parse sampling settings, and sample tokens with noise that does not depend on the batch.

The noise is counter-based: each sample has a 64-bit seed (`sample_seed`), and each pair of seed and
token position has one uniform number (`uniforms`). So placement, ranks, other samples and restarts
cannot change the number. The sampled token is the one at which the cumulative distribution exceeds
the number (`sample_tokens`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from verl_like.errors import ConfigError, nearest
from workers.rollout.base import SamplingParams
from workers.rollout.sample import sample_seed as sample_seed  # the documented path of this name

if TYPE_CHECKING:
    from workers.config import RolloutConfig


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a uniform number in [0, 1) per pair (key, position): splitmix64, seeded by the key."""
    state = keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    state = state ^ (state >> np.uint64(31))
    numbers: NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def uniforms_of(keys: Tensor, positions: Tensor) -> Tensor:
    """Compute `uniforms` on the device of the tensors; `keys` are the same bits as int64."""
    state = keys + (positions + 1) * _signed(_GOLDEN)
    state = (state ^ _shifted(state, 30)) * _signed(_MIX_1)
    state = (state ^ _shifted(state, 27)) * _signed(_MIX_2)
    state = state ^ _shifted(state, 31)
    return _shifted(state, 11).double() * 2.0**-53


def _signed(number: np.uint64) -> int:
    return int(number.astype(np.int64))


def _shifted(state: Tensor, places: int) -> Tensor:
    """Shift bits to the right and fill with zeros, as for an unsigned number."""
    return (state >> places) & ((1 << (64 - places)) - 1)


LOGITS_AT_ONCE = 10_000_000
"""Maximum number of logits that are sampled from together.

This is 64 rows of a vocabulary of 152,000, which need at most 0.6 GiB. vLLM reserves more memory
than that, because it profiles its own sampler with its largest batch.
"""


UNFILTERED_ON_GPU = 4
"""Factor by which `LOGITS_AT_ONCE` is larger on a GPU if no token is filtered out.

An H100 needed 0.4 GiB for 64 rows of that vocabulary, so 256 rows need at most 1.6 GiB.
"""


def sample_tokens(
    logits: Tensor,
    noise: Tensor,
    sampling: SamplingParams,
    positions: Tensor | None = None,
    fused: bool = False,
) -> tuple[Tensor, Tensor]:
    """Sample one token per row; return tokens [rows] and log-probs [rows, kinds].

    logits       [rows, vocabulary]
    noise        one uniform number per row
    positions    [rows], the positions of the tokens in their responses, for the minimum length

    The first log-prob is the policy's, under the whole distribution at the temperature: before
    bias, minimum length, top-k, top-p and min-p. The second, if requested, is under the
    distribution after all of them, which for greedy decoding has only one token.

    Rows are computed in chunks, so the memory of intermediate results does not grow with their
    number. `fused` compiles the computation (torch.compile) if no token is filtered out.
    """
    at_once = LOGITS_AT_ONCE
    if logits.device.type != "cpu" and not sampling.filters:
        at_once *= UNFILTERED_ON_GPU  # launching many small kernels would take longer than they run
    num_rows = max(1, at_once // logits.shape[1])
    sample = _compiled_sampling() if fused and not sampling.filters else _sample_rows
    if len(logits) <= num_rows:
        return sample(logits, noise, sampling, positions)
    results = []
    for first in range(0, len(logits), num_rows):
        rows = slice(first, first + num_rows)
        place = None if positions is None else positions[rows]
        results.append(sample(logits[rows], noise[rows], sampling, place))
    chosen_tokens, chosen_log_probs = zip(*results, strict=True)
    return torch.cat(chosen_tokens), torch.cat(chosen_log_probs)


def _sample_rows(
    logits: Tensor, noise: Tensor, sampling: SamplingParams, positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `sample_tokens` for all rows together."""
    logits, temperature = logits.float(), sampling.log_prob_temperature
    log_probs = torch.log_softmax(logits if temperature == 1 else logits / temperature, dim=-1)
    distribution = constrained(log_probs, sampling, positions)

    filtered: Tensor | None = None
    if not sampling.do_sample:
        tokens = logits.argmax(dim=-1) if distribution is log_probs else distribution.argmax(dim=-1)
    elif not sampling.filters:
        tokens = _inverse_of_blocks(distribution.exp(), noise)
    else:
        filtered = filtered_probs(distribution, sampling)
        tokens = _inverse(filtered, noise)

    chosen = tokens.unsqueeze(1)
    policy = log_probs.gather(1, chosen)
    if not sampling.truncated_log_probs:
        return tokens, policy

    if filtered is not None:
        truncated = (filtered.gather(1, chosen) / filtered.sum(dim=-1, keepdim=True)).log().float()
    elif sampling.do_sample:
        truncated = distribution.gather(1, chosen)
    else:
        truncated = torch.zeros_like(policy)
    return tokens, torch.cat([policy, truncated], dim=1)


@cache
def _compiled_sampling() -> Any:
    """Return `_sample_rows`, compiled for any number of rows."""
    return torch.compile(_sample_rows, dynamic=True)


def constrained(log_probs: Tensor, sampling: SamplingParams, positions: Tensor | None) -> Tensor:
    """Return log-probs after the bias, without stop tokens before the minimum length."""
    logits = log_probs
    if sampling.logit_bias:
        tokens, values = zip(*sampling.logit_bias, strict=True)
        bias = torch.tensor(values, device=logits.device) / sampling.log_prob_temperature
        index = torch.tensor(tokens, device=logits.device)
        logits = logits.index_add(1, index, bias.expand(len(logits), -1))

    if sampling.min_tokens and positions is not None:
        early = (positions < sampling.min_tokens).to(logits.device)
        stops = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
        stops[[token for token in sampling.stop_token_ids if 0 <= token < len(stops)]] = True
        logits = logits.masked_fill(early[:, None] & stops, -torch.inf)

    return log_probs if logits is log_probs else torch.log_softmax(logits, dim=-1)


def _inverse(probs: Tensor, noise: Tensor) -> Tensor:
    """Return the token at which the cumulative distribution exceeds the noise."""
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    target = noise.to(cumulative).unsqueeze(1) * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return index.clamp(max=probs.shape[1] - 1)


_BLOCK = 256


def _inverse_of_blocks(probs: Tensor, noise: Tensor) -> Tensor:
    """Compute `_inverse` in two stages: first the block of tokens, then the token in the block.

    So a large vocabulary is read only once.
    """
    rows, vocabulary = probs.shape
    if vocabulary <= 2 * _BLOCK:
        return _inverse(probs, noise)
    blocks = pad(probs, (0, -vocabulary % _BLOCK)).view(rows, -1, _BLOCK)
    ends = blocks.sum(dim=-1).double().cumsum(dim=-1)
    target = noise.to(ends).unsqueeze(1) * ends[:, -1:]
    block = torch.searchsorted(ends, target, right=True).clamp(max=ends.shape[1] - 1)
    start = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)

    chosen = blocks[torch.arange(rows, device=probs.device), block.squeeze(1)]
    inside = chosen.double().cumsum(dim=-1)
    # rounding must not select a token beyond the last one with a positive probability
    last = (inside < inside[:, -1:]).sum(dim=-1, keepdim=True)
    offset = torch.searchsorted(inside, target - start, right=True).minimum(last)
    return (block * _BLOCK + offset).squeeze(1)


_LIKELIEST = 1024
"""On a CPU, only this many likeliest tokens are sorted if they reach top-p."""


def _top_p(probs: Tensor, log_probs: Tensor, top_p: float) -> Tensor:
    """Return the probabilities of the fewest likeliest tokens that reach top-p, zero elsewhere.

    Tokens are sorted by the bits of their negated log-probs as integers, which takes less memory
    and time than sorting probabilities. Of equally likely tokens, the first ones stay.
    """
    target = top_p * probs.sum(dim=-1, keepdim=True)
    ranks, places = log_probs.abs().view(torch.int32), None
    if probs.device.type == "cpu":  # on a GPU, the check below would wait for the device
        likeliest, likely_places = probs.topk(min(_LIKELIEST, probs.shape[1]), dim=-1)
        without_ties = likeliest.where(likeliest > likeliest[:, -1:], 0.0)
        if (without_ties.sum(dim=-1, keepdim=True) >= target).all():
            places = likely_places.sort(dim=-1).values
            ranks = ranks.gather(1, places)
    order = ranks.sort(dim=-1, stable=True).indices
    places = order if places is None else places.gather(1, order)
    falling = probs.gather(1, places)
    mass_before = pad(falling.cumsum(dim=-1)[:, :-1], (1, 0))
    nucleus = falling.where(mass_before < target, 0.0)
    return torch.zeros_like(probs).scatter_(1, places, nucleus)


def filtered_probs(log_probs: Tensor, sampling: SamplingParams) -> Tensor:
    """Return probabilities [rows, vocabulary] in float64, zero outside top-k, top-p and min-p.

    They are not normalized again. Tokens as likely as the k-th likeliest token stay; top-p keeps
    the fewest likeliest tokens that reach it.
    """
    probs = log_probs.double().exp()
    if 1 <= sampling.top_k < probs.shape[1]:
        smallest = probs.topk(sampling.top_k, dim=-1).values[:, -1:]
        probs = probs.masked_fill(probs < smallest, 0.0)
    if sampling.top_p < 1:
        probs = _top_p(probs, log_probs, sampling.top_p)
    if sampling.min_p > 0:
        least = sampling.min_p * probs.max(dim=-1, keepdim=True).values
        probs = probs.masked_fill(probs < least, 0.0)
    return probs


DRAWN_BY = ("temperature", "top_k", "top_p")
"""Settings that have no effect in greedy decoding."""

STOPS = ("stop_strings", "stop_token_ids")
"""Settings that end a response; of `sampling_kwargs`, validation uses only these."""
EXTRA_SAMPLING = ("min_p", "min_tokens", *STOPS, "logit_bias", "truncated_log_probs")
"""Fields that `rollout.sampling_kwargs` may set."""


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "min_p": (_is_number, "a number from 0 to 1"),
    "min_tokens": (_is_whole, "a whole number"),
    "truncated_log_probs": (lambda value: isinstance(value, bool), "true or false"),
}
"""By field: a test of its value, and a description of valid values for errors."""


def sampling_params(
    settings: dict[str, Any], max_tokens: int, stop_token_ids: tuple[int, ...]
) -> SamplingParams:
    """Parse sampling settings from the configuration and `meta_info`.

    Stop ids in the settings are added to `stop_token_ids`. The settings may have lists, and a dict
    as the bias; the result has tuples.
    """
    settings = {"max_tokens": max_tokens, **settings}
    for name, (is_valid, rule) in KINDS.items():
        if name in settings and not is_valid(settings[name]):
            raise _invalid(name, settings[name], rule)

    ids = settings.get("stop_token_ids", ())
    ids = ids if isinstance(ids, Iterable) and not isinstance(ids, str) else (ids,)
    if not all(_is_whole(token) and token >= 0 for token in ids):
        valid = "token ids, such as [32007]; for text there is stop_strings"
        raise _invalid("stop_token_ids", list(ids), valid)
    settings["stop_token_ids"] = tuple(dict.fromkeys((*stop_token_ids, *ids)))

    texts = settings.get("stop_strings", ())
    texts = (texts,) if isinstance(texts, str) else texts
    if not isinstance(texts, Iterable) or not all(isinstance(text, str) for text in texts):
        raise _invalid("stop_strings", texts, "a text or a list of texts, such as ['</s>']")
    settings["stop_strings"] = tuple(texts)

    bias = settings.get("logit_bias", {})
    try:
        pairs = dict(bias).items()
        settings["logit_bias"] = tuple((int(token), float(value)) for token, value in pairs)
    except (TypeError, ValueError):
        valid = "a dict of numbers by token id, such as {32007: -5}"
        raise _invalid("logit_bias", bias, valid) from None
    return SamplingParams(**settings)


def _invalid(name: str, value: Any, valid: str) -> ConfigError:
    return ConfigError(f"sampling_kwargs.{name}={value} must be {valid}.")


def check_sampling(config: RolloutConfig, max_tokens: int) -> None:
    """Reject training and validation settings that make sampling impossible."""
    for name in config.sampling_kwargs:
        if name not in EXTRA_SAMPLING:
            valid = ", ".join(EXTRA_SAMPLING)
            raise ConfigError(
                f"actor_rollout_ref.rollout.sampling_kwargs has no key {name!r}; valid: "
                f"{valid}.{nearest(name, EXTRA_SAMPLING)}"
            )
    sections: dict[str, Any] = {"rollout": config, "rollout.val_kwargs": config.validation}
    for name, section in sections.items():
        settings = dict(config.sampling_kwargs)
        if section.do_sample:
            settings |= {key: getattr(section, key) for key in DRAWN_BY}
        try:
            sampling_params(settings, max_tokens, (0,))
        except ConfigError as error:
            raise ConfigError(f"actor_rollout_ref.{name}: {error}") from error
