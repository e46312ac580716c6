"""Folders of published classes pass `check` and run, or `check` rejects them in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests import ROOT
from tests.integration.published import crash_of, grpo, write_published
from tests.integration.runs import POLICY_ALONE, overrides
from tests.workers.models.architectures import NotBuilt
from trainer import load_config, run
from verl_like.errors import ConfigError

RESULTS: dict[str, list[str] | None] = json.loads((ROOT / "docs/data/models.json").read_text())
FAST = (
    "gemma3 gemma4 qwen2_vl qwen3_vl qwen3_5 llama4 llava mistral3 smolvlm llama gpt2 blip-2"
).split()
RUN = [case for case, row in RESULTS.items() if row and len(row) > 4]


@pytest.fixture(autouse=True)
def _without_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the pages of the runs, which take half of the time."""
    monkeypatch.setattr("trainer.tools.report.page._write", lambda data: "left out")


def check(case: str, tiny: Path, folder: Path) -> None:
    """Check that the class starts as `docs/models.md` says."""
    result, row = crash_of(case, tiny, folder).partition(":")[0], RESULTS[case]
    assert row is not None
    assert result == row[4]


@pytest.mark.parametrize("case", FAST)
def test_a_published_class_runs_or_is_rejected_before_it_starts(
    case: str, tiny_dir: Path, tmp_path: Path
) -> None:
    check(case, tiny_dir, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in RUN if case not in FAST])
def test_every_other_class_of_the_table_runs_or_is_rejected(
    case: str, tiny_dir: Path, tmp_path: Path
) -> None:
    try:
        check(case, tiny_dir, tmp_path)
    except NotBuilt as reason:
        pytest.skip(str(reason))


def check_run(tiny: Path, folder: Path, *more: str) -> None:
    """Check a run on the model in the folder, as `verl-like check` does."""
    keys = (f"actor_rollout_ref.model.path={folder}/model", "trainer.dry_run=true", *more)
    run(load_config(overrides(tiny, folder / "run", *POLICY_ALONE, *keys)))


def without(folder: Path, change: Any) -> None:
    """Change the weights in the folder."""
    file = folder / "model" / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def test_check_compares_names_and_shapes_of_the_weights(tiny_dir: Path, tmp_path: Path) -> None:
    write_published("qwen2_vl", tiny_dir, tmp_path)
    name = "visual.blocks.0.attn.qkv.weight"
    without(tmp_path, lambda weights: weights.update({name: weights[name][:, :8].contiguous()}))
    with pytest.raises(ConfigError, match=r"wrong shape: .*attn.qkv.weight .is \[96, 8\]"):
        grpo(tmp_path).fit(steps=1)
    without(tmp_path, lambda weights: weights.pop(name))
    with pytest.raises(ConfigError, match=r"lacks 1 of its weights: .*blocks.0.attn.qkv.weight"):
        check_run(tiny_dir, tmp_path)


def test_check_rejects_an_engine_that_cannot_decode_the_model(
    tiny_dir: Path, tmp_path: Path
) -> None:
    write_published("gemma3", tiny_dir, tmp_path)
    with pytest.raises(ConfigError, match=r"rollout.name=native decodes only full attention"):
        check_run(tiny_dir, tmp_path, "actor_rollout_ref.rollout.name=native")


def test_check_rejects_a_model_with_code_of_its_own(tiny_dir: Path, tmp_path: Path) -> None:
    write_published("llama", tiny_dir, tmp_path)
    file = tmp_path / "model" / "config.json"
    code = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | code))
    with pytest.raises(
        ConfigError, match="custom code .`auto_map` in config.json., which is never"
    ):
        check_run(tiny_dir, tmp_path)
