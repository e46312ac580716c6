"""`benchmarks/gpu.sh`, as far as it runs without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import ROOT
from tests.conftest import load


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("benchmarks/gpu_run.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the predictions for tiny sizes."""
    folder = tmp_path_factory.mktemp("gpu")
    assert run_script("predict", folder).returncode == 0
    return folder


def run_script(call: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "benchmarks/gpu.sh"), call, "--tiny", "--out", str(folder)]
    return subprocess.run(
        command,
        env=os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("call", ["1", "2"])
def test_a_call_measures_all_of_its_parts_small_on_a_cpu(
    script: ModuleType, folder: Path, call: str
) -> None:
    done = run_script(call, folder)
    assert done.returncode == 0, done.stdout[-3000:] + (folder / "gpu.log").read_text()[-3000:]
    lines = (folder / "figures.jsonl").read_text("utf-8").splitlines()
    names = [part.name for part in script.CALLS[call]]
    figures = [fact for fact in map(json.loads, lines) if fact["part"] in names]
    assert set(names) == {figure["part"] for figure in figures}
    predicted = {f"{f['part']}: {f['figure']}" for f in figures if "predicted" in f}
    expected = json.loads((folder / "predictions.json").read_text("utf-8"))["H100"]
    assert {name for name in expected if name.partition(":")[0] in names} == predicted
    table = (folder / "gpu.md").read_text("utf-8")
    assert table in done.stdout
    assert "Not measured in this call: several GPUs" in table


@pytest.mark.parametrize("call", ["1", "2"])
def test_the_limits_of_all_parts_fit_the_time_of_a_call(script: ModuleType, call: str) -> None:
    parts = script.CALLS[call]
    starts = {part.segments for part in parts}
    limit_s = sum(part.limit_s for part in parts) + script.START_S * len(starts)
    assert limit_s <= script.LIMIT_S[call]


def fails(trial: Any) -> Any:
    yield "before", 1.0, "s"
    raise ArithmeticError("in the middle")


def test_a_part_that_fails_keeps_its_figures_and_the_next_one_runs(
    script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    parts = [script.Part("fails", 9, fails), script.Part("machine", 9, script.machine)]
    script.run_parts(parts, script.Trial("cpu", True, tmp_path))
    lines = capsys.readouterr().out.splitlines()
    facts = [json.loads(line[1:]) for line in lines if line.startswith("@")]
    assert facts[1] == {"part": "fails", "figure": "before", "value": 1.0, "unit": "s"}
    assert facts[2]["error"] == "ArithmeticError: in the middle"
    assert facts[-1]["part"] == "machine"
    assert facts[-1]["error"] == ""


CHILD = """
import json, os, sys, time
for name in sys.argv[1:]:
    print("@" + json.dumps({"part": name}), flush=True)
    print("@" + json.dumps({"part": name, "figure": "a", "value": 1.0, "unit": "s"}), flush=True)
    if name == "hangs":
        time.sleep(99)
    if name == "dies":
        os._exit(1)
    print("@" + json.dumps({"part": name, "ended": True, "error": "", "seconds": 1.0}), flush=True)
"""


def test_a_part_that_hangs_or_kills_its_process_does_not_end_the_call(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "child.py").write_text(CHILD, encoding="utf-8")
    popen = subprocess.Popen

    def start(command: list[str], **settings: Any) -> Any:
        names = [name for name in command if name in ("hangs", "dies", "works")]
        return popen([sys.executable, str(tmp_path / "child.py"), *names], **settings)

    monkeypatch.setattr(script.subprocess, "Popen", start)
    parts = [script.Part(name, 2, fails) for name in ("hangs", "dies", "works")]
    call = script.Call(parts, tmp_path, [], seconds=60)
    call.run()
    results = {name: outcome.result for name, outcome in call.outcomes.items()}
    assert results == {"hangs": "late: stopped", "dies": "the process ended", "works": "ok"}
    assert [figure["part"] for figure in call.figures] == ["hangs", "dies", "works"]
    assert "Not measured in this call: hangs; dies; several" in (tmp_path / "gpu.md").read_text()
