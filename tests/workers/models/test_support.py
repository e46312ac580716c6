"""The table of model classes is what the proofs say, and decides how a class runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers

from tests.workers.models.architectures import cases
from tools.prove_models import classes_with_images, rows_of
from workers.models.support import TABLE, Support, _table, capabilities_of, features

ROWS: dict[str, str] = json.loads(TABLE.read_text(encoding="utf-8"))
FAST = (
    "llama mistral mixtral granite gemma2 gemma3_text phi3+longrope lfm2 minimax bert falcon"
).split()


def check(case: str) -> None:
    """Check that the table says what the proofs of a case say, or less."""
    for key, ways in rows_of(case).items():
        for word in ROWS[key].split():
            way, _, limits = word.partition("<")
            assert way in ways, (key, word)
            assert ways[way] <= {*limits.split(",")}, (key, word)


@pytest.mark.parametrize("case", FAST)
def test_the_proofs_say_what_the_table_says(case: str) -> None:
    check(case)


@pytest.mark.parametrize("case", ["qwen2_vl", "llava", "paligemma"])
def test_the_proofs_of_rows_with_images_say_what_the_table_says(case: str) -> None:
    rows = {
        f"{name} {' '.join(sorted(having))}".strip(): dict(ways)
        for name, tested in _table().items()
        for having, ways in tested
    }
    results = classes_with_images(case, rows)
    assert results == {key: "images" in ROWS[key].split() for key in results}
    assert any(results.values()) == (case != "paligemma")


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in cases() if case not in FAST])
def test_the_proofs_of_every_other_class_say_what_the_table_says(case: str) -> None:
    check(case)


def test_a_class_with_a_kind_of_layer_that_was_not_tested_is_not_listed() -> None:
    assert capabilities_of("LlamaForCausalLM", frozenset()) is not None
    assert capabilities_of("LlamaForCausalLM", frozenset({"linear_attention"})) is None
    assert capabilities_of("TheirForCausalLM", frozenset()) is None


@pytest.mark.parametrize(
    ("name", "fields", "is_packed"),
    [
        ("Lfm2Config", {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}, True),
        ("Lfm2Config", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}, False),
        ("BertConfig", {"is_decoder": True}, True),
        ("BertConfig", {"is_decoder": False}, False),
        ("Gemma3TextConfig", {}, True),
        ("Gemma3TextConfig", {"use_bidirectional_attention": True}, False),
    ],
)
def test_features_of_a_config_decide_how_a_class_runs(
    name: str, fields: dict[str, Any], is_packed: bool
) -> None:
    config = getattr(transformers, name)(**fields)
    assert (Support.of(config, "sdpa").why_not("packed") == "") == is_packed


@pytest.mark.parametrize(
    "name", ["LlamaConfig", "Qwen2Config", "Qwen3Config", "Gemma3Config", "Qwen2VLConfig"]
)
def test_the_default_configs_of_large_families_are_listed(name: str) -> None:
    config = getattr(transformers, name)()
    assert Support.of(config, "sdpa").why_not("packed") == "", features(config)
