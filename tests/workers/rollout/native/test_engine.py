"""The native engine against transformers and among other samples, and the role's columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.prompts import META, prompt_batch
from tests.workers.rollout_engines import (
    PROMPT,
    RESPONSE,
    VOCAB,
    assert_same,
    make_prompts,
    requests_of,
    settings,
)
from tests.workers.samples import tiny_config
from verl_like.batch.protocol import Shard
from verl_like.errors import ConfigError, RolloutError, WeightSyncError
from verl_like.process.threads import computing_with
from workers.roles.rollout import RolloutWorker
from workers.rollout.base import EngineLimits
from workers.rollout.native.direct_forward import MIN_ROWS_OF_MKL
from workers.rollout.native.engine import NativeRolloutEngine
from workers.rollout.sample import Sample, to_batch
from workers.rollout.sampling import sample_seed


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Ragged prompts, of which two are equal."""
    prompts = make_prompts(num_ragged=17)
    return [*prompts, prompts[0]]


def engine_of(model: Any, limits: EngineLimits | None = None) -> NativeRolloutEngine:
    limits = limits or EngineLimits(prompt_width=PROMPT, response_width=RESPONSE)
    engine = NativeRolloutEngine(model, limits, owns_weights=False)
    engine.commit(0)
    return engine


@pytest.mark.parametrize(
    ("family", "threads", "max_num_seqs"), [("Llama", 3, 5), ("Llama", 16, 19), ("GPT2", 3, 5)]
)
def test_the_number_of_threads_changes_no_bit_of_a_sample(
    family: str, threads: int, max_num_seqs: int
) -> None:
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"intermediate_size": 344}
    if family == "GPT2":
        sizes = {"n_inner": 860, "activation_function": "silu"}
    config = getattr(transformers, f"{family}Config")(
        **{"vocab_size": VOCAB, "hidden_size": 64, "initializer_range": 0.1},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 128},
        **{"bos_token_id": 0, "eos_token_id": 2, **sizes},
    )
    wide = transformers.AutoModelForCausalLM.from_config(config).eval()
    random = np.random.default_rng(0)
    texts = [random.integers(8, VOCAB, size=n).tolist() for n in random.integers(1, 61, size=26)]
    requests = requests_of(texts)
    limits = EngineLimits(prompt_width=60, response_width=RESPONSE, max_num_seqs=256)
    expected = engine_of(wide, limits).generate(requests, settings())
    engine = engine_of(wide, dataclasses.replace(limits, max_num_seqs=max_num_seqs))
    with computing_with(threads):
        outputs = engine.generate(requests, settings())
        assert torch.get_num_threads() == threads
    for sample, other in zip(outputs, expected, strict=True):
        assert_same(sample, other, engine)


def test_a_cache_is_reused_unless_it_has_numbers_that_are_not_finite(
    model: Any, prompts: list[list[int]]
) -> None:
    requests, engine = requests_of(prompts), engine_of(model)
    expected = [sample.log_probs for sample in engine_of(model).generate(requests, settings())]

    def assert_expected(max_tokens: int) -> None:
        outputs = engine.generate(requests, settings(max_tokens=max_tokens))
        for output, log_probs in zip(outputs, expected, strict=True):
            assert torch.equal(output.log_probs, log_probs[:max_tokens])

    pages = []
    for max_tokens in (RESPONSE, 5):
        assert_expected(max_tokens)
        pages.append({page.data_ptr() for page in engine.cache_memory._free})
    assert pages[1]
    assert pages[1] <= pages[0]
    weights = model.lm_head.weight.detach()[0]
    before = weights.clone()
    weights.fill_(float("nan"))
    with pytest.raises(RolloutError, match="not finite"):
        engine.generate(requests, settings())
    weights.copy_(before)
    assert not engine.cache_memory._free
    assert_expected(RESPONSE)
    engine.sleep()
    assert not engine.cache_memory._free


@contextmanager
def shapes_of_passes(model: Any) -> Iterator[list[tuple[int, ...]]]:
    """Record the shapes of the module's passes."""
    shapes: list[tuple[int, ...]] = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    yield shapes
    handle.remove()


def test_samples_of_one_prompt_share_its_prefill_and_differ(
    model: Any, prompts: list[list[int]]
) -> None:
    engine = engine_of(model)
    requests = [Sample(prompts[0], sample_seed(0, "0-0", i)) for i in range(40)]
    with shapes_of_passes(model) as shapes:
        outputs = engine.generate(requests, settings())
    assert shapes[0] == (4, PROMPT)
    assert len({tuple(output.tokens.tolist()) for output in outputs}) > 20


def test_passes_compute_few_rows_beyond_the_generated_tokens(
    model: Any, prompts: list[list[int]]
) -> None:
    with shapes_of_passes(model) as shapes:
        limits = EngineLimits(prompt_width=PROMPT, response_width=RESPONSE, max_num_seqs=32)
        outputs = engine_of(model, limits).generate(requests_of(prompts * 3), settings())
    decoded = [rows for rows, width in shapes if width == 1]
    needed = sum(len(output.tokens) - 1 for output in outputs)
    assert needed <= sum(decoded) <= needed + MIN_ROWS_OF_MKL * RESPONSE
    assert min(rows * width for rows, width in shapes) == min(decoded) == MIN_ROWS_OF_MKL
    assert max(decoded) == 32


def test_rows_longer_than_the_model_allows_are_rejected(model: Any) -> None:
    limits = EngineLimits(prompt_width=1500, response_width=1500, max_num_seqs=4)
    with pytest.raises(ConfigError, match="3000 tokens, but the model has 128"):
        NativeRolloutEngine(model, limits, owns_weights=False)


def test_the_module_is_in_training_mode_after_a_generation(
    model: Any, prompts: list[list[int]]
) -> None:
    model.train()
    engine_of(model).generate(requests_of(prompts[:4]), settings())
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert all(parameter.requires_grad for parameter in model.parameters())
    model.eval()


# The role.


@pytest.fixture(scope="module")
def worker(tiny_dir: Path) -> RolloutWorker:
    worker = RolloutWorker(tiny_config(tiny_dir))
    worker.init_model()
    worker.engine.commit(3)
    return worker


def test_the_columns_of_a_batch_have_the_documented_contents(worker: RolloutWorker) -> None:
    data = prompt_batch(9)
    out = worker.generate_sequences(data)
    assert set(out.batch.keys()) == {
        *("prompts", "responses", "input_ids", "attention_mask", "position_ids"),
        *("response_mask", "rollout_log_probs", "token_versions"),
        *("policy_version", "sample_hash"),
    }
    truncated = worker.generate_sequences(
        prompt_batch(9, meta=META | {"truncated_log_probs": True, "top_k": 2})
    )
    column = truncated.batch.pop("rollout_truncated_log_probs")
    assert truncated.batch.keys() == out.batch.keys()
    assert (column >= truncated.batch["rollout_log_probs"]).all()
    assert column.count_nonzero() > 0
    assert out.batch["policy_version"].tolist() == [3] * 9
    assert out.meta_info == {}
    assert set(out.non_tensor_batch) == {"finish_reason"}
    assert torch.equal(out.batch["token_versions"], 3 * out.batch["response_mask"])
    batch = out.batch
    assert torch.equal(batch["input_ids"], torch.cat([batch["prompts"], batch["responses"]], 1))
    assert torch.equal(batch["attention_mask"][:, :6], data.batch["attention_mask"])
    assert torch.equal(batch["attention_mask"][:, 6:], batch["response_mask"])
    assert torch.equal(batch["position_ids"][:, 5:].diff(dim=1), torch.ones(9, 5, dtype=torch.long))
    for response, mask, log_probs in zip(
        batch["responses"], batch["response_mask"], batch["rollout_log_probs"], strict=True
    ):
        length = int(mask.sum())
        assert mask.tolist() == [1] * length + [0] * (5 - length)
        assert 2 not in response[: length - 1]
        assert length == 5 or response[length - 1] == 2
        assert (response[length:] == 0).all()
        assert (log_probs[length:] == 0).all()
        assert (log_probs[:length] < 0).all()


def test_pad_rows_get_empty_responses_and_real_rows_do_not_change(worker: RolloutWorker) -> None:
    data = prompt_batch(6)
    whole = worker.generate_sequences(data)
    data.shard = Shard(index=1, count=2, start=6, rows=4, total=10)
    padded = worker.generate_sequences(data)
    for name, column in padded.batch.items():
        assert torch.equal(column[:4], whole.batch[name][:4])
    assert padded.batch["response_mask"][4:].sum() == 0


def test_the_policy_version_is_that_of_the_oldest_token() -> None:
    versions = [torch.tensor(row, dtype=torch.int32) for row in ([1, 1, 3], [2], [])]
    samples = [
        Sample([9]).with_response(row.long(), row.float()[:, None], row, "stop") for row in versions
    ]
    column = to_batch(samples, (6, 5), 0, 3).batch["policy_version"]
    assert column.dtype == torch.int64
    assert column.tolist() == [1, 2, 3]


def test_batches_override_sampling_and_validation_has_its_own_noise(
    worker: RolloutWorker,
) -> None:
    def responses(**meta: Any) -> torch.Tensor:
        return worker.generate_sequences(prompt_batch(8, meta={**META, **meta})).batch["responses"]

    assert torch.equal(responses(do_sample=False), responses(do_sample=False, validate=True))
    assert not torch.equal(responses(), responses(validate=True))
    assert torch.equal(responses(top_k=1), responses(do_sample=False))
    assert (responses(eos_token_id=list(range(50)))[:, 1:] == 0).all()


def test_impossible_batches_are_rejected(
    worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "model_eos", ())  # the model's folder has none
    with pytest.raises(RolloutError, match="has an eos_token_id, which ends responses"):
        worker.generate_sequences(prompt_batch(4, meta={"pad_token_id": 0}))
    with pytest.raises(RolloutError, match="no pad_token_id"):
        worker.generate_sequences(prompt_batch(4, meta={"eos_token_id": 2}))
    with pytest.raises(RolloutError, match="7 columns wide"):
        worker.generate_sequences(prompt_batch(4, width=7))


def test_unknown_engines_and_updates_without_an_actor_are_rejected(
    tiny_dir: Path, worker: RolloutWorker
) -> None:
    config = tiny_config(tiny_dir)
    config.actor_rollout_ref.rollout = dataclasses.replace(
        config.actor_rollout_ref.rollout, name="natve"
    )
    with pytest.raises(ConfigError, match="Did you mean 'native'"):
        RolloutWorker(config)
    with pytest.raises(WeightSyncError, match="no actor is in this process"):
        worker.update_weights(1)


def wide_engine(model: Any) -> NativeRolloutEngine:
    engine = NativeRolloutEngine(model, EngineLimits(64, RESPONSE), owns_weights=False)
    engine.commit(0)
    return engine


def test_a_prefill_of_short_prompts_keeps_earlier_long_ones(model: Any) -> None:
    """A pass takes 64 prompts, so the second pass begins before decoding."""
    random = np.random.default_rng(0)
    lengths = [60] * 64 + [3] * 8
    prompts = [random.integers(8, VOCAB, size=length).tolist() for length in lengths]
    samples = [Sample(prompt, sample_seed(0, "x", n)) for n, prompt in enumerate(prompts)]
    engine = wide_engine(model)
    (single,) = wide_engine(model).generate(samples[:1], settings())
    assert_same(engine.generate(samples, settings())[0], single, engine)


def test_a_sample_that_joins_between_takes_keeps_earlier_ones(model: Any) -> None:
    random = np.random.default_rng(0)
    prompts = [random.integers(8, VOCAB, size=length).tolist() for length in (60, 60, 3)]
    long, other, short = (Sample(prompt, sample_seed(0, "x", 7)) for prompt in prompts)
    other = dataclasses.replace(other, end_at=1)  # its first token is its last
    (single,) = wide_engine(model).generate([long], settings())

    engine = wide_engine(model)
    number, ends = engine.submit([long, other], settings())
    assert list(engine.collect(until_one=True)) == [ends]
    engine.submit([short], settings())
    assert_same(engine.collect()[number], single, engine)
