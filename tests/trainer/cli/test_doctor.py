"""`verl-like doctor` finds what is missing and ends each failing line with what mends it."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import VERL_LIKE
from trainer.cli import doctor, probes
from trainer.cli.doctor import Finding, show
from verl_like.process.machine import free_memory_gb


@pytest.mark.ray
def test_everything_works_here() -> None:
    done = subprocess.run(
        [VERL_LIKE, "doctor"], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "then generated token" in line]
    assert [line.split()[:3] for line in lines] == [
        ["ok", "local", "works"],
        ["ok", "ray", "works"],
    ]


def test_a_probe_generates() -> None:
    assert "then generated token" in probes.local()


def test_a_missing_package_ends_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def without(name: str) -> str:
        if name in ("ray", "vllm"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "99.0" if name == "transformers" else version(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", without)
    lines = {finding.subject: str(finding) for finding in doctor.check_packages()}
    assert lines["ray"].startswith("FAIL")
    assert lines["ray"].endswith("-m pip install 'ray>=2.50'")
    assert lines["vllm"].startswith("-   ")
    assert lines["transformers"].startswith("FAIL  transformers  99.0, not in the range")


def test_a_probe_that_fails_shows_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = subprocess.CompletedProcess([], 1, "", "Traceback\nImportError: libfoo.so is gone\n")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: broken)
    line = str(doctor.check_works("ray", "pip install ray"))
    assert line == "FAIL  ray works     ImportError: libfoo.so is gone → pip install ray"


def test_an_optional_package_that_is_there_must_work(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version
    monkeypatch.setattr(
        doctor.importlib.metadata, "version", lambda n: "2.8.3" if n == "flash-attn" else version(n)
    )
    monkeypatch.setattr(
        doctor, "check_works", lambda probe, mend: Finding(f"{probe} works", "no", mend)
    )
    lines = {finding.subject: str(finding) for finding in doctor.findings()}
    said = lines["flash_attention works"]
    assert "-m pip install --force-reinstall --no-build-isolation 'flash-attn" in said
    assert {
        "torch works",
        "ray works",
        "local works",
        "CPUs",
        "cards",
        "memory",
        "shared memory",
    } <= set(lines)


def test_cards_that_torch_cannot_use_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_cards", lambda: ["NVIDIA H200 143771 MiB"])
    monkeypatch.setattr(doctor, "_version", lambda package: "2.13.0+cpu")
    (line,) = [str(finding) for finding in doctor.check_machine() if finding.subject == "cards"]
    assert line.startswith(
        "-     cards         NVIDIA H200 143771 MiB, but torch is built for the CPU alone → "
    )


def test_memory_is_what_the_container_leaves(tmp_path: Path) -> None:
    free = free_memory_gb(tmp_path)
    for limit, expected in (("max", free), (str(3 * 2**30), 2.0)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{2**30}\n")
        assert free_memory_gb(tmp_path) == pytest.approx(expected, abs=0.5)
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {2**29}\n")
    assert free_memory_gb(tmp_path) == pytest.approx(2.5, abs=0.01)


def test_little_room_fails_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor.shutil, "disk_usage", lambda _: doctor.shutil._ntuple_diskusage(1, 1, 2**20)
    )
    lines = [str(finding) for finding in doctor.check_machine()]
    (shared,) = [line for line in lines if "shared memory" in line]
    assert shared.startswith("FAIL")
    assert shared.endswith("mount -o remount,size=4G /dev/shm")


@pytest.mark.parametrize(
    ("mend", "optional", "code"), [("", False, 0), ("x", True, 0), ("x", False, 1)]
)
def test_the_exit_code_counts_what_is_needed(
    mend: str, optional: bool, code: int, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as ended:
        show([Finding("a", "b", mend, optional)])
    assert ended.value.code == code
    assert ("fail" in capsys.readouterr().out) == bool(code)


FINDS_MUCH = """
from trainer.cli.doctor import Finding, show
show(Finding("a", "b") for _ in range(100_000))
"""


def test_it_ends_without_a_word_once_nobody_reads() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FINDS_MUCH], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as found:
        found.stdout.readline()
        found.stdout.close()
        assert found.stderr.read() == b""
    assert found.returncode == 141
