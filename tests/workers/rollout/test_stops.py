"""The end of a response: the tokenizer's eos, the model folder's, and the configured ids."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.workers.prompts import META, prompt_batch
from tests.workers.samples import started, tiny_config
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError
from workers.config import RolloutConfig
from workers.models.folder import generation_eos
from workers.models.load import load_model
from workers.roles.rollout import RolloutWorker
from workers.rollout.sample import Sample
from workers.rollout.sampling import check_sampling, sampling_params

GREEDY = META | {"do_sample": False}


def folder_with(one_layer_dir: Path, tmp_path: Path, eos: Any) -> Path:
    """Copy the tiny model with these ids in `generation_config.json`; None means no file."""
    shutil.copytree(one_layer_dir / "model", tmp_path / "model")
    file = tmp_path / "model" / "generation_config.json"
    if eos is None:
        file.unlink(missing_ok=True)
    else:
        file.write_text(json.dumps({"eos_token_id": eos}), encoding="utf-8")
    return tmp_path


def worker_of(folder: Path, engine: str = "native", **rollout: Any) -> RolloutWorker:
    config = tiny_config(folder)
    for name, value in {"name": engine, **rollout}.items():
        setattr(config.actor_rollout_ref.rollout, name, value)
    worker = started(RolloutWorker, config)
    model = load_model(config.actor_rollout_ref.model, "token", worker.device)
    worker.engine.load_weights(model.named_parameters())
    worker.engine.commit(1)
    return worker


def responses(worker: RolloutWorker, **meta: Any) -> list[list[int]]:
    """Return the real tokens of each row, by the response mask."""
    data: DataProto = worker.generate_sequences(prompt_batch(6, meta=GREEDY | meta))
    rows = zip(data.batch["responses"], data.batch["response_mask"].bool(), strict=True)
    return [response[mask].tolist() for response, mask in rows]


def cut_after(rows: list[list[int]], stop: int) -> list[list[int]]:
    return [row[: row.index(stop) + 1] if stop in row else row for row in rows]


@pytest.mark.parametrize(
    ("engine", "source"), [("native", "generation_config"), ("hf", "sampling_kwargs")]
)
def test_a_response_ends_at_every_stop_id_in_every_engine(
    one_layer_dir: Path, tmp_path: Path, engine: str, source: str
) -> None:
    plain = responses(worker_of(folder_with(one_layer_dir, tmp_path / "plain", None), engine))
    stop = next(row[1] for row in plain if len(row) > 2 and row[0] != row[1])
    own: Any = {}
    if source == "sampling_kwargs":
        own = {"sampling_kwargs": {"stop_token_ids": [stop]}}
    folder = folder_with(one_layer_dir, tmp_path, None if own else [2, stop])
    found = responses(worker_of(folder, engine, **own))
    assert found == cut_after(plain, stop) != plain


def test_the_ids_are_a_union_and_both_spellings_are_read(
    one_layer_dir: Path, tmp_path: Path
) -> None:
    folder = folder_with(one_layer_dir, tmp_path, 7)
    assert generation_eos(str(folder / "model")) == (7,)
    worker = worker_of(folder, sampling_kwargs={"stop_token_ids": [9, 7]})
    assert worker.sampling_of(prompt_batch(2)).stop_token_ids == (2, 7, 9)
    only_model = prompt_batch(2, meta={"eos_token_id": None, "pad_token_id": 0})
    assert worker.sampling_of(only_model).stop_token_ids == (7, 9)


def test_stop_ids_that_are_no_ids_are_refused() -> None:
    check_sampling(RolloutConfig(sampling_kwargs={"stop_token_ids": [5]}), 8)
    with pytest.raises(ConfigError, match="for text there is stop_strings"):
        check_sampling(RolloutConfig(sampling_kwargs={"stop_token_ids": ["</s>"]}), 8)
    assert sampling_params({"stop_token_ids": 5}, 8, (2,)).stop_token_ids == (2, 5)


def test_a_temperature_of_0_is_refused_where_something_is_drawn_by_it() -> None:
    check_sampling(RolloutConfig(val_kwargs={"temperature": 0}), 8)
    draws = {"temperature": 0, "do_sample": True}
    with pytest.raises(ConfigError, match=r"rollout\.val_kwargs: .*temperature=0"):
        check_sampling(RolloutConfig(val_kwargs=draws), 8)


def test_validation_reads_val_kwargs_alone_but_ends_where_training_does(
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
    ("settings", "words"),
    [
        ({"min_p": "x"}, "sampling_kwargs.min_p=x .* a number from 0 to 1"),
        ({"min_tokens": 1.5}, "min_tokens=1.5 .* a whole number"),
        ({"truncated_log_probs": "maybe"}, "truncated_log_probs=maybe .* true or false"),
        ({"stop_strings": 3}, "stop_strings=3 .* a text or a list of texts"),
        ({"stop_token_ids": "5"}, r"stop_token_ids=\['5'\]"),
        ({"logit_bias": 3}, "logit_bias=3 .* a dict of numbers"),
        ({"logit_bias": {5: "x"}}, "logit_bias={5: 'x'}"),
    ],
)
def test_settings_of_another_kind_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_sampling(RolloutConfig(sampling_kwargs=settings), 8)


def test_one_text_that_ends_a_response_is_one() -> None:
    assert sampling_params({"stop_strings": "abc"}, 8, (0,)).stop_strings == ("abc",)
    assert sampling_params({"stop_strings": ["abc", "d"]}, 8, (0,)).stop_strings == ("abc", "d")


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_a_sample_may_end_with_texts_of_its_own(
    one_layer_dir: Path, tmp_path: Path, engine: str
) -> None:
    """The samples next to it do not."""
    settings = {"sampling_kwargs": {"stop_strings": ["never said"]}}
    worker = worker_of(folder_with(one_layer_dir, tmp_path, None), engine, **settings)
    sampling = replace(worker.sampling_of(prompt_batch(1)), do_sample=False)
    plain = Sample([5, 6], 1)
    (whole,) = worker.engine.generate([plain], sampling)
    assert worker.engine.decode is not None
    texts = [worker.engine.decode([token]) for token in whole.tokens.tolist()]
    stopping = replace(plain, stop_strings=(texts[2],))
    found, other = worker.engine.generate([stopping, plain], sampling)
    assert found.tokens.tolist() == whole.tokens[: texts.index(texts[2]) + 1].tolist()
    assert (found.finish_reason, other.tokens.tolist()) == ("stop", whole.tokens.tolist())
