"""lm-eval, which users run on a trained model, finds the accuracy of `verl-like eval`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.integration.runs import lines
from trainer.cli.eval import main

ROWS = [(a, b) for a in range(10) for b in range(10 - a)]
TASK = {
    "task": "sums",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{prompt[0].content}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"max_gen_toks": 4, "until": [], "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}


def test_lm_eval_finds_the_same_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(tmp_path)
    verl_like = [sys.executable, "-c", "from trainer.cli.main import main; main()"]
    subprocess.run([*verl_like, "make-tiny", "sums", "--sums"], check=True)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is {a} + {b}?"}],
            "answer": f"#### {a + b}",
        }
        for a, b in ROWS
    ]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    Path("right.py").write_text(
        "def right(response, answer):\n    return float(response == answer)\n", "utf-8"
    )
    limits = ["data.max_prompt_length=16", "data.max_response_length=4"]
    places = ["trainer.default_local_dir=out", "trainer.device=cpu"]
    main(["sums/model", "data.val_files=rows.jsonl", "reward=right.py:right", *limits, *places])
    (line,) = lines(tmp_path / "out")
    (ours,) = [value for name, value in line.items() if name.endswith("reward/mean@1")]

    task = TASK | {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}}}
    Path("tasks").mkdir()
    Path("tasks/sums.yaml").write_text(yaml.safe_dump(task), "utf-8")
    model = ["--model", "hf", "--model_args", "pretrained=sums/model", "--device", "cpu"]
    of_task = ["--include_path", "tasks", "--tasks", "sums", "--apply_chat_template"]
    command = [Path(sys.executable).with_name("lm_eval"), "run", *model, *of_task]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    subprocess.run([*command, "--output_path", "lm_eval"], check=True)
    (results,) = Path("lm_eval").rglob("results_*.json")
    theirs = json.loads(results.read_text("utf-8"))["results"]["sums"]["exact_match,none"]
    assert 0 < ours < 1
    assert theirs == pytest.approx(ours)
