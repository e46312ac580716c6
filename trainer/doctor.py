"""`verl-like doctor`: what a run needs, whether it is there, in range and really works. `trainer.cli` calls `main`.

A line that says FAIL ends with the command that mends it.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

TESTED_PYTHON = ((3, 11), (3, 12))
OPTIONAL = {
    "vllm": "only actor_rollout_ref.rollout.name=vllm needs it",
    "flash-attn": "only attn_implementation=flash_attention_2 needs it",
    "peft": "only lora_rank > 0 needs it",
}
LEAST_MEMORY_GB, LEAST_DISK_GB, LEAST_SHARED_GB = 3.0, 2.0, 0.5
PIP = f"{sys.executable} -m pip install"
GB = 2.0**30


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, how it is, and for a failure the command that mends it."""

    subject: str
    detail: str
    mend: str = ""
    is_optional: bool = False

    def __str__(self) -> str:
        mark = "ok  " if not self.mend else "-   " if self.is_optional else "FAIL"
        return f"{mark}  {self.subject:<14}{self.detail}" + (f" → {self.mend}" if self.mend else "")


def findings() -> Iterator[Finding]:
    """Every check, the quick ones first."""
    with ThreadPoolExecutor(2) as pool:
        slow = [pool.submit(check) for check in (check_torch, check_ray, check_rollout)]
        yield check_python()
        yield from check_packages()
        yield from check_machine()
        for future in slow:
            yield future.result()


def check_python() -> Finding:
    """The interpreter."""
    version = sys.version_info[:2]
    if version < TESTED_PYTHON[0]:
        return Finding("Python", f"{sys.version.split()[0]}, too old", "PYTHON=python3.11 bash tests/run.sh")
    tested = "" if version in TESTED_PYTHON else " (newer than the tested 3.11 and 3.12)"
    return Finding("Python", f"{sys.version.split()[0]}{tested}, {sys.executable}")


def check_packages() -> Iterator[Finding]:
    """Every package that the project names: installed, and in the range that it names."""
    from packaging.requirements import Requirement

    required: dict[str, Requirement] = {}
    for line in importlib.metadata.requires("verl-like") or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.name in OPTIONAL:
            required.setdefault(requirement.name, requirement)
    for name, requirement in required.items():
        need = OPTIONAL.get(name, "")
        mend = f"{PIP} '{name}{requirement.specifier}'"
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, f"not installed{'; ' + need if need else ''}", mend, is_optional=bool(need))
            continue
        wanted = f"in the range {requirement.specifier}" if str(requirement.specifier) else "any version"
        fits = requirement.specifier.contains(version.partition("+")[0], prereleases=True)
        yield Finding(name, f"{version}, {wanted}") if fits else Finding(name, f"{version}, not {wanted}", mend)


def check_machine() -> Iterator[Finding]:
    """CPUs, memory, shared memory, disk."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("CPUs", f"{cpus}; roles on different pools overlap from 2 on")
    memory = _free_memory_gb()
    if memory is not None:
        few = "trainer.backend=local actor_rollout_ref.model.path=<a smaller model>" if memory < LEAST_MEMORY_GB else ""
        yield Finding("memory", f"{memory:.1f} GB free of {_total_memory_gb():.1f} GB", few)
    for subject, path, least, mend in (
        ("shared memory", Path("/dev/shm"), LEAST_SHARED_GB, "mount -o remount,size=4G /dev/shm"),
        ("disk", Path.cwd(), LEAST_DISK_GB, "trainer.default_local_dir=<a folder on another disk>"),
    ):
        if path.is_dir():
            free = shutil.disk_usage(path).free / GB
            yield Finding(subject, f"{free:.1f} GB free at {path}", "" if free >= least else mend)


def _free_memory_gb() -> float | None:
    return _memory_gb("MemAvailable:")


def _total_memory_gb() -> float | None:
    return _memory_gb("MemTotal:")


def _memory_gb(field: str) -> float | None:
    table = Path("/proc/meminfo")
    if not table.is_file():
        return None
    lines = (line.split() for line in table.read_text(encoding="ascii").splitlines())
    return next((int(words[1]) / 2**20 for words in lines if words[0] == field), None)


def check_torch() -> Finding:
    """Collective communication."""
    return _probe("torch", f"{PIP} --force-reinstall torch")


def check_ray() -> Finding:
    """A Ray cluster of this machine's own."""
    return _probe("ray", f"{PIP} --force-reinstall ray  (or run with trainer.backend=local)")


def check_rollout() -> Finding:
    """Actor, sync and rollout."""
    return _probe("rollout", "bash tests/run.sh tests/workers")


def _probe(name: str, mend: str) -> Finding:
    command = [sys.executable, "-P", "-m", "trainer.doctor_probes", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return Finding(f"{name} works", "no answer within 60 s", mend)
    if done.returncode == 0:
        return Finding(f"{name} works", done.stdout.strip().splitlines()[-1])
    said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
    return Finding(f"{name} works", said, mend)


def main(check: Callable[[], Iterator[Finding]] = findings) -> None:
    """Print every finding as it comes; exit code 1 if a needed thing fails."""
    failed = 0
    for finding in check():
        print(finding, flush=True)
        failed += bool(finding.mend) and not finding.is_optional
    print(f"{failed} of these fail; each line ends with what mends it" if failed else "all that a run needs works")
    sys.exit(bool(failed))
