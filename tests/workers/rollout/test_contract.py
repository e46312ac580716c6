"""The contract of rollout engines, on each of them.

`hf` the oracle, `native`, and `vllm` in its own environment.
"""

from __future__ import annotations

from collections import Counter
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
    VOCAB,
    aborted_after,
    assert_same,
    decode,
    first_tokens,
    full_logits,
    load,
    make_engine,
    make_model,
    make_prompts,
    requests_of,
    settings,
    trainer_log_probs,
)
from verl_like.errors import ConfigError, RolloutError, WeightSyncError
from workers.rollout.base import RolloutEngine
from workers.rollout.module_engine import ModuleRolloutEngine
from workers.rollout.sample import Sample
from workers.rollout.sampling import filtered_probs

PROMPTS = make_prompts(num_ragged=3)


@pytest.fixture(scope="module")
def oracle_samples(model: Any, folder: Path) -> list[Sample]:
    """Two samples per prompt, by the hf engine."""
    engine = make_engine("hf", model, folder)
    load(engine, model, 3)
    return engine.generate(requests_of(PROMPTS, n=2), settings())


@pytest.fixture(scope="module")
def samples(kept_engine: RolloutEngine, model: Any) -> list[Sample]:
    """Two samples per prompt, by the engine."""
    load(kept_engine, model, 3)
    return kept_engine.generate(requests_of(PROMPTS, n=2), settings())


def lists(outputs: Sequence[Sample]) -> list[list[int]]:
    return [output.tokens.tolist() for output in outputs]


def test_greedy_equals_transformers_token_for_token(engine: RolloutEngine, model: Any) -> None:
    outputs = engine.generate(requests_of(PROMPTS), settings(do_sample=False))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([prompt])
        theirs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=RESPONSE,
            eos_token_id=list(STOP),
            pad_token_id=0,
        )
        assert output.tokens.tolist() == theirs[0, len(prompt) :].tolist()
        expected = trainer_log_probs(model, output)
        torch.testing.assert_close(output.log_probs, expected, atol=1e-4, rtol=0)


def test_log_probs_equal_the_trainers(engine: RolloutEngine, model: Any) -> None:
    for output in engine.generate(requests_of(PROMPTS), settings(temperature=0.7, top_k=20)):
        expected = trainer_log_probs(model, output, 0.7)
        torch.testing.assert_close(output.log_probs, expected, atol=1e-4, rtol=0)


def test_truncated_log_probs_follow_the_distribution_and_survive_an_abort(
    engine: RolloutEngine, model: Any
) -> None:
    sampling = settings(temperature=0.8, top_k=9, top_p=0.9, min_tokens=2, truncated_log_probs=True)
    outputs = engine.generate(requests_of(PROMPTS), sampling)
    for output in outputs:
        logits = full_logits(model, list(output.prompt), output.tokens) / 0.8
        logits[:2, list(STOP)] = -torch.inf
        probs = filtered_probs(torch.log_softmax(logits, -1), sampling)
        drawn = probs.gather(1, output.tokens[:, None])[:, 0]
        expected = (drawn / probs.sum(-1)).log().float()
        torch.testing.assert_close(output.truncated_log_probs, expected, atol=1e-4, rtol=0)
    longest = max(outputs, key=lambda output: len(output.tokens))
    expected = longest.truncated_log_probs
    partial = replace(first_tokens(longest, 2), truncated_log_probs=expected[:2])
    (resumed,) = engine.generate([partial], sampling)
    torch.testing.assert_close(resumed.truncated_log_probs, expected, atol=1e-4, rtol=0)
    with pytest.raises(RolloutError, match="was started with truncated_log_probs=false"):
        engine.generate([replace(partial, truncated_log_probs=None)], sampling)


def test_a_sample_is_drawn_by_its_own_noise_on_every_engine(
    engine: RolloutEngine, samples: list[Sample], oracle_samples: list[Sample]
) -> None:
    expected = lists(oracle_samples)
    assert lists(samples) == expected
    backwards = engine.generate(requests_of(PROMPTS, n=2)[::-1], settings())
    assert lists(backwards)[::-1] == expected
    assert len({tuple(tokens) for tokens in expected}) > len(expected) // 2


def test_a_response_ends_with_its_first_stop_token_or_at_the_limit(
    engine: RolloutEngine, samples: list[Sample]
) -> None:
    for output in samples:
        stops = [token in STOP for token in output.tokens.tolist()]
        assert not any(stops[:-1])
        assert output.finish_reason == ("stop" if stops[-1] else "length")
        assert stops[-1] or len(output.tokens) == RESPONSE
        assert len(output.log_probs) == len(output.versions) == len(output.tokens)
        assert set(output.versions.tolist()) == {3}
    assert {output.finish_reason for output in samples} == {"stop", "length"}
    shortest = engine.generate(requests_of(PROMPTS), settings(max_tokens=1))
    assert {len(output.tokens) for output in shortest} == {1}


def test_no_stop_token_is_drawn_before_the_minimum_length(engine: RolloutEngine) -> None:
    outputs = engine.generate(requests_of(PROMPTS, n=2), settings(min_tokens=6))
    assert min(len(output.tokens) for output in outputs) >= 6
    assert all(token not in STOP for output in outputs for token in output.tokens[:6].tolist())
    assert any(output.finish_reason == "stop" for output in outputs)


def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(
    engine: RolloutEngine,
) -> None:
    free = engine.generate(requests_of(PROMPTS), settings(stop_token_ids=(VOCAB - 1,)))
    longest = max(free, key=lambda output: len(output.tokens)).tokens.tolist()
    text = decode(longest[4:6])
    outputs = engine.generate(
        requests_of(PROMPTS), settings(stop_token_ids=(VOCAB - 1,), stop_strings=(text,))
    )
    for before, output in zip(free, outputs, strict=True):
        whole, response = decode(before.tokens.tolist()), decode(output.tokens.tolist())
        assert whole.startswith(response)
        assert response.endswith(text) if text in whole else response == whole
        assert output.finish_reason == ("stop" if text in whole else before.finish_reason)


def test_a_logit_bias_changes_draws_but_not_reported_log_probs(
    engine: RolloutEngine, model: Any
) -> None:
    outputs = engine.generate(
        requests_of(PROMPTS), settings(logit_bias=((33, 100.0),), max_tokens=3)
    )
    assert {token for output in outputs for token in output.tokens.tolist()} == {33}
    expected = trainer_log_probs(model, outputs[0])
    torch.testing.assert_close(outputs[0].log_probs, expected, atol=1e-4, rtol=0)
    banned = engine.generate(
        requests_of(PROMPTS, n=2), settings(logit_bias=tuple((t, -100.0) for t in STOP))
    )
    assert all(len(output.tokens) == RESPONSE for output in banned)


@pytest.mark.parametrize(
    "changes", [{"temperature": 0.6, "top_k": 12}, {"top_p": 0.7, "min_p": 0.1}]
)
def test_first_tokens_follow_the_truncated_distribution(
    engine: RolloutEngine, model: Any, changes: dict[str, Any]
) -> None:
    prompt, draws = PROMPTS[0], 1500 if type(engine).__name__ != "HFRolloutEngine" else 120
    sampling = settings(max_tokens=1, **changes)
    requests = [Sample(prompt, 977 * i + 5, f"draw {i}") for i in range(draws)]
    counts = Counter(int(output.tokens[0]) for output in engine.generate(requests, sampling))
    log_probs = torch.log_softmax(
        full_logits(model, prompt, torch.tensor([0])) / sampling.temperature, -1
    )
    probs = filtered_probs(log_probs, sampling)[0]
    probs = (probs / probs.sum()).tolist()
    assert {token for token in counts if not probs[token]} == set()
    rare = [token for token in range(VOCAB) if draws * probs[token] < 5]
    cells = [([token], probs[token]) for token in range(VOCAB) if token not in rare]
    cells.append((rare, sum(probs[token] for token in rare)))
    cells = [(tokens, p) for tokens, p in cells if p > 0]
    statistic = sum(
        (sum(counts[t] for t in tokens) - draws * p) ** 2 / (draws * p) for tokens, p in cells
    )
    freedom = len(cells) - 1
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.3 * (2 / (9 * freedom)) ** 0.5) ** 3


def test_samples_that_join_and_leave_equal_those_of_one_call(
    engine: RolloutEngine, samples: list[Sample]
) -> None:
    requests = requests_of(PROMPTS, n=2)
    numbers: list[int] = []
    finished: dict[int, Sample] = {}
    for group in [requests[:1], requests[1:8], requests[8:]]:
        numbers += engine.submit(group, settings())
        finished |= engine.collect(max_tokens=3)
    leaving = numbers[2]
    aborted = engine.abort([leaving]) if leaving not in finished else {}
    while engine.num_running:
        finished |= engine.collect(seconds=0.0)
    for number, sample in aborted.items():
        (again,) = engine.submit([sample], settings())
        finished[number] = engine.collect()[again]
    assert engine.collect() == {}
    for number, expected in zip(numbers, samples, strict=True):
        assert_same(finished[number], expected, engine)


def test_an_aborted_generation_resumes_where_it_stopped(
    engine: RolloutEngine, samples: list[Sample]
) -> None:
    partial = aborted_after(engine, requests_of(PROMPTS, n=2), settings(), 4)
    assert "abort" in {sample.finish_reason for sample in partial}
    for sample, complete in zip(partial, samples, strict=True):
        assert complete.tokens.tolist()[: len(sample.tokens)] == sample.tokens.tolist()
    unfinished = [i for i, sample in enumerate(partial) if sample.finish_reason == "abort"]
    resumed = engine.generate([partial[i] for i in unfinished], settings())
    for i, sample in zip(unfinished, resumed, strict=True):
        assert_same(sample, samples[i], engine)
    finished = next(sample for sample in samples if sample.finish_reason == "stop")
    with pytest.raises(RolloutError, match="cannot continue: .* the finish reason 'stop'"):
        engine.generate([finished], settings())


def test_running_samples_forbid_sleep_other_batches_and_other_settings(
    engine: RolloutEngine, samples: list[Sample]
) -> None:
    requests = requests_of(PROMPTS)
    numbers = engine.submit(requests, settings())
    try:
        with pytest.raises(
            RolloutError, match=f"cannot sleep while {len(PROMPTS)} samples are in flight"
        ):
            engine.sleep()
        with pytest.raises(RolloutError, match=f"already generating {len(PROMPTS)} samples"):
            engine.generate(requests, settings())
        with pytest.raises(RolloutError, match="running with other sampling settings"):
            engine.submit(requests, settings(temperature=0.5))
        finished = engine.collect()
    finally:
        engine.abort()
    assert lists([finished[number] for number in numbers]) == lists(samples[::2])


def test_weights_that_do_not_fit_are_listed_and_the_engine_stays_stale(
    engine: RolloutEngine, model: Any
) -> None:
    tensors = dict(model.named_parameters())
    tensors["stranger"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    tensors["lm_head.weight"] = torch.zeros(VOCAB, 3)
    words = (
        r"1 missing: model.layers.1.mlp.up_proj.weight; 1 unknown: stranger; "
        r"1 of another shape: lm_head.weight \(is \[64, 64\], was sent \[64, 3\]\)"
    )
    with pytest.raises(WeightSyncError, match=words):
        engine.load_weights((name, tensor.detach()) for name, tensor in tensors.items())
    with pytest.raises(RolloutError, match="no verified weights"):
        engine.generate(requests_of(PROMPTS), settings())


def test_a_woken_engine_is_stale_until_weights_arrive(
    engine: RolloutEngine, model: Any, samples: list[Sample]
) -> None:
    memory = []
    if isinstance(engine, ModuleRolloutEngine):
        memory = [weight.untyped_storage()._weak_ref() for weight in engine.module.parameters()]
    assert not any(map(torch.UntypedStorage._expired, memory))
    engine.sleep()
    assert all(map(torch.UntypedStorage._expired, memory)), "asleep, weights take no memory"
    engine.sleep()
    with pytest.raises(RolloutError, match="is asleep"):
        engine.generate(requests_of(PROMPTS), settings())
    engine.wake_up()
    with pytest.raises(RolloutError, match="has no verified weights"):
        engine.generate(requests_of(PROMPTS), settings())
    load(engine, model, 5)
    assert lists(engine.generate(requests_of(PROMPTS), settings())) == lists(samples[::2])


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "row 0 has 0 tokens"),
        ([3] * (PROMPT + 1), f"{PROMPT + 1} tokens; 1 to {PROMPT} fit"),
        ([3, VOCAB], f"token id {VOCAB}, outside the vocabulary of {VOCAB}"),
        ([-1], "token id -1"),
    ],
)
def test_impossible_prompts_are_rejected_by_name(
    engine: RolloutEngine, prompt: list[int], words: str
) -> None:
    with pytest.raises(RolloutError, match=words):
        engine.generate([Sample(prompt, 1, "row 0")], settings())


def test_impossible_settings_are_rejected(
    engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RolloutError, match="max_tokens=15 does not fit"):
        engine.generate(requests_of(PROMPTS), settings(max_tokens=RESPONSE + 1))
    with pytest.raises(ConfigError, match="token id 64, outside"):
        engine.generate(requests_of(PROMPTS), settings(logit_bias=((VOCAB, 1.0),)))
    monkeypatch.setattr(engine, "decode", None)
    with pytest.raises(ConfigError, match="stop strings need the tokenizer"):
        engine.generate(requests_of(PROMPTS), settings(stop_strings=("x",)))


def test_logits_that_are_not_finite_raise_with_a_sample(
    engine: RolloutEngine, folder: Path
) -> None:
    broken = make_model(folder / "broken")
    broken.lm_head.weight.data.fill_(float("nan"))
    load(engine, broken, 6)
    with pytest.raises(RolloutError, match=r"not finite for uid \d-0 sample 0"):
        engine.generate(requests_of(PROMPTS), settings())
