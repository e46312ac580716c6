"""`verl-like doctor` checks the machine, and each failing line ends with its fix."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
from packaging.requirements import Requirement

from tests.programs import VERL_LIKE
from trainer.cli import doctor, probes
from trainer.cli.doctor import CheckResult, show
from verl_like.process.machine import free_memory_gib


@pytest.mark.long
@pytest.mark.ray
def test_everything_works_here(ray_session: None) -> None:
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    done = subprocess.run(
        [VERL_LIKE, "doctor"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "weight sync and generation ran" in line]
    assert [line.split()[:3] for line in lines] == [
        ["ok", "local", "works"],
        ["ok", "ray", "works"],
    ]


def test_a_missing_package_ends_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def without(name: str) -> str:
        if name in ("ray", "vllm"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "99.0" if name == "transformers" else version(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", without)
    lines = {finding.subject: str(finding) for finding in doctor.check_packages()}
    assert lines["ray"].startswith("FAIL")
    assert "-m pip install 'ray>=" in lines["ray"]
    assert lines["vllm"].startswith("-   ")
    assert lines["transformers"].startswith("FAIL  transformers  99.0, not in the range")


def test_a_probe_that_fails_shows_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = subprocess.CompletedProcess([], 1, "", "Traceback\nImportError: libfoo.so is gone\n")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: broken)
    line = str(doctor.check_works("ray", "pip install ray"))
    assert line == "FAIL  ray works     ImportError: libfoo.so is gone → pip install ray"


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_optional_packages_and_two_gpus_are_probed(
    num_gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = importlib.metadata.version
    monkeypatch.setattr(
        doctor.importlib.metadata, "version", lambda n: "2.8.3" if n == "flash-attn" else version(n)
    )
    monkeypatch.setattr(
        doctor, "check_works", lambda probe, fix: CheckResult(f"{probe} works", "no", fix)
    )
    gpus = [doctor.InstalledGpu("NVIDIA H100", "81559 MiB", "580.65.06")] * num_gpus
    monkeypatch.setattr(doctor, "nvidia_gpus", lambda: gpus)
    lines = {finding.subject: str(finding) for finding in doctor.check_results()}
    fix = "-m pip install --force-reinstall --no-build-isolation 'flash-attn"
    assert fix in lines["flash_attention works"]
    assert ("fsdp works" in lines) == (num_gpus == 2)
    probes = {"torch works", "ray works", "local works"}
    assert probes | {"CPUs", "GPUs", "allocator", "memory", "shared memory"} <= set(lines)


LineOfGpus = Callable[[str, str | None], str]
NVIDIA_SMI = """\
NVIDIA A100-SXM4-80GB, 81920 MiB, 550.54.15
NVIDIA A100-SXM4-80GB, 81920 MiB, 550.54.15
"""
"""What `nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader` printed."""


@pytest.fixture
def line_of_gpus(monkeypatch: pytest.MonkeyPatch) -> LineOfGpus:
    """Return doctor's line for an output of `nvidia-smi` and the CUDA version of torch."""

    def line(output: str, cuda: str | None) -> str:
        done = subprocess.CompletedProcess([], 0, output, "")
        monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
        monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: done)
        monkeypatch.setattr(doctor, "cuda_of_torch", lambda: cuda)
        return str(doctor.check_gpus(Requirement("torch>=2.11,<2.14")))

    return line


def test_a_driver_too_old_for_torch_fails_with_both_fixes(line_of_gpus: LineOfGpus) -> None:
    line = line_of_gpus(NVIDIA_SMI, "13.0")
    assert line.startswith("FAIL  GPUs          NVIDIA A100-SXM4-80GB 81920 MiB, NVIDIA A100")
    assert "driver 550.54.15, but torch is built for CUDA 13.0, which needs driver 580" in line
    assert "→ install the NVIDIA driver 580 or newer" in line
    assert "PIP_INDEX_URL=<PyTorch's index cu126 or cu128>" in line
    assert line.endswith("--force-reinstall 'torch<2.14,>=2.11'")
    older = line_of_gpus(NVIDIA_SMI.replace("550.54.15", "470.82.01"), "13.0")
    assert older.endswith("580 or newer, for CUDA 13")


@pytest.mark.parametrize(("cuda", "driver"), [("12.6", "550.54.15"), ("13.0", "580.65.06")])
def test_a_driver_that_runs_torch_is_ok(cuda: str, driver: str, line_of_gpus: LineOfGpus) -> None:
    line = line_of_gpus(NVIDIA_SMI.replace("550.54.15", driver), cuda)
    assert line.endswith(f"driver {driver}, torch for CUDA {cuda}")


def test_gpus_that_torch_cannot_use_are_listed(line_of_gpus: LineOfGpus) -> None:
    line = line_of_gpus("NVIDIA H200, 143771 MiB, 580.65.06\n", None)
    start = "-     GPUs          NVIDIA H200 143771 MiB, driver 580.65.06, but torch"
    assert line.startswith(start)
    assert line.endswith("--force-reinstall 'torch<2.14,>=2.11'")


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({}, "ok    allocator     not set by the environment"),
        ({"MALLOC_ARENA_MAX": ""}, "ok    allocator     not set by the environment"),
        ({"GLIBC_TUNABLES": "x", "MALLOC_A": "1"}, "GLIBC_TUNABLES=x, MALLOC_A=1 is set"),
    ],
)
def test_settings_of_the_allocator_by_the_user_are_listed(
    variables: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUN"))]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert line in str(doctor.check_allocator())


@pytest.mark.ray
def test_the_probe_of_fsdp_takes_a_step_on_two_cpu_ranks(
    ray_session: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "an FSDP step on two ranks (cpu): loss" in probes.fsdp("cpu")
    plan = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["sft", "2"] in [line[-3:-1] for line in plan]


def test_free_memory_respects_the_limit_of_the_container(tmp_path: Path) -> None:
    free = free_memory_gib(tmp_path)
    for limit, expected in (("max", free), (str(3 * 2**30), 2.0)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{2**30}\n")
        assert free_memory_gib(tmp_path) == pytest.approx(expected, abs=0.5)
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {2**29}\n")
    assert free_memory_gib(tmp_path) == pytest.approx(2.5, abs=0.01)


def test_little_shared_memory_fails_with_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor.shutil, "disk_usage", lambda _: doctor.shutil._ntuple_diskusage(1, 1, 2**20)
    )
    lines = [str(finding) for finding in doctor.check_machine()]
    (shared,) = [line for line in lines if "shared memory" in line]
    assert shared.startswith("FAIL")
    assert shared.endswith("mount -o remount,size=4G /dev/shm")


def test_arguments_are_rejected() -> None:
    with pytest.raises(SystemExit, match="^error: doctor takes no arguments"):
        doctor.main(["x"])


@pytest.mark.parametrize(
    ("fix", "optional", "code"), [("", False, 0), ("x", True, 0), ("x", False, 1)]
)
def test_only_required_checks_set_the_exit_code(
    fix: str, optional: bool, code: int, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as ended:
        show([CheckResult("a", "b", fix, optional)])
    assert ended.value.code == code
    assert ("fail" in capsys.readouterr().out) == bool(code)
