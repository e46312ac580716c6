"""The preparation of vLLM: rejected models, and its copy of a model's configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import load
from tests.workers.models.architectures import build_tiny, tiny_model_config
from verl_like.errors import ConfigError
from workers.rollout.vllm.setup import COMPARED, VllmSettings, check_model, class_options


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("apertus", "xIELU in bfloat16. Set .*dtype=bfloat16 or .*=native."),
        ("cohere2_vision", "logit_scale, but transformers does not. Set .*name=hf."),
        ("deepseek_v3", "right only with a scaled rope. Set .*name=native."),
        ("ernie4_5_moe", "experts without the correction bias. Set .*name=native."),
        ("gemma3n_text", "embeddings that each layer reads. Set .*name=hf."),
        ("lfm2", "computes its layers in another way. Set .*name=hf."),
        ("qwen3_next", "linear attention only in bfloat16. Set .*dtype=bfloat16 or .*=hf."),
    ],
)
def test_a_model_that_vllm_computes_in_another_way_is_rejected(
    model_type: str, words: str, tmp_path: Path
) -> None:
    build_tiny(tiny_model_config(model_type)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"model type '{model_type}' would differ.*{words}$"):
        check_model(str(tmp_path), False, "cpu", "float32")
    is_right_in_bfloat16 = "dtype=bfloat16" in words
    if is_right_in_bfloat16:
        check_model(str(tmp_path), False, "cpu", "bfloat16")


def test_a_model_that_was_never_compared_gets_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for model_type, words in (("llama", 0), ("codegen", 1)):
        caplog.clear()
        build_tiny(tiny_model_config(model_type)).save_pretrained(tmp_path / model_type)
        check_model(str(tmp_path / model_type), False, "cpu", "float32")
        assert caplog.text.count(f"'{model_type}' was never compared") == words


def test_the_models_that_were_compared_are_those_of_the_page() -> None:
    table = load("docs/model_table.py")
    of_page = {
        case for case, row in table.read_results().items() if row and row[5:] == ["yes"]
    } | table.VLLM.keys()
    assert {case for case in of_page if "+" not in case} == COMPARED


def test_a_difference_on_cpus_is_not_rejected_on_gpus(tmp_path: Path) -> None:
    build_tiny(tiny_model_config("ernie4_5_moe")).save_pretrained(tmp_path)
    check_model(str(tmp_path), False, "cuda", "float32")


def test_vllm_gets_the_sliding_window_of_transformers(tmp_path: Path) -> None:
    config = tiny_model_config("cohere2")
    build_tiny(config).save_pretrained(tmp_path)
    window = {"sliding_window": config.sliding_window - 1}
    assert class_options(VllmSettings(str(tmp_path))) == {"hf_overrides": window}


def test_vllm_gets_the_attention_scale_of_a_published_ministral_3(tmp_path: Path) -> None:
    config = tiny_model_config("mistral3")
    config.text_config = tiny_model_config("ministral3")
    config.save_pretrained(tmp_path)
    scaling = {"beta": 0.1, "original_max_position_embeddings": 16}
    options = class_options(VllmSettings(str(tmp_path)))
    assert options["hf_overrides"] == {"text_config": {"llama_4_scaling": scaling}}
