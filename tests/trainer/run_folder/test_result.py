"""A result as ten lines, as curves and as a table; its model and samples on demand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.run_folder.result import RunResult
from verl_like.errors import ConfigError

NAMES = ("critic/score/mean", "critic/rewards/mean", "reward/own_score/mean", "actor/entropy")
OTHERS = (
    "critic/score/min",
    "critic/score/max",
    "response_length/mean",
    "actor/pg_loss",
    "actor/a",
)


def result_of(folder: Path, num_steps: int = 3, model_folder: Path | None = None) -> RunResult:
    """Return steps in which every number is the step's, except the KL, which is 0."""
    names = [*NAMES, *OTHERS, *(f"timing_s/{number}" for number in range(100))]
    zero = {"actor/kl_loss": 0.0, "actor/ppo_kl": 0.0}
    steps = range(1, num_steps + 1)
    lines = [{"step": step, **dict.fromkeys(names, step / 8), **zero} for step in steps]
    for line in lines:
        line["actor/entropy"] = 4.0 - line["step"]
    return RunResult(folder, "0" * 8, lines, model_folder)


def test_a_result_prints_first_and_last_values_in_ten_lines(tmp_path: Path) -> None:
    lines = repr(result_of(tmp_path, 20)).splitlines()
    assert len(lines) <= 10
    assert lines[0] == f"20 steps in {tmp_path}"
    words = [line.split() for line in lines]
    assert ["critic/score/mean", "0.125", "->", "2.5"] in words
    assert ["actor/entropy", "3", "->", "-16"] in words
    assert not any("kl" in line for line in lines), "a KL of 0 says nothing"
    assert ["model", "not", "saved"] in words
    assert "0 steps in" in repr(RunResult(tmp_path, "", [], None))


@pytest.mark.usefixtures("figures")
def test_a_plot_shows_the_curves_of_the_report_or_of_named_metrics(tmp_path: Path) -> None:
    result = result_of(tmp_path)
    drawn = result.plot()
    assert {"Reward", "Entropy", "Lengths"} <= drawn.figures.keys()
    html = drawn._repr_html_()
    assert html.count("<svg") == len(drawn.figures)
    assert "KL" not in drawn.figures
    assert list(result.plot("actor/a", "critic/score/*").figures) == ["actor/a", "critic/score/*"]
    assert "report.html" in repr(drawn)
    with pytest.raises(ConfigError, match="has a metric 'actor/entrop'.*'actor/entropy'"):
        result.plot("actor/entrop")


def test_pandas_gets_a_row_per_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = result_of(tmp_path).to_pandas()
    assert table["critic/score/mean"].to_dict() == {1: 0.125, 2: 0.25, 3: 0.375}
    assert table.sort_values("step")["step"].tolist() == [1, 2, 3]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="to_pandas.. needs pandas .*pip install pandas"):
        result_of(tmp_path).to_pandas()


def test_samples_are_of_the_last_step_or_of_a_named_step(tmp_path: Path) -> None:
    result = result_of(tmp_path)
    with pytest.raises(ConfigError, match="has no samples"):
        result.samples()
    (tmp_path / "rollouts").mkdir()
    for step in (2, 10):
        row = {"step": step, "output": "aaa", "score": 1.0}
        (tmp_path / "rollouts" / f"{step}.jsonl").write_text(json.dumps(row) + "\n")
    assert [row["step"] for row in result.samples()] == [10]
    assert [row["step"] for row in result.samples(2)] == [2]
    with pytest.raises(ConfigError, match="no samples of step 3, .*steps 2 to 10"):
        result.samples(3)


@pytest.mark.parametrize("model", ["AutoModelForCausalLM", "AutoModelForSequenceClassification"])
def test_a_model_is_loaded_once(model: str, tiny_dir: Path, tmp_path: Path) -> None:
    import transformers

    settings: dict[str, Any] = {"num_labels": 1} if "Sequence" in model else {}
    expected = getattr(transformers, model).from_pretrained(tiny_dir / "model", **settings)
    expected.save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_dir / "model")
    tokenizer.save_pretrained(tmp_path)

    result = result_of(tmp_path, model_folder=tmp_path)
    assert type(result.model) is type(expected)
    assert result.model is result.model
    assert result.tokenizer("say a").input_ids == tokenizer("say a").input_ids
    with pytest.raises(ConfigError, match="has no model. Set trainer.save_final=true"):
        _ = result_of(tmp_path).model
