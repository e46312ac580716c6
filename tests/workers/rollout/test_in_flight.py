"""Weights that arrive during generation, and responses that continue later: each engine."""

from __future__ import annotations

from collections.abc import Iterator
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
    aborted_after,
    assert_same,
    first_tokens,
    generate_and,
    load,
    make_engine,
    make_model,
    make_prompts,
    requests_of,
    settings,
    trainer_log_probs,
)
from verl_like.errors import RolloutError, WeightSyncError
from workers.rollout.base import RolloutEngine
from workers.rollout.native.engine import NativeRolloutEngine
from workers.rollout.sample import Sample

PROMPTS = make_prompts()
LONG = settings(stop_token_ids=(STOP[0],), temperature=0.9)
"""Most responses are as long as they may be."""


@pytest.fixture(scope="module")
def other(folder: Path) -> Any:
    """The model after an update."""
    return make_model(folder / "other", seed=1)


@pytest.fixture(params=[False, True], ids=["recomputed", "kept"])
def keep_kv_cache(engine: RolloutEngine, request: pytest.FixtureRequest) -> Iterator[bool]:
    limits = engine.limits
    engine.limits = replace(limits, keep_kv_cache=request.param)
    yield request.param
    engine.limits = limits


def assert_log_probs(model: Any, output: Sample, version: int) -> None:
    """Compare log-probs of the tokens of a version with the trainer's."""
    mask = output.versions == version
    expected = trainer_log_probs(model, output, LONG.temperature)
    torch.testing.assert_close(output.log_probs[mask], expected[mask], atol=1e-5, rtol=0)


def log_probs_with_kept_keys(old: Any, new: Any, output: Sample) -> Tensor:
    """Return `new`'s log-probs of its tokens after `old` has read all before the last one."""
    num_old = int((output.versions == 3).sum())
    ids = torch.tensor([[*output.prompt, *output.tokens.tolist()]])
    read = len(output.prompt) + num_old - 1
    with torch.no_grad():
        cache = old(ids[:, :read], use_cache=True).past_key_values
        logits: Tensor = new(ids[:, read:-1], past_key_values=cache).logits[0]
    log_probs = torch.log_softmax(logits / LONG.temperature, -1)
    return log_probs.gather(1, output.tokens[num_old:, None])[:, 0]


def test_later_tokens_use_new_weights_and_recomputed_or_kept_keys(
    engine: RolloutEngine, model: Any, other: Any, keep_kv_cache: bool
) -> None:
    requests = requests_of(PROMPTS)
    outputs = generate_and(engine, requests, LONG, 5, lambda: load(engine, other, 4))
    num_mixed = 0
    for output in outputs:
        old, new = output.versions == 3, output.versions == 4
        assert bool((old | new).all())
        assert output.versions.tolist() == sorted(output.versions.tolist())
        assert_log_probs(model, output, 3)
        is_mixed = bool(old.any() and new.any())
        num_mixed += is_mixed
        if is_mixed and keep_kv_cache:
            expected = log_probs_with_kept_keys(model, other, output)
            torch.testing.assert_close(output.log_probs[new], expected, atol=1e-5, rtol=0)
            recomputed = trainer_log_probs(other, output, LONG.temperature)[new]
            assert (expected - recomputed).abs().max() > 1e-3
        else:
            assert_log_probs(other, output, 4)
    assert num_mixed > 4

    (fresh,) = engine.generate(requests[:1], LONG)
    assert fresh.versions.unique().tolist() == [4]
    assert_log_probs(other, fresh, 4)


def test_a_response_with_new_weights_resumes_from_any_token(
    engine: RolloutEngine, other: Any
) -> None:
    requests = requests_of(PROMPTS)
    whole = generate_and(engine, requests, LONG, 5, lambda: load(engine, other, 4))
    for num_new in (0, 1, 4):
        partial, expected = [], []
        for output in whole:
            count = int((output.versions == 3).sum()) + num_new
            if num_new <= count < len(output.tokens):
                partial.append(first_tokens(output, count))
                expected.append(output)
        assert partial
        for resumed, output in zip(engine.generate(partial, LONG), expected, strict=True):
            assert_same(resumed, output, engine)


def test_later_tokens_use_new_weights_if_the_module_decodes(
    model: Any, other: Any, folder: Path
) -> None:
    engine = make_engine("native", model, folder)
    assert isinstance(engine, NativeRolloutEngine)
    engine.direct_agrees = False
    load(engine, model, 3)
    outputs = generate_and(engine, requests_of(PROMPTS), LONG, 8, lambda: load(engine, other, 4))
    for output in outputs:
        assert_log_probs(other, output, 4)
    assert sum(len(output.versions.unique()) for output in outputs) > len(PROMPTS) + 4


def test_responses_of_older_weights_resume_next_to_new_ones(
    engine: RolloutEngine, other: Any
) -> None:
    requests = requests_of(PROMPTS)
    partial = aborted_after(engine, requests[::2], LONG, 3)
    load(engine, other, 4)
    resuming = [sample for sample in partial if sample.finish_reason == "abort"]
    assert len(resuming) > 2
    fresh = requests[1::2]
    both = [fresh[0], *resuming, *fresh[1:]]
    for sample, output in zip(both, engine.generate(both, LONG), strict=True):
        (expected,) = engine.generate([sample], LONG)
        assert_same(output, expected, engine)
        versions = [3] * len(sample.tokens)
        assert output.versions.tolist() == versions + [4] * (len(output.tokens) - len(versions))


def test_rejected_new_weights_end_the_generation(
    engine: RolloutEngine, model: Any, other: Any
) -> None:
    some = {name: weight.detach() for name, weight in other.named_parameters()}
    del some["model.norm.weight"]

    def take_some() -> None:
        with pytest.raises(WeightSyncError, match="1 missing: model.norm.weight"):
            engine.load_weights(some.items())

    with pytest.raises(
        RolloutError, match=r"a weight sync failed during a generation of \d samples"
    ):
        generate_and(engine, requests_of(PROMPTS), LONG, 4, take_some)
    with pytest.raises(RolloutError, match="has no verified weights"):
        engine.generate(requests_of(PROMPTS), LONG)
    load(engine, model, 5)
    for output in engine.generate(requests_of(PROMPTS), LONG):
        assert output.versions.unique().tolist() == [5]
        assert_log_probs(model, output, 5)


def test_new_weights_without_a_vote_end_the_generation(engine: RolloutEngine, other: Any) -> None:
    def take_without_a_vote() -> None:
        engine.load_weights((name, w.detach()) for name, w in other.named_parameters())

    with pytest.raises(RolloutError, match="so the engine has no verified weights"):
        generate_and(engine, requests_of(PROMPTS), LONG, 4, take_without_a_vote)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([9] * RESPONSE, f"cannot continue: it has {RESPONSE} of at most {RESPONSE} tokens"),
        ([9, VOCAB], f"the partial response of row 0 has token id {VOCAB}"),
    ],
)
def test_partial_responses_that_cannot_resume_are_rejected_by_name(
    engine: RolloutEngine, tokens: list[int], words: str
) -> None:
    ids = torch.tensor(tokens)
    zeros = torch.zeros(len(ids))
    partial = Sample([11], 1, "row 0", ids, zeros, zeros.int(), "abort")
    with pytest.raises(RolloutError, match=words):
        engine.generate([partial], settings())
