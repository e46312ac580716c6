"""On every engine a response goes on after tokens that were observed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.workers.rollout_engines import (
    RESPONSE,
    STOP,
    full_logits,
    load,
    make_prompts,
    requests_of,
    same,
    settings,
)
from workers.rollout.base import RolloutEngine
from workers.rollout.sample import Sample

PROMPTS = make_prompts(num_ragged=4)
FIRST, SECOND = 4, 3
OBSERVED = [STOP[0], 20, 21]
"""A stop token among what was observed ends nothing."""


def observing(sample: Sample, observed: Sequence[int] = OBSERVED) -> Sample:
    """The sample after an observation, with room for a second turn."""
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


def turns(engine: RolloutEngine, prompts: list[list[int]] = PROMPTS) -> list[Sample]:
    asked = [replace(sample, end_at=FIRST) for sample in requests_of(prompts)]
    first = engine.generate(asked, settings())
    return engine.generate([observing(sample) for sample in first], settings())


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
