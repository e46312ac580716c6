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
    assert_same,
    load,
    make_model,
    make_prompts,
    requests_of,
    settings,
    trainer_log_probs,
)
from workers.rollout import sample as rollout_sample
from workers.rollout.base import EngineLimits, RolloutEngine
from workers.rollout.native.engine import NativeRolloutEngine
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
    requests = [replace(sample, end_at=FIRST, cached=cached) for sample in requests_of(PROMPTS)]
    return engine.generate(requests, settings())


def turns(engine: RolloutEngine, cached: CachedStates | None = None) -> list[Sample]:
    first = first_turns(engine, cached)
    return engine.generate([observing(sample) for sample in first], settings())


def test_a_later_turn_has_the_trainers_log_probs_and_its_own_end(
    engine: RolloutEngine, model: Any
) -> None:
    lengths = set()
    for sample in turns(engine):
        drawn = sample.versions >= 0
        assert drawn.tolist().count(False) == len(OBSERVED)
        assert sample.tokens[~drawn].tolist() == OBSERVED
        assert sample.log_probs[~drawn].isnan().all()
        expected = trainer_log_probs(model, sample)[drawn]
        torch.testing.assert_close(sample.log_probs[drawn], expected, atol=1e-4, rtol=0)
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


def test_a_turn_does_not_depend_on_other_samples_or_earlier_turns(
    engine: RolloutEngine, model: Any
) -> None:
    for request, expected in zip(requests_of(PROMPTS), turns(engine), strict=True):
        (first,) = engine.generate([replace(request, end_at=FIRST)], settings())
        load(engine, model, 3)
        (single,) = engine.generate([observing(first)], settings())
        assert_same(single, expected, engine)


def test_the_first_finished_sample_is_returned_while_others_run(engine: RolloutEngine) -> None:
    requests = [
        replace(sample, end_at=1 + 3 * number)
        for number, sample in enumerate(requests_of(PROMPTS[:3]))
    ]
    no_stops = tuple((token, -100.0) for token in STOP)
    numbers = engine.submit(requests, settings(logit_bias=no_stops))
    takes = []
    while engine.num_running:
        takes.append(list(engine.collect(until_one=True)))
    assert takes == [[number] for number in numbers]


def test_no_turn_exceeds_the_response_length(engine: RolloutEngine) -> None:
    (sample,) = engine.generate([replace(requests_of(PROMPTS)[0], end_at=99)], settings())
    assert len(sample.tokens) <= RESPONSE


@pytest.mark.parametrize("length", [2, 3])
def test_a_stop_string_within_an_observation_ends_no_turn(
    engine: RolloutEngine, length: int
) -> None:
    (first,) = engine.generate([replace(requests_of(PROMPTS)[0], end_at=length)], settings())
    text = "56"  # the observed tokens 20 and 21
    (sample,) = engine.generate([observing(first)], settings(stop_strings=(text,)))
    assert len(sample.tokens) > len(first.tokens) + len(OBSERVED)


@pytest.mark.parametrize("keep_kv_cache", [False, True])
def test_the_next_turn_after_an_update_uses_only_the_new_weights(
    engine: RolloutEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_kv_cache: bool
) -> None:
    """Also while others run, and with `keep_kv_cache`."""
    monkeypatch.setattr(engine, "limits", replace(engine.limits, keep_kv_cache=keep_kv_cache))
    first = [observing(sample) for sample in first_turns(engine, CachedStates())]
    updated = make_model(tmp_path, seed=1)
    (running,) = engine.submit(requests_of([[12, 13]]), settings())
    engine.collect(max_tokens=1)
    load(engine, updated, 4)
    numbers = engine.submit(first, settings())
    finished = engine.collect()
    assert running in finished
    for number, before in zip(numbers, first, strict=True):
        sample, start = finished[number], len(before.tokens)
        assert set(sample.versions[start:].tolist()) == {4}
        expected = trainer_log_probs(updated, sample)[start:]
        torch.testing.assert_close(sample.log_probs[start:], expected, atol=1e-4, rtol=0)


def test_truncated_log_probs_are_nan_at_observed_tokens(engine: RolloutEngine) -> None:
    sampling = settings(truncated_log_probs=True, top_k=5)
    requests = [replace(sample, end_at=FIRST) for sample in requests_of(PROMPTS)]
    for first in engine.generate(requests, sampling):
        assert first.truncated_log_probs is not None
        gaps = torch.full((len(OBSERVED),), torch.nan)
        truncated = torch.cat([first.truncated_log_probs, gaps])
        second = replace(observing(first), truncated_log_probs=truncated)
        (sample,) = engine.generate([second], sampling)
        assert sample.truncated_log_probs is not None
        drawn = sample.versions >= 0
        assert sample.truncated_log_probs.isnan().tolist() == (~drawn).tolist()
        assert (sample.truncated_log_probs[drawn] >= sample.log_probs[drawn] - 1e-5).all()


# Keys and values that the native engine keeps between two turns -----------------------------------


LONG = 12


@pytest.fixture
def native(model: Any, monkeypatch: pytest.MonkeyPatch) -> NativeRolloutEngine:
    monkeypatch.setattr(rollout_sample, "LONG_OBSERVATION", LONG)
    return native_engine(model)


def native_engine(model: Any) -> NativeRolloutEngine:
    limits = EngineLimits(prompt_width=PROMPT, response_width=100, kv_cache_gib=1.0)
    engine = NativeRolloutEngine(copy.deepcopy(model), limits, owns_weights=True)
    load(engine, model, 3)
    return engine


def play(
    engine: NativeRolloutEngine,
    observed: Sequence[int],
    cached: CachedStates | None = None,
    one_by_one: bool = False,
) -> list[Sample]:
    """Play four turns, sample after sample or all together."""
    sampling = settings(max_tokens=100)
    samples = [replace(sample, end_at=FIRST, cached=cached) for sample in requests_of(PROMPTS)]
    trajectories = []
    for group in [[sample] for sample in samples] if one_by_one else [samples]:
        group = engine.generate(group, sampling)
        for _ in range(3):
            group = engine.generate([observing(sample, observed) for sample in group], sampling)
        trajectories += group
    return trajectories


@pytest.mark.parametrize("length", [3, LONG, LONG + 1])
def test_kept_states_equal_recomputed_ones(
    native: NativeRolloutEngine, model: Any, length: int
) -> None:
    observed = [20 + position % 30 for position in range(length)]
    expected = play(native, observed)
    for one_by_one in (False, True):
        trajectories = play(native_engine(model), observed, CachedStates(), one_by_one)
        for sample, other in zip(trajectories, expected, strict=True):
            assert sample.cached is not None
            assert list(sample.cached.read) == [*sample.prompt, *sample.tokens[:-1].tolist()]
            assert_same(sample, other, native)


def test_a_long_observation_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_sample, "LONG_OBSERVATION", LONG)
    versions = [3, 3, *[-1] * (LONG + 1), 3, 3, -1, 3]
    assert num_read_at_once(versions, 3) == 2 + LONG + 1
    assert num_read_at_once(versions[:2], 3) == 0
    assert num_read_at_once([3, -1, -1], 3) == 0
    assert num_read_at_once([-1, -1, 3, -1], 3) == 2
    assert num_read_at_once([3, -1, 4, -1, -1], 4) == 2
    assert num_read_at_once([3, -1, 4, -1, -1], 5) == 5


def test_kept_states_of_another_text_are_not_used(native: NativeRolloutEngine) -> None:
    first, other = first_turns(native, CachedStates())[:2]
    mixed = observing(replace(first, cached=other.cached))
    (sample,) = native.generate([mixed], settings())
    (expected,) = native.generate([replace(mixed, cached=None)], settings())
    assert_same(sample, expected, native)


def test_states_that_do_not_fit_are_recomputed(native: NativeRolloutEngine) -> None:
    expected = turns(native, CachedStates())
    native.turn_cache.limit = 0
    for sample, other in zip(turns(native, CachedStates()), expected, strict=True):
        assert sample.cached is not None
        assert sample.cached.states is None
        assert_same(sample, other, native)


def test_kept_states_use_memory_until_their_sample_is_deleted(native: NativeRolloutEngine) -> None:
    samples = turns(native, CachedStates())
    cached_states = {s.cached.states for s in samples if s.cached and s.cached.states}
    assert native.turn_cache.bytes == sum(states.num_bytes for states in cached_states) > 0
    cached_states.clear()
    samples.clear()
    assert native.turn_cache.bytes == 0


def test_short_prompts_next_to_longer_kept_ones_truncate_nothing(model: Any) -> None:
    """The cache's slots keep their width until all longer prompts have left."""
    limits = EngineLimits(prompt_width=16, response_width=96)
    engine = NativeRolloutEngine(copy.deepcopy(model), limits, owns_weights=True)
    load(engine, model, 3)
    sampling = replace(settings(), max_tokens=96, stop_token_ids=())
    (long,) = engine.generate([Sample([7, 8], end_at=70, cached=CachedStates())], sampling)
    requests = [replace(observing(long), end_at=80), Sample([9, 9], seed=1, end_at=2)]
    expected = [engine.generate([request], sampling)[0] for request in requests]
    for sample, other in zip(engine.generate(requests, sampling), expected, strict=True):
        assert_same(sample, other, engine)
