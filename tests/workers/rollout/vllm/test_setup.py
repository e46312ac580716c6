"""The preparation of vLLM: rejected models, and its copy of a model's configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import load
from tests.workers.models.architectures import NotBuilt, build_tiny, tiny_model_config
from tests.workers.rollout.vllm.table import FIELDS
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


@pytest.mark.long
def test_each_model_of_the_page_was_compared_or_is_rejected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = load("docs/model_table.py")
    rows = {case: row for case, row in table.read_results().items() if row and "+" not in case}
    results = {case: row[5] for case, row in rows.items() if row[5:]}
    results |= dict.fromkeys(table.VLLM, "yes")
    assert {case for case, row in rows.items() if row[4:5] == ["yes"]} == results.keys()
    assert {case for case, result in results.items() if result == "yes"} == COMPARED
    for case, result in results.items():
        try:
            tiny_model_config(case, 4, FIELDS.get(case, {})).save_pretrained(tmp_path / case)
        except NotBuilt:  # it needs another package
            continue
        if result == "yes":
            check_model(str(tmp_path / case), False, "cpu", "float32")
        else:
            with pytest.raises(ConfigError, match="Set .*native|Set .*hf"):
                check_model(str(tmp_path / case), False, "cpu", "float32")
    assert "never compared" not in caplog.text


@pytest.mark.parametrize("model_type", ["ernie4_5_moe", "gpt_oss"])
def test_a_problem_on_cpus_is_a_warning_on_gpus(
    model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_model_config(model_type).save_pretrained(tmp_path)
    check_model(str(tmp_path), False, "cuda", "float32")
    assert caplog.text.count(f"'{model_type}' was never compared") == 1


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("codegen", "type 'codegen', because it has no class .* Set .*name=native or hf."),
        ("afmoe", "field 'score_func' of models of type 'afmoe', which .* lacks. Add it, or set"),
    ],
)
def test_a_model_that_vllm_does_not_run_is_rejected_on_gpus(
    model_type: str, words: str, tmp_path: Path
) -> None:
    tiny_model_config(model_type).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=words):
        check_model(str(tmp_path), False, "cuda", "bfloat16")


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
