"""The end of a response: the tokenizer's eos, the model folder's, and the configured ids."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.workers.prompts import META, prompt_batch
from tests.workers.rollout_engines import decode, load, make_engine, settings
from tests.workers.samples import started, tiny_config
from verl_like.errors import ConfigError
from workers.config import RolloutConfig
from workers.models.folder import generation_eos
from workers.roles.rollout import RolloutWorker
from workers.rollout.sample import Sample
from workers.rollout.sampling import check_sampling, sampling_params


def worker_of(folder: Path, **rollout: Any) -> RolloutWorker:
    config = tiny_config(folder)
    for name, value in rollout.items():
        setattr(config.actor_rollout_ref.rollout, name, value)
    worker: RolloutWorker = started(RolloutWorker, config)
    return worker


def test_stop_ids_are_the_union_of_all_sources(one_layer_dir: Path, tmp_path: Path) -> None:
    model = shutil.copytree(one_layer_dir / "model", tmp_path / "model")
    (model / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert generation_eos(str(model)) == (7,)
    worker = worker_of(tmp_path, sampling_kwargs={"stop_token_ids": [9, 7]})
    assert worker.sampling_of(prompt_batch(2)).stop_token_ids == (2, 7, 9)
    only_model = prompt_batch(2, meta={"eos_token_id": None, "pad_token_id": 0})
    assert worker.sampling_of(only_model).stop_token_ids == (7, 9)


def test_a_single_stop_needs_no_list() -> None:
    assert sampling_params({"stop_token_ids": 5}, 8, (2,)).stop_token_ids == (2, 5)
    assert sampling_params({"stop_strings": "abc"}, 8, (0,)).stop_strings == ("abc",)
    assert sampling_params({"stop_strings": ["abc", "d"]}, 8, (0,)).stop_strings == ("abc", "d")


def test_a_temperature_of_0_is_rejected_only_for_sampling() -> None:
    check_sampling(RolloutConfig(val_kwargs={"temperature": 0}), 8)
    draws = {"temperature": 0, "do_sample": True}
    with pytest.raises(ConfigError, match=r"rollout\.val_kwargs: .*temperature=0"):
        check_sampling(RolloutConfig(val_kwargs=draws), 8)


def test_validation_reads_only_val_kwargs_but_has_the_same_stops(
    one_layer_dir: Path,
) -> None:
    training = {"min_p": 0.3, "min_tokens": 2, "logit_bias": {4: 3.0}, "truncated_log_probs": True}
    worker = worker_of(
        one_layer_dir,
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        sampling_kwargs={**training, "stop_token_ids": [9]},
    )
    worker.config.val_kwargs["do_sample"] = True
    trains = worker.sampling_of(prompt_batch(2))
    validates = worker.sampling_of(prompt_batch(2, meta=META | {"validate": True}))
    assert (trains.temperature, trains.top_k, trains.min_tokens) == (0.5, 3, 2)
    assert validates == sampling_params({"stop_token_ids": [9]}, 5, trains.stop_token_ids)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"min_p": "x"}, "sampling_kwargs.min_p=x .* a number from 0 to 1"),
        ({"min_tokens": 1.5}, "min_tokens=1.5 .* a whole number"),
        ({"truncated_log_probs": "maybe"}, "truncated_log_probs=maybe .* true or false"),
        ({"stop_strings": 3}, "stop_strings=3 .* a text or a list of texts"),
        ({"stop_token_ids": "5"}, r"stop_token_ids=\['5'\].* for text there is stop_strings"),
        ({"logit_bias": 3}, "logit_bias=3 .* a dict of numbers"),
        ({"logit_bias": {5: "x"}}, "logit_bias={5: 'x'}"),
    ],
)
def test_settings_of_a_wrong_type_are_rejected(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_sampling(RolloutConfig(sampling_kwargs=keys), 8)


@pytest.mark.parametrize("name", ["native", "hf"])
def test_a_sample_may_have_its_own_stop_strings(name: str, model: Any, folder: Path) -> None:
    engine = make_engine(name, model, folder)
    load(engine, model, 1)
    sampling = settings(do_sample=False, stop_strings=("never generated",))
    plain = Sample([5, 6], 1)
    (whole,) = engine.generate([plain], sampling)
    texts = [decode([token]) for token in whole.tokens.tolist()]
    stopping = replace(plain, stop_strings=(texts[2],))
    stopped, other = engine.generate([stopping, plain], sampling)
    assert stopped.tokens.tolist() == whole.tokens[: texts.index(texts[2]) + 1].tolist()
    assert (stopped.finish_reason, other.tokens.tolist()) == ("stop", whole.tokens.tolist())
