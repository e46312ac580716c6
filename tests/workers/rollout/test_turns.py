"""On every engine a response continues after observed tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.rollout_engines import (
    PROMPT,
    RESPONSE,
    STOP,
    full_logits,
    load,
    make_model,
    make_prompts,
    requests_of,
    same,
    settings,
)
from workers.rollout import sample as rollout_sample
from workers.rollout.base import EngineLimits, RolloutEngine
from workers.rollout.native.engine import NativeEngine
from workers.rollout.sample import CachedStates, Sample, num_read_at_once

PROMPTS = make_prompts(num_ragged=4)
FIRST, SECOND = 4, 3
OBSERVED = [STOP[0], 20, 21]
"""A stop token among what was observed ends nothing."""


def observing(sample: Sample, observed: Sequence[int] = OBSERVED) -> Sample:
    """Return the sample after an observation, with room for a second turn."""
    ids = torch.tensor(observed)
    length = len(sample.tokens) + len(ids)
    return replace(
        sample,
        tokens=torch.cat([sample.tokens, ids]),
        log_probs=torch.cat([sample.log_probs, torch.full((len(ids),), torch.nan)]),
        versions=torch.cat([sample.versions, torch.full((len(ids),), -1, dtype=torch.int32)]),
        finish_reason="abort",
        end_at=length + SECOND,
    )


def first_turns(engine: RolloutEngine, cached: CachedStates | None = None) -> list[Sample]:
    asked = [replace(sample, end_at=FIRST, cached=cached) for sample in requests_of(PROMPTS)]
    return engine.generate(asked, settings())


def turns(engine: RolloutEngine, cached: CachedStates | None = None) -> list[Sample]:
    return engine.generate([observing(one) for one in first_turns(engine, cached)], settings())


def test_what_is_drawn_in_a_later_turn_is_the_trainers(engine: RolloutEngine, model: Any) -> None:
    for sample in turns(engine):
        drawn = sample.versions >= 0
        assert drawn.tolist().count(False) == len(OBSERVED)
        assert sample.tokens[~drawn].tolist() == OBSERVED
        assert sample.log_probs[~drawn].isnan().all()
        log_probs = full_logits(model, list(sample.prompt), sample.tokens).log_softmax(-1)
        expected = log_probs.gather(1, sample.tokens[:, None])[:, 0]
        torch.testing.assert_close(sample.log_probs[drawn], expected[drawn], atol=1e-4, rtol=0)


def test_a_turn_ends_with_a_stop_token_of_its_own_or_at_its_limit(engine: RolloutEngine) -> None:
    lengths = set()
    for sample in turns(engine):
        drawn = sample.versions >= 0
        first_turn = int(drawn.long().argmin())
        second = sample.tokens[first_turn + len(OBSERVED) :].tolist()
        lengths.add(len(second))
        assert 1 <= first_turn <= FIRST
        assert 1 <= len(second) <= SECOND
        ends = second[-1] in STOP
        assert sample.finish_reason == ("stop" if ends else "length")
        assert not set(second[:-1]) & set(STOP)
        assert ends or len(second) == SECOND
    assert len(lengths) > 1 or lengths == {SECOND}


def test_a_turn_is_a_fresh_engines_whoever_runs_beside_it(
    engine: RolloutEngine, model: Any
) -> None:
    together = turns(engine)
    for prompt, expected in zip(PROMPTS, together, strict=True):
        asked = replace(requests_of(PROMPTS)[PROMPTS.index(prompt)], end_at=FIRST)
        (first,) = engine.generate([asked], settings())
        load(engine, model, 3)
        (alone,) = engine.generate([observing(first)], settings())
        same(alone, expected, engine)


def test_the_first_that_is_finished_is_given_while_others_run(engine: RolloutEngine) -> None:
    asked = [
        replace(sample, end_at=1 + 3 * number)
        for number, sample in enumerate(requests_of(PROMPTS[:3]))
    ]
    bias = {"logit_bias": tuple((token, -100.0) for token in STOP)}
    numbers = engine.submit(asked, settings(**bias))
    order = []
    while engine.num_running:
        order.append(sorted(engine.take(until_one=True)))
    assert [number for some in order for number in some] == numbers
    assert len(order) == len(numbers)


def test_no_turn_is_longer_than_the_response(engine: RolloutEngine) -> None:
    (sample,) = engine.generate([replace(requests_of(PROMPTS)[0], end_at=99)], settings())
    assert len(sample.tokens) <= RESPONSE


@pytest.mark.parametrize("length", [2, 3])
def test_a_stop_string_within_an_observation_ends_nothing(
    engine: RolloutEngine, length: int
) -> None:
    (first,) = engine.generate([replace(requests_of(PROMPTS)[0], end_at=length)], settings())
    text = "56"  # what the observed tokens 20 and 21 say
    (sample,) = engine.generate([observing(first)], settings(stop_strings=(text,)))
    assert len(sample.tokens) > len(first.tokens) + len(OBSERVED)


def agrees_with(model: Any, sample: Sample, first: int) -> None:
    """Check the log-probs from token `first` on against the trainer's pass."""
    log_probs = full_logits(model, list(sample.prompt), sample.tokens).log_softmax(-1)
    expected = log_probs.gather(1, sample.tokens[:, None])[first:, 0]
    torch.testing.assert_close(sample.log_probs[first:], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("keep_kv_cache", [False, True])
def test_after_an_update_the_next_turn_is_a_fresh_engines(
    engine: RolloutEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_kv_cache: bool
) -> None:
    """Also while others run: only with `keep_kv_cache` old keys and values are used."""
    monkeypatch.setattr(engine, "limits", replace(engine.limits, keep_kv_cache=keep_kv_cache))
    first = [observing(one) for one in first_turns(engine, CachedStates())]
    updated = make_model(tmp_path, seed=1)
    (running,) = engine.submit(requests_of([[12, 13]]), settings())
    engine.take(max_tokens=1)
    load(engine, updated, 4)
    numbers = engine.submit(first, settings())
    found = engine.take()
    assert running in found
    for number, before in zip(numbers, first, strict=True):
        sample, begun = found[number], len(before.tokens)
        assert set(sample.versions[begun:].tolist()) == {4}
        agrees_with(updated, sample, begun)


def test_log_probs_of_what_was_drawn_from_have_gaps_too(engine: RolloutEngine) -> None:
    sampling = settings(truncated_log_probs=True, top_k=5)
    asked = [replace(sample, end_at=FIRST) for sample in requests_of(PROMPTS)]
    for first in engine.generate(asked, sampling):
        assert first.truncated_log_probs is not None
        gaps = torch.full((len(OBSERVED),), torch.nan)
        truncated = torch.cat([first.truncated_log_probs, gaps])
        second = replace(observing(first), truncated_log_probs=truncated)
        (sample,) = engine.generate([second], sampling)
        assert sample.truncated_log_probs is not None
        drawn = sample.versions >= 0
        assert sample.truncated_log_probs.isnan().tolist() == (~drawn).tolist()
        assert (sample.truncated_log_probs[drawn] >= sample.log_probs[drawn] - 1e-5).all()


# What the native engine keeps between two turns ---------------------------------------------------


LONG = 12


@pytest.fixture
def native(model: Any, monkeypatch: pytest.MonkeyPatch) -> NativeEngine:
    monkeypatch.setattr(rollout_sample, "LONG_OBSERVATION", LONG)
    return native_engine(model)


def native_engine(model: Any) -> NativeEngine:
    limits = EngineLimits(prompt_width=PROMPT, response_width=100, kv_cache_gb=1.0)
    engine = NativeEngine(copy.deepcopy(model), limits, owns_weights=True)
    load(engine, model, 3)
    return engine


def play(
    engine: NativeEngine,
    observed: Sequence[int],
    cached: CachedStates | None = None,
    alone: bool = False,
) -> list[Sample]:
    """Play four turns, sample after sample or all together."""
    sampling = settings(max_tokens=100)
    samples = [replace(one, end_at=FIRST, cached=cached) for one in requests_of(PROMPTS)]
    found = []
    for group in [[one] for one in samples] if alone else [samples]:
        for turn in range(4):
            group = engine.generate(group, sampling)
            if turn < 3:
                group = [observing(one, observed) for one in group]
        found += group
    return found


@pytest.mark.parametrize("length", [3, LONG])
def test_what_was_kept_has_the_bits_of_what_is_computed_again(
    native: NativeEngine, model: Any, length: int
) -> None:
    observed = [20 + place % 30 for place in range(length)]
    expected = play(native, observed)
    for alone in (False, True):
        for found, other in zip(
            play(native_engine(model), observed, CachedStates(), alone), expected, strict=True
        ):
            assert found.cached is not None
            assert list(found.cached.read) == [*found.prompt, *found.tokens[:-1].tolist()]
            same(found, other, native)


def test_a_long_observation_is_read_at_once(native: NativeEngine, model: Any) -> None:
    observed = [20 + place % 30 for place in range(LONG + 1)]
    for found, other in zip(
        play(native, observed, CachedStates()), play(native, observed), strict=True
    ):
        same(found, other, native)
    versions = [3, 3, *[-1] * len(observed), 3, 3, -1, 3]
    assert num_read_at_once(versions, 3) == 2 + len(observed)
    assert num_read_at_once(versions[:2], 3) == 0
    assert num_read_at_once([3, -1, -1], 3) == 0
    assert num_read_at_once([-1, -1, 3, -1], 3) == 2
    assert num_read_at_once([3, -1, 4, -1, -1], 4) == 2
    assert num_read_at_once([3, -1, 4, -1, -1], 5) == 5


def test_what_was_kept_of_another_text_is_not_used(native: NativeEngine) -> None:
    first, other = first_turns(native, CachedStates())[:2]
    mixed = observing(replace(first, cached=other.cached))
    (found,) = native.generate([mixed], settings())
    (expected,) = native.generate([replace(mixed, cached=None)], settings())
    same(found, expected, native)


def test_what_does_not_fit_is_computed_again(native: NativeEngine) -> None:
    expected = turns(native, CachedStates())
    native.kept_memory.limit = 0
    for one, other in zip(turns(native, CachedStates()), expected, strict=True):
        assert one.cached is not None
        assert one.cached.states is None
        same(one, other, native)


def test_what_was_kept_counts_until_its_sample_is_gone(native: NativeEngine) -> None:
    samples = turns(native, CachedStates())
    cached_states = {one.cached.states for one in samples if one.cached and one.cached.states}
    assert native.kept_memory.bytes == sum(states.num_bytes for states in cached_states) > 0
    cached_states.clear()
    samples.clear()
    assert native.kept_memory.bytes == 0


def test_prompts_that_are_read_beside_longer_kept_ones_cut_nothing_off(model: Any) -> None:
    """The cache's slots keep their width until all longer prompts have left."""
    limits = EngineLimits(prompt_width=16, response_width=96)
    engine = NativeEngine(copy.deepcopy(model), limits, owns_weights=True)
    load(engine, model, 3)
    sampling = replace(settings(), max_tokens=96, stop_token_ids=())
    (long,) = engine.generate([Sample([7, 8], end_at=70, cached=CachedStates())], sampling)
    asked = [replace(observing(long), end_at=80), Sample([9, 9], key=1, end_at=2)]
    expected = [engine.generate([one], sampling)[0] for one in asked]
    for found, alone in zip(engine.generate(asked, sampling), expected, strict=True):
        same(found, alone, engine)
