"""`benchmarks/gpu.sh` and `gpu_node.sh`, as far as they run without a GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests import ROOT
from tests.conftest import load
from tests.forked import run_program
from tests.waiting import wait_until
from trainer.launch import ALL_FOUND
from trainer.planner.cost import DEVICES

INTERPRETER = f"""#!/usr/bin/env bash
[ "$1" != -c ] || exec "{sys.executable}" "$@"
echo "$@"
"""
"""An interpreter that prints the command that the scripts would run."""
LIMIT_S = {1: 15 * 60, 8: 20 * 60}
"""Number of GPUs -> seconds of all parts together."""


@pytest.fixture(scope="module")
def hour() -> ModuleType:
    return load("benchmarks/gpu_hour.py")


@pytest.fixture(scope="module")
def configs(hour: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model folders of the real sizes without weights, and prompts."""
    folder = tmp_path_factory.mktemp("gpu")
    hour.write_configs(folder / "models", tiny=False)
    return folder


def parts_of(hour: ModuleType, num_gpus: int, folder: Path, **more: object) -> list[object]:
    return list(hour.parts(hour.Machine(num_gpus, **more), folder))


RUNS = {
    num_gpus: [
        part.name for part in parts_of(load("benchmarks/gpu_hour.py"), num_gpus, Path()) if part.run
    ]
    for num_gpus in (1, 8)
}


@pytest.mark.parametrize("script", ["gpu.sh", "gpu_node.sh"])
def test_both_scripts_start_one_runner(script: str, tmp_path: Path) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text(INTERPRETER, encoding="utf-8")
    interpreter.chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / script), "--device", "cpu"],
        env=os.environ | {"PYTHON": str(interpreter)},
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    gpus = "--gpus 8 " if script == "gpu_node.sh" else ""
    assert done.stdout == f"benchmarks/gpu_hour.py {gpus}--device cpu\n"


@pytest.mark.parametrize("num_gpus", [1, 8])
def test_the_limits_of_all_parts_fit_the_total_time(hour: ModuleType, num_gpus: int) -> None:
    listed = parts_of(hour, num_gpus, Path())
    assert sum(part.limit_s + hour.GRACE_S for part in listed) <= LIMIT_S[num_gpus]
    assert len({part.name for part in listed}) == len(listed) > 9


@pytest.mark.parametrize("num_gpus", [1, 8])
def test_all_parts_end_within_the_total_time(
    hour: ModuleType, num_gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []

    def run_parts(
        machine: object, out: Path, only: list[str], seconds: float, patience: float
    ) -> list[object]:
        limits.append(seconds)
        (out / "gpu.md").write_text("", encoding="utf-8")
        return []

    arguments = ["--gpus", str(num_gpus), "--device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["gpu_hour.py", *arguments])
    monkeypatch.setattr(hour, "run_parts", run_parts)
    monkeypatch.setattr(hour, "end_parts_on_sigterm", lambda: None)
    with pytest.raises(SystemExit, match="False"):
        hour.main()
    assert limits == [LIMIT_S[num_gpus]]


@pytest.mark.parametrize(
    ("num_gpus", "name", "engine"),
    [
        *((number, names[0], "native") for number, names in RUNS.items()),
        *((number, name, "vllm") for number, names in RUNS.items() for name in names),
    ],
)
def test_every_run_passes_a_dry_run_on_simulated_gpus(
    hour: ModuleType, configs: Path, num_gpus: int, name: str, engine: str
) -> None:
    backend = "ray" if num_gpus > 1 else "local"
    machine = hour.Machine(num_gpus, backend=backend, engine=engine)
    (part,) = [part for part in hour.parts(machine, configs) if part.name == name]
    output = hour.dry_run(part, machine, "H100")
    assert output.splitlines()[-1] == ALL_FOUND
    assert f"Devices: {num_gpus} x H100" in output


def part_that(hour: ModuleType, code: str, limit_s: int = 30, **more: object) -> object:
    return hour.Part(
        "a part",
        limit_s,
        ("-c", code),
        **{"figures": load("benchmarks/gpu_parts.py").written_figures, **more},
    )


WRITES = "from pathlib import Path; Path(r'{part}/figures.json').write_text('{\"MFU\": 0.5}')"


def test_a_part_writes_its_figures_and_its_log(hour: ModuleType, tmp_path: Path) -> None:
    outcome = hour.run_part(part_that(hour, f"print('hello'); {WRITES}"), tmp_path / "it", None)
    assert (outcome.result, outcome.figures) == ("ok", {"MFU": 0.5})
    assert (tmp_path / "it" / "log.txt").read_text() == "hello\n"


@pytest.mark.parametrize(
    ("code", "limit_s", "result", "why"),
    [
        ("raise SystemExit(3)", 30, "FAILED", "exit code 3"),
        ("pass", 30, "FAILED", "its figures cannot be read"),
        ("import time; time.sleep(99)", 1, "LATE", "not done in 1 s"),
    ],
)
def test_a_bad_part_reports_why(
    hour: ModuleType, code: str, limit_s: int, result: str, why: str, tmp_path: Path
) -> None:
    outcome = hour.run_part(part_that(hour, code, limit_s), tmp_path / "it", None)
    assert outcome.result == result
    assert outcome.why.startswith(why)
    assert outcome.is_bad


BEATS = "import time\nwhile True:\n    open(r'{part}/beat', 'a').write('.'); time.sleep(0.05)"
STARTS = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '''{BEATS}'''])"


def has_ended(beat: Path) -> bool:
    size = beat.stat().st_size
    time.sleep(0.3)
    return 0 < size == beat.stat().st_size


def test_sigterm_to_the_runner_ends_its_part_and_that_part_s_processes(
    hour: ModuleType, tmp_path: Path
) -> None:
    beat = tmp_path / "it" / "beat"

    def end() -> None:
        wait_until(beat.exists)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    try:
        hour.end_parts_on_sigterm()
        threading.Thread(target=end).start()
        with pytest.raises(SystemExit, match="143"):
            hour.run_part(part_that(hour, STARTS, 60), tmp_path / "it", None)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert has_ended(beat)


def test_a_part_without_its_library_or_a_gpu_is_skipped(
    hour: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hour, "is_installed", lambda module: module != "vllm")
    on_cpu = hour.Machine(1, "cpu")
    needs_vllm = part_that(hour, "", needs=("vllm",))
    assert hour.why_skipped(needs_vllm, on_cpu, []).startswith("vllm is not installed: pip install")
    assert "GPU" in hour.why_skipped(part_that(hour, "", needs_gpu=True), on_cpu, [])
    assert hour.why_skipped(part_that(hour, "", needs=("ray",)), on_cpu, []) == ""


def run_of(hour: ModuleType, name: str, configs: Path) -> object:
    (part,) = [part for part in parts_of(hour, 8, configs) if part.name == name]
    return part


def test_a_run_reports_medians_of_later_steps_against_the_data_sheet(
    hour: ModuleType, configs: Path, tmp_path: Path
) -> None:
    part = run_of(hour, "GRPO 7B, rollout apart: NCCL sync", configs)
    steps = [
        {"timing_s/step": seconds, "timing_s/gen": 10.0, "perf/mfu/actor": 0.4,
         "timing_s/update_weights": 0.1, "perf/weight_sync_mib": 14000.0}
        for seconds in (90.0, 20.0, 30.0)
    ]  # fmt: skip
    (tmp_path / "run").mkdir()
    lines = "\n".join(map(json.dumps, steps))
    (tmp_path / "run" / "metrics.jsonl").write_text(lines, encoding="utf-8")
    outcome = part.figures(tmp_path, DEVICES["H100"])
    assert outcome["s per step"] == 25
    assert outcome["MFU"] == 0.4
    assert outcome["sync, times the link's own time"] == pytest.approx(
        0.1 * 450e9 / (14000 * 2**20)
    )
    # 512 tokens, each of which reads 7.07e9 weights of 16 bits, and 128 rows of 640 tokens' keys
    weights = 2 * 7.07e9
    keys = 128 * 2 * 2 * 28 * 4 * 128 * 640
    assert outcome["share of bandwidth"] == pytest.approx(
        512 * (weights + keys) / 10 / 3350e9, rel=0.01
    )


def test_a_run_of_one_step_has_no_figures(hour: ModuleType, configs: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"timing_s/step": 1}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="no step after its first"):
        run_of(hour, "GRPO 7B, FSDP2 over all", configs).figures(tmp_path, None)


def test_no_part_starts_after_the_total_time(
    hour: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hour.time, "monotonic", lambda: 100.0)
    outcomes = hour.run_parts(hour.Machine(1, "cpu", True), tmp_path, [], seconds=1, patience=1)
    assert {outcome.result for outcome in outcomes} == {"skipped"}
    assert "only 1 s were left" in (tmp_path / "gpu.md").read_text(encoding="utf-8")


QUICK_PARTS = ("machine", "trap", "fixed", "fsdp", "memory", "profile", "micro", "decode")
"""The parts, except those that only multiply matrices for longer."""


@pytest.mark.parametrize("part", QUICK_PARTS)
def test_a_part_runs_small_on_a_cpu_without_ray_and_vllm(part: str, tmp_path: Path) -> None:
    words = [part, "--device", "cpu", "--tiny", "--out", str(tmp_path / "figures.json")]
    done = run_program(main_without_ray_and_vllm, *words, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert figures == json.loads(done.stdout.splitlines()[-1])
    assert figures
    if part == "fsdp":
        assert figures["weights after reading are"] == "equal"
        assert figures["grad norm, fsdp"] == pytest.approx(figures["grad norm, plain"], rel=1e-5)
        assert figures["largest log-prob difference, fsdp_offload"] < 1e-3


def main_without_ray_and_vllm() -> None:
    """Run `gpu_side.py` without Ray and vLLM."""
    sys.meta_path.insert(0, Absent())
    load("benchmarks/gpu_side.py").main()


class Absent:
    """Reports Ray and vLLM as missing."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in ("ray", "vllm"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.slow
@pytest.mark.parametrize(("script", "more"), [("gpu.sh", []), ("gpu_node.sh", ["--gpus", "2"])])
def test_a_trial_on_the_cpu_runs_every_part(script: str, more: list[str], tmp_path: Path) -> None:
    command = ["bash", str(ROOT / "benchmarks" / script), "--device", "cpu", "--tiny", *more]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out"), "--patience", "5"],
        env=os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=max(LIMIT_S.values()), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    record = json.loads((tmp_path / "out" / "gpu.json").read_text(encoding="utf-8"))
    results = {part["name"]: part["result"] for part in record["parts"]}
    assert set(results.values()) <= {"ok", "skipped"}
    runs = [part for part in record["parts"] if "s per step" in part["figures"]]
    assert len(runs) >= 2
    assert (tmp_path / "out" / "gpu.md").read_text(encoding="utf-8") in done.stdout
