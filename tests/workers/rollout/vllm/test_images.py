"""vLLM serves published vision-language classes: rows of text, and prompts with images."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.runs import lines
from tests.integration.test_images import overrides, write_rows
from tests.workers.models import vision
from tests.workers.models.test_image_input import Case, make_case
from tests.workers.models.vision import picture, write_model
from tests.workers.rollout.vllm.fakes import engine_on
from tests.workers.rollout_engines import load, make_model
from trainer import load_config, run
from verl_like.errors import ConfigError, RolloutError
from workers.images import image_ref
from workers.models.images import ImageReader
from workers.models.state import named_state
from workers.rollout.base import EngineLimits, RolloutEngine, SamplingParams
from workers.rollout.sample import Sample, sample_seed
from workers.rollout.vllm.setup import VllmSettings, class_options

FAMILIES = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "internvl", "idefics3", "smolvlm"),
    *("mistral3", "llama4", "gemma4"),
)
ATTENDS_AHEAD = ("gemma3", "gemma4+large")
LIMITS = EngineLimits(prompt_width=448, response_width=12, max_num_seqs=4, kv_cache_gib=1.0)


def engine_of(folder: Path, reads_images: bool, response_width: int = 12) -> RolloutEngine:
    from workers.rollout.vllm.engine import VllmRolloutEngine

    settings = VllmSettings(str(folder), reads_images=reads_images)
    return VllmRolloutEngine(settings, replace(LIMITS, response_width=response_width))


def samples_of(case: Case, rows: list[int]) -> list[Sample]:
    return [
        Sample(
            case.rows[row][: case.starts[row] + 1],
            sample_seed(0, f"{row}", index),
            f"row {row}",
            images=tuple(case.refs[row]),
        )
        for row in rows
        for index in range(2)
    ]


def difference(case: Case, engine: Any, rows: list[int]) -> float:
    """Return the largest difference from the log-probs of transformers."""
    samples = samples_of(case, rows)
    sampling = SamplingParams(max_tokens=12, stop_token_ids=(1, *case.reader.stop_ids))
    largest = 0.0
    for number, sample in enumerate(engine.generate(samples, sampling)):
        row = rows[number // 2]
        case.rows[row] = [*samples[number].prompt, *sample.tokens[:-1].tolist()]
        with torch.no_grad():
            log_probs = case.of_transformers(row).log_softmax(-1)
        case.rows[row] = [*samples[number].prompt, *sample.tokens.tolist()]
        theirs = log_probs.gather(1, sample.tokens[:, None])[:, 0]
        largest = max(largest, float((sample.log_probs - theirs).abs().max()))
    return largest


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("family", "reads_images"),
    [*product(FAMILIES, (True,)), *product(("qwen3_vl", "llama4", *ATTENDS_AHEAD), (False,))],
)
def test_log_probs_equal_those_of_transformers_after_each_sync(
    family: str, reads_images: bool, tmp_path: Path
) -> None:
    case = make_case(family, tmp_path, for_vllm=True)
    case.module.float()
    rows = [0, 1, 2, 4] if reads_images else [1]
    engine = engine_of(tmp_path, reads_images)
    for version in range(2):
        engine.load_weights(named_state(case.module))
        engine.commit(version)
        assert difference(case, engine, rows) < 2e-4
        with torch.no_grad():
            for weight in case.module.parameters():
                weight.mul_(1.1)
    engine.close()


@pytest.mark.vllm
@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_after_observed_images_has_the_log_probs_of_transformers(
    family: str, tmp_path: Path
) -> None:
    case = make_case(family, tmp_path, for_vllm=True)
    case.module.float()
    engine = engine_of(tmp_path, reads_images=True, response_width=200)
    engine.load_weights(named_state(case.module))
    engine.commit(0)
    # no turn follows a sampled token of an image, a video or sound
    no_image = tuple((token, -1e4) for token in case.reader.stop_ids)
    sampling = SamplingParams(max_tokens=200, stop_token_ids=(1,), logit_bias=no_image)
    first = [replace(sample, end_at=5) for sample in samples_of(case, [0, 1, 2])]
    shown = [case.refs[3][:1], case.refs[3][1:3], []] * 2
    begun = []
    for sample, refs in zip(engine.generate(first, sampling), shown, strict=True):
        places = " or ".join([case.reader.placeholder] * len(refs))
        text = f"<|end|><|user|>and {places}?<|assistant|>"
        text = case.reader.expanded(text, refs)
        ids = case.reader.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        begun.append(sample.with_observed(ids, False, len(sample.tokens) + len(ids) + 6, refs))
    for sample in engine.generate(begun, sampling):
        ids = [*sample.prompt, *sample.tokens.tolist()]
        row = Case(case.module, case.reader, [ids[:-1]], [list(sample.images)], [0])
        with torch.no_grad():
            logits = row.of_transformers(0)[len(sample.prompt) - 1 :]
        theirs = logits.log_softmax(-1).gather(1, sample.tokens[:, None])[:, 0]
        is_sampled = sample.is_sampled
        assert int(is_sampled.sum()) > 1
        assert float((sample.log_probs - theirs)[is_sampled].abs().max()) < 2e-4
    engine.close()


@pytest.mark.vllm
def test_ids_that_vllm_would_expand_again_are_an_error_that_names_the_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case("qwen2_5_vl", tmp_path, for_vllm=True)
    engine = engine_of(tmp_path, reads_images=True)
    engine.load_weights(named_state(case.module.float()))
    engine.commit(0)
    monkeypatch.setattr(ImageReader, "collapsed", lambda self, ids, images: list(ids))
    with pytest.raises(RolloutError, match="tokens for the prompt of row 2, which has"):
        engine.generate(samples_of(case, [2]), SamplingParams(max_tokens=2, stop_token_ids=(1,)))
    engine.close()


BFLOAT16 = "actor_rollout_ref.rollout.dtype=bfloat16"


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("family", "more", "error"),
    [
        ("qwen2_5_vl", (), 1e-3),
        ("qwen2_5_vl", ("actor_rollout_ref.model.lora_rank=4",), 1e-3),
        ("qwen3_5", (BFLOAT16,), 0.05),
    ],
)
def test_a_run_on_vllm_has_the_probabilities_of_the_trainer(
    family: str, more: tuple[str, ...], error: float, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path)
    model = write_model(family, tmp_path / "model", for_vllm=True)
    cache = "actor_rollout_ref.rollout.kv_cache_gib=1"
    settings = ("actor_rollout_ref.rollout.name=vllm", "placement=colocate", cache, *more)
    run(load_config(overrides(rows, model, tmp_path / "run", *settings)))
    steps = lines(tmp_path / "run")
    assert len(steps) == 2
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < error
        assert step["actor/grad_norm"] > 0


def test_an_engine_for_text_rejects_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path)
    engine = engine_on(monkeypatch, tmp_path, [])
    load(engine, model, 0)
    sample = Sample([3, 4], name="row 7", images=(("7.png", "ab"),))
    with pytest.raises(RolloutError, match="row 7 has images, but this vLLM reads only text"):
        engine.submit([sample], SamplingParams(max_tokens=2, stop_token_ids=(1,)))


@pytest.mark.parametrize("family", [vision.case(family) for family in ATTENDS_AHEAD])
def test_images_whose_tokens_attend_to_later_ones_are_rejected(family: str, tmp_path: Path) -> None:
    folder = str(write_model(family, tmp_path))
    assert class_options(VllmSettings(folder)) == {"language_model_only": True}
    with pytest.raises(ConfigError, match="name=vllm: the images of model type 'gemma"):
        class_options(VllmSettings(folder, reads_images=True))


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("gemma3", "name=vllm: the images of model type 'gemma3' are not supported"),
        ("qwen3_5", "dtype=float32: the log-probs of model type 'qwen3_5' would differ"),
    ],
)
def test_check_rejects_what_vllm_cannot_compute(family: str, words: str, tmp_path: Path) -> None:
    rows = write_rows(tmp_path)
    model = write_model(family, tmp_path / "model")
    settings = ("actor_rollout_ref.rollout.name=vllm", "trainer.dry_run=true")
    with pytest.raises(ConfigError, match=words):
        run(load_config(overrides(rows, model, tmp_path / "run", *settings)))


def test_rows_with_images_are_rejected_for_a_server(tmp_path: Path) -> None:
    rows = write_rows(tmp_path)
    model = write_model("qwen2_5_vl", tmp_path / "model")
    settings = ("actor_rollout_ref.rollout.name=vllm", "placement=colocate")
    server = "actor_rollout_ref.rollout.server_urls=[http://127.0.0.1:1]"
    with pytest.raises(ConfigError, match="server_urls: vLLM servers read only text here"):
        run(load_config(overrides(rows, model, tmp_path / "run", *settings, server)))


@pytest.mark.parametrize("family", vision.CASES)
def test_collapsed_ids_have_one_placeholder_per_image(family: str, tmp_path: Path) -> None:
    case = make_case(family, tmp_path)
    tokenizer = case.reader.processor.tokenizer
    for ids, refs in zip(case.rows, case.refs, strict=True):
        collapsed = case.reader.collapsed(ids, refs)
        text = tokenizer.decode(collapsed)
        assert text.count(case.reader.placeholder) == len(refs)
        expanded = tokenizer(case.reader.expanded(text, refs), add_special_tokens=False)
        assert expanded["input_ids"] == ids
    with pytest.raises(ValueError, match="tokens of image 1 are missing"):
        case.reader.collapsed([3, 4], [image_ref(picture(30, 40))])
