"""Engines sample after prompts with images with the log-probs of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.models import vision
from tests.workers.models.test_image_input import make_case
from workers.rollout.base import EngineLimits, RolloutEngine, SamplingParams
from workers.rollout.hf import HFRolloutEngine
from workers.rollout.native.engine import NativeRolloutEngine
from workers.rollout.sample import Sample, sample_seed

NATIVE = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "llava", "idefics3", "smolvlm"),
    "mistral3",
)
HF = ("gemma3", "qwen3_5", "gemma4", "gemma4+large", "llama4")


def engine_of(name: str, module: Any, folder: Path, response_width: int = 12) -> RolloutEngine:
    limits = EngineLimits(
        prompt_width=448, response_width=response_width, max_num_seqs=4, kv_cache_gib=1.0
    )
    engine: RolloutEngine
    if name == "hf":
        engine = HFRolloutEngine(module, limits)
    else:
        engine = NativeRolloutEngine(module, limits, owns_weights=True)
    engine.model_path = str(folder)
    engine.commit(1)
    return engine


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(vision.case(family, "native") for family in NATIVE),
        *(vision.case(family, "hf") for family in (*NATIVE, *HF)),
    ],
)
def test_samples_after_images_have_the_log_probs_of_transformers(
    family: str, name: str, tmp_path: Path
) -> None:
    case = make_case(family, tmp_path)
    case.module.float()
    samples = [
        Sample(
            case.rows[row][: case.starts[row] + 1],
            sample_seed(0, f"{row}", index),
            images=tuple(case.refs[row]),
        )
        for row in range(len(case.rows))
        for index in range(2)
    ]
    engine = engine_of(name, case.module, tmp_path)
    sampling = SamplingParams(max_tokens=12, stop_token_ids=(1, *case.reader.stop_ids))
    finished = engine.generate(samples, sampling)

    for number, sample in enumerate(finished):
        row = number // 2
        # the last token may be an image token, which ends a response
        case.rows[row] = [*samples[number].prompt, *sample.tokens[:-1].tolist()]
        with torch.no_grad():
            logits = case.of_transformers(row)
        log_probs = logits.log_softmax(-1).gather(1, sample.tokens[:, None])[:, 0]
        torch.testing.assert_close(sample.log_probs, log_probs, atol=2e-5, rtol=1e-4)
    assert len({tuple(sample.tokens.tolist()) for sample in finished}) > len(case.rows)
