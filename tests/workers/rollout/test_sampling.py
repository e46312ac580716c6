"""Samples against their distribution; the noise against its definition."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from verl_like.errors import ConfigError
from workers.rollout import sampling as sampling_module
from workers.rollout.base import SamplingParams
from workers.rollout.sampling import (
    filtered_probs,
    sample_seed,
    sample_tokens,
    uniforms,
    uniforms_of,
)

VOCAB, DRAWS = 8, 20_000


def sampling(**settings: Any) -> SamplingParams:
    return SamplingParams(max_tokens=1, stop_token_ids=(0,), **settings)


def noise(count: int, position: int = 0) -> torch.Tensor:
    keys = np.array([sample_seed(0, f"{row}-0", 0) for row in range(count)], dtype=np.uint64)
    return torch.from_numpy(uniforms(keys, np.full(count, position)))


def expected_probs(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = -1,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> dict[int, float]:
    """Return the truncated distribution token by token, in plain Python."""
    weights = np.exp(logits.double().numpy() / temperature)
    probs = dict(enumerate(weights / weights.sum()))
    likeliest = sorted(probs, key=lambda token: -probs[token])
    if top_k > 0:
        likeliest = likeliest[:top_k]
    tokens, total, mass = [], sum(probs[token] for token in likeliest), 0.0
    for token in likeliest:
        if mass < top_p * total:
            tokens.append(token)
        mass += probs[token]
    tokens = [token for token in tokens if probs[token] >= min_p * probs[likeliest[0]]]
    total = sum(probs[token] for token in tokens)
    return {token: probs[token] / total for token in tokens}


def sorted_top_p(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return the fewest likeliest probabilities that reach top-p, by a stable sort."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    beyond = before >= top_p * probs.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probs).scatter(1, order, ordered.masked_fill(beyond, 0.0))


@pytest.mark.parametrize("vocab", [1, 5, 40_000])
@pytest.mark.parametrize("spread", [0.0, 4.0])
@pytest.mark.parametrize("has_ties", [False, True])
def test_top_p_selects_the_tokens_that_a_sort_selects(
    vocab: int, spread: float, has_ties: bool
) -> None:
    logits = spread * torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab))
    log_probs = torch.log_softmax(logits.round() if has_ties else logits, dim=-1)
    for top_p in (1e-9, 0.3123457, 0.7012345, 0.9512345, 0.9991234):
        expected = sorted_top_p(log_probs.double().exp(), top_p)
        assert filtered_probs(log_probs, sampling(top_p=top_p)).equal(expected)


def test_top_p_sorts_only_integers_of_32_bits() -> None:
    class Sorts(TorchDispatchMode):
        dtypes: ClassVar[list[torch.dtype]] = []

        def __torch_dispatch__(self, func: Any, *args: Any) -> Any:
            if str(func).startswith("aten.sort"):
                self.dtypes.append(args[1][0].dtype)
            return func(*args[1], **(args[2] if len(args) > 2 else {}))

    with Sorts():
        filtered_probs(torch.log_softmax(torch.randn(4, 5000), -1), sampling(top_p=0.9))
    assert Sorts.dtypes == [torch.int32]


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9, "min_tokens": 1}, {"do_sample": False}])
def test_tokens_do_not_depend_on_the_rows_per_pass(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, noise = torch.randn(7, 50), torch.rand(7, dtype=torch.float64)
    arguments = logits, noise, sampling(**settings), torch.arange(7)
    together = sample_tokens(*arguments)
    monkeypatch.setattr(sampling_module, "LOGITS_AT_ONCE", 2 * 50)
    for in_parts, whole in zip(sample_tokens(*arguments), together, strict=True):
        assert torch.equal(in_parts, whole)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"min_tokens": 1, "truncated_log_probs": True},
        {"logit_bias": ((3, 1.5),)},
        {"do_sample": False},
    ],
)
def test_compiled_sampling_is_one_graph_for_any_number_of_rows(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(
        sampling_module._sample_rows, backend=backend, dynamic=True, fullgraph=True
    )
    monkeypatch.setattr(sampling_module, "_compiled_sampling", lambda: compiled)
    for num_rows in (2, 5, 9):
        logits, noise = torch.randn(num_rows, 1000), torch.rand(num_rows, dtype=torch.float64)
        arguments = logits, noise, sampling(**settings), torch.arange(num_rows)
        together = sample_tokens(*arguments, fused=True)
        for fused, plain in zip(together, sample_tokens(*arguments), strict=True):
            assert torch.equal(fused, plain)
    assert len(graphs) == 1


def chi_square_limit(freedom: int) -> float:
    """Return Wilson and Hilferty's approximation of the 99.9 % quantile."""
    return freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.5},
        {"top_k": 3},
        {"min_p": 0.2},
        {"temperature": 1.7, "top_k": 5, "top_p": 0.8, "min_p": 0.05},
    ],
)
def test_tokens_follow_the_truncated_distribution(settings: dict[str, Any]) -> None:
    logits = torch.tensor([0.3, -1.0, 1.5, 0.0, 0.9, -0.4, 2.0, -2.0])
    tokens, _ = sample_tokens(logits.repeat(DRAWS, 1), noise(DRAWS), sampling(**settings))
    counts = torch.bincount(tokens, minlength=VOCAB).tolist()
    expected = expected_probs(logits, **settings)
    assert {token for token in range(VOCAB) if counts[token]} == set(expected)
    statistic = sum((counts[token] - DRAWS * p) ** 2 / (DRAWS * p) for token, p in expected.items())
    assert statistic < chi_square_limit(len(expected) - 1)


def test_truncation_keeps_ties_and_at_least_one_token() -> None:
    even = torch.log_softmax(torch.zeros(1, VOCAB), dim=-1)
    assert filtered_probs(even, sampling(top_k=2)).count_nonzero() == VOCAB
    assert filtered_probs(even, sampling(top_p=1e-9)).count_nonzero() == 1
    assert filtered_probs(even, sampling(top_k=100)).count_nonzero() == VOCAB


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.6, "top_k": 3}, {"top_p": 0.7, "min_p": 0.1}]
)
def test_truncated_log_probs_follow_the_truncated_distribution(
    settings: dict[str, Any],
) -> None:
    logits = torch.randn(50, VOCAB)
    bias = {"logit_bias": ((3, 1.5),), "truncated_log_probs": True}
    tokens, log_probs = sample_tokens(logits, noise(50), sampling(**settings, **bias))
    for row, token in enumerate(tokens.tolist()):
        biased = logits[row] + torch.tensor([0.0, 0.0, 0.0, 1.5, 0.0, 0.0, 0.0, 0.0])
        assert log_probs[row, 1].exp() == pytest.approx(
            expected_probs(biased, **settings)[token], rel=1e-5
        )
    plain = sampling(**settings, logit_bias=bias["logit_bias"])
    assert torch.equal(sample_tokens(logits, noise(50), plain)[1], log_probs[:, :1])


def test_greedy_tokens_have_log_probs_of_temperature_one() -> None:
    logits = torch.randn(50, VOCAB)
    tokens, log_probs = sample_tokens(logits, noise(50), sampling(do_sample=False, temperature=0.1))
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.equal(log_probs[:, 0], torch.log_softmax(logits, -1).max(-1).values)


def test_the_ends_of_the_noise_draw_possible_tokens() -> None:
    logits = torch.tensor([[-200.0, 0.0, 0.0, -200.0]]).repeat(2, 1)
    tokens, _ = sample_tokens(
        logits, torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64), sampling(top_k=2)
    )
    assert tokens.tolist() == [1, 2]


def test_noise_is_a_pure_function_of_key_and_position() -> None:
    keys, positions = np.array([1, 2**64 - 1, 5], dtype=np.uint64), np.array([0, 1, 10_000])
    together = uniforms(keys, positions)
    one_by_one = [uniforms(keys[i : i + 1], positions[i : i + 1])[0] for i in range(3)]
    assert together.tolist() == one_by_one
    assert ((together >= 0) & (together < 1)).all()
    # The published first outputs of splitmix64 with seed 1234567.
    first = uniforms(np.full(2, 1234567, dtype=np.uint64), np.arange(2))
    assert first.tolist() == [
        (value >> 11) * 2.0**-53 for value in (6457827717110365317, 3203168211198807973)
    ]


def test_noise_is_even_along_positions_and_along_keys() -> None:
    along_positions = uniforms(
        np.full(DRAWS, sample_seed(0, "0-0", 0), dtype=np.uint64), np.arange(DRAWS)
    )
    for numbers in (along_positions, noise(DRAWS).numpy()):
        counts = np.histogram(numbers, bins=32, range=(0, 1))[0]
        assert ((counts - DRAWS / 32) ** 2 / (DRAWS / 32)).sum() < chi_square_limit(31)
    assert abs(np.corrcoef(along_positions[1:], along_positions[:-1])[0, 1]) < 0.03


def test_every_part_of_a_name_changes_the_key() -> None:
    parts = ([0, 1], ["0-0", "1-0", "0-1"], [0, 1], [0, 1], ["train", "validate"])
    names = list(itertools.product(*parts))
    assert len({sample_seed(*name) for name in names}) == len(names)
    assert sample_seed(0, "0-0", 0) == sample_seed(0, np.str_("0-0"), np.int64(0))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": 0.0}, "do_sample=false"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"min_p": -0.1}, "min_p=-0.1"),
    ],
)
def test_settings_that_draw_nothing_are_rejected(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sampling(**settings)


def test_the_noise_of_tensors_equals_that_of_arrays() -> None:
    random = np.random.default_rng(0)
    keys = random.integers(0, 2**64, size=5000, dtype=np.uint64, endpoint=False)
    keys[:2] = 0, 2**64 - 1
    positions = random.integers(0, 2**31, size=5000)
    signed = torch.from_numpy(keys.view(np.int64))
    noise = uniforms_of(signed, torch.from_numpy(positions))
    assert torch.equal(noise, torch.from_numpy(uniforms(keys, positions)))
