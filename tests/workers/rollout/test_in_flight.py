"""Weights that arrive during generation, and responses that continue later: each engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers.rollout_engines import (
    RESPONSE,
    STOP,
    VOCAB,
    begun,
    first_tokens,
    full_logits,
    generate_and,
    load,
    make_engine,
    make_model,
    make_prompts,
    requests_of,
    same,
    settings,
)
from verl_like.errors import RolloutError, WeightSyncError
from workers.rollout.base import RolloutEngine
from workers.rollout.native.engine import NativeEngine
from workers.rollout.sample import Sample

PROMPTS = make_prompts()
LONG = settings(stop_token_ids=(STOP[0],), temperature=0.9)
"""Most responses are as long as they may be."""


@pytest.fixture(scope="module")
def other(folder: Path) -> Any:
    """The model after an update."""
    return make_model(folder / "other", seed=1)


@pytest.fixture(params=[False, True], ids=["computed again", "kept"])
def keep_kv_cache(engine: RolloutEngine, request: pytest.FixtureRequest) -> Iterator[bool]:
    limits = engine.limits
    engine.limits = replace(limits, keep_kv_cache=request.param)
    yield request.param
    engine.limits = limits


def log_probs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probs of these tokens, as `LONG` reports them."""
    every = torch.log_softmax(logits / LONG.temperature, -1)
    return every.gather(1, tokens[:, None])[:, 0]


def logits_over_kept_keys(old: Any, new: Any, prompt: Sequence[int], output: Sample) -> Tensor:
    """Return `new`'s logits of its tokens after `old` has read all before the last one."""
    made = int((output.versions == 3).sum())
    ids = torch.tensor([[*prompt, *output.tokens.tolist()]])
    read = len(prompt) + made - 1
    with torch.no_grad():
        cache = old(ids[:, :read], use_cache=True).past_key_values
        logits: Tensor = new(ids[:, read:-1], past_key_values=cache).logits
    return logits[0]


def test_later_tokens_are_the_new_weights_over_keys_computed_again_or_kept(
    engine: RolloutEngine, model: Any, other: Any, keep_kv_cache: bool
) -> None:
    requests = requests_of(PROMPTS)
    outputs = generate_and(engine, requests, LONG, 5, lambda: load(engine, other, 4))
    mixed = 0
    for request, output in zip(requests, outputs, strict=True):
        old, new = output.versions == 3, output.versions == 4
        assert bool((old | new).all())
        assert output.versions.tolist() == sorted(output.versions.tolist())
        prompt, tokens = list(request.prompt), output.tokens
        before = log_probs_of(full_logits(model, prompt, tokens), tokens)
        torch.testing.assert_close(output.log_probs[old], before[old], atol=1e-5, rtol=0)

        expected = log_probs_of(full_logits(other, prompt, tokens), tokens)[new]
        if old.any() and new.any():
            mixed += 1
            if keep_kv_cache:
                again, kept = expected, logits_over_kept_keys(model, other, prompt, output)
                expected = log_probs_of(kept, tokens[new])
                assert (expected - again).abs().max() > 1e-3
        torch.testing.assert_close(output.log_probs[new], expected, atol=1e-5, rtol=0)
    assert mixed > 4

    (plain,) = engine.generate(requests[:1], LONG)
    expected = log_probs_of(full_logits(other, PROMPTS[0], plain.tokens), plain.tokens)
    torch.testing.assert_close(plain.log_probs, expected, atol=1e-5, rtol=0)


def test_a_response_that_took_new_weights_goes_on_from_any_of_its_tokens(
    engine: RolloutEngine, other: Any
) -> None:
    requests = requests_of(PROMPTS)
    whole = generate_and(engine, requests, LONG, 5, lambda: load(engine, other, 4))
    for num_new in (0, 1, 4):
        begun, expected = [], []
        for output in whole:
            count = int((output.versions == 3).sum()) + num_new
            if num_new <= count < len(output.tokens):
                begun.append(first_tokens(output, count))
                expected.append(output)
        assert begun
        for found, output in zip(engine.generate(begun, LONG), expected, strict=True):
            same(found, output, engine)


def test_a_response_goes_on_so_too_where_the_module_itself_decodes(
    model: Any, other: Any, folder: Path
) -> None:
    engine = make_engine("native", model, folder)
    assert isinstance(engine, NativeEngine)
    engine.direct_agrees = False
    load(engine, model, 3)
    outputs = generate_and(engine, requests_of(PROMPTS), LONG, 8, lambda: load(engine, other, 4))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        new = output.versions == 4
        expected = log_probs_of(full_logits(other, prompt, output.tokens), output.tokens)
        torch.testing.assert_close(output.log_probs[new], expected[new], atol=1e-5, rtol=0)
    assert sum(len(output.versions.unique()) for output in outputs) > len(PROMPTS) + 4


def test_responses_of_older_weights_go_on_beside_new_ones_as_alone(
    engine: RolloutEngine, other: Any
) -> None:
    requests = requests_of(PROMPTS)
    half = begun(engine, requests[::2], LONG, 3)
    load(engine, other, 4)
    going_on = [sample for sample in half if sample.finish_reason == "abort"]
    assert len(going_on) > 2
    fresh = requests[1::2]
    both = [fresh[0], *going_on, *fresh[1:]]
    for sample, found in zip(both, engine.generate(both, LONG), strict=True):
        (alone,) = engine.generate([sample], LONG)
        same(found, alone, engine)
        versions = [3] * len(sample.tokens)
        assert found.versions.tolist() == versions + [4] * (len(found.tokens) - len(versions))


def test_a_generation_whose_new_weights_are_refused_ends_and_draws_no_token_more(
    engine: RolloutEngine, model: Any, other: Any
) -> None:
    some = {name: weight.detach() for name, weight in other.named_parameters()}
    del some["model.norm.weight"]

    def take_some() -> None:
        with pytest.raises(WeightSyncError, match="1 missing: model.norm.weight"):
            engine.load_weights(some.items())

    with pytest.raises(RolloutError, match=r"during a generation of \d samples and were rejected"):
        generate_and(engine, requests_of(PROMPTS), LONG, 4, take_some)
    with pytest.raises(RolloutError, match="has no verified weights"):
        engine.generate(requests_of(PROMPTS), LONG)
    load(engine, model, 5)
    outputs = engine.generate(requests_of(PROMPTS), LONG)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = log_probs_of(full_logits(model, prompt, output.tokens), output.tokens)
        torch.testing.assert_close(output.log_probs, expected, atol=1e-5, rtol=0)


def test_weights_that_no_other_rank_could_take_end_the_generation_too(
    engine: RolloutEngine, other: Any
) -> None:
    def take_without_a_vote() -> None:
        engine.load_weights((name, w.detach()) for name, w in other.named_parameters())

    with pytest.raises(RolloutError, match="rejected, so the engine has no weights"):
        generate_and(engine, requests_of(PROMPTS), LONG, 4, take_without_a_vote)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([9] * RESPONSE, f"already has {RESPONSE} tokens of at most {RESPONSE}"),
        ([9, VOCAB], f"the partial response of row 0 has token id {VOCAB}"),
    ],
)
def test_partial_responses_that_cannot_go_on_are_refused_by_name(
    engine: RolloutEngine, tokens: list[int], words: str
) -> None:
    ids = torch.tensor(tokens)
    begun = Sample(
        [11], 1, "row 0", ids, torch.zeros(len(ids)), torch.zeros(len(ids)).int(), "abort"
    )
    with pytest.raises(RolloutError, match=words):
        engine.generate([begun], settings())
