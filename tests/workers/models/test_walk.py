"""Every causal LM of transformers is right in each part of a run, or rejected with an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import ROOT
from tests.workers.models.architectures import NotBuilt, build_tiny, cases, tiny_model_config
from tests.workers.models.walk import PARTS, engine_of, error_in_float64, outcome, walk

RESULTS: dict[str, list[str] | None] = json.loads((ROOT / "docs/data/models.json").read_text())
FAST = (
    "llama qwen2+window mixtral+jitter phi3+longrope gemma2 gpt2 bloom deepseek_v3 llama4_text "
    "gpt_oss gemma4_text+heads gemma3 gemma4 qwen2_vl qwen2_5_vl qwen3_vl qwen3_5 llama4 internvl "
    "llava mistral3 smolvlm idefics3"
).split()
UNKNOWN = {
    "blt": "reads bytes through three models; its configuration has no layers of its own",
    "shieldgemma2": "classifies images",
    "glm5_next": "its default configuration has heads of size 0",
}
"""Case -> why it is not walked."""


def check(case: str, folder: Path) -> None:
    """Check that every part is right or rejected, and agrees with `docs/models.md`."""
    results = walk(case, folder)
    assert not {part: result for part, result in results.items() if result.startswith("wrong")}
    row = RESULTS[case]
    assert row is not None
    assert row[: len(PARTS)] == list(outcome(results))


@pytest.mark.parametrize("case", FAST)
def test_each_part_is_right_or_rejected(case: str, tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.parametrize("case", ["llama", "mixtral", "qwen3_5_text"])
def test_log_probs_and_gradients_agree_in_float64(case: str, tmp_path: Path) -> None:
    module = build_tiny(tiny_model_config(case))
    module.save_pretrained(tmp_path / "model")
    assert error_in_float64(module, engine_of(tmp_path)) < 5e-7


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in cases() if case not in (*FAST, *UNKNOWN)])
def test_each_part_of_every_other_architecture_is_right_or_rejected(
    case: str, tmp_path: Path
) -> None:
    try:
        check(case, tmp_path)
    except NotBuilt as reason:
        pytest.skip(str(reason))
