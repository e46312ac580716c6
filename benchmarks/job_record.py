"""The row and the JSON of a benchmarked job, for verl-like and for `benchmarks/peers`.

    record = job_record("verl-like", job, steps, command=[...])
    print(*table(record), sep="\n")

The Python of a peer framework imports this file, too. It needs only torch and transformers.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from verl_like.errors import ConfigError
from verl_like.process.machine import memory_gib, usable_cores

WARM_UP = 1
"""Steps left out at the start, which choose kernels and fill caches and memory pools."""
FEWEST_STEPS = WARM_UP + 1
PROMPTS = 1024
"""Number of prompts to which the seconds in a row refer."""
PACKAGES = ("torch", "transformers", "vllm", "ray", "deepspeed", "flash-attn", "accelerate")


@dataclass(frozen=True)
class Job:
    """The settings that are equal in every framework."""

    model: str
    """Folder of the model."""
    device: str
    """cuda or cpu."""
    num_devices: int
    prompts_per_step: int
    samples_per_prompt: int
    prompts_per_update: int
    max_prompt_length: int
    max_response_length: int
    epochs: int
    """Number of passes of the updates over the samples of a step."""
    steps: int


@dataclass(frozen=True)
class JobStep:
    """A step, as the run recorded it."""

    step: int
    seconds: float
    response_tokens: float
    phases: Mapping[str, float]
    """Seconds of the phases that the framework times."""


def job_record(package: str, job: Job, steps: Sequence[JobStep], **details: Any) -> dict[str, Any]:
    """Return the columns, the job and the steps, together with `details`.

    Raise if a step of the run is missing, or if none was measured.
    """
    check_steps(job.steps)
    numbers = [step.step for step in steps]
    if numbers != list(range(1, job.steps + 1)):
        last = f"the last of them step {numbers[-1]}" if numbers else "none at all"
        raise ConfigError(
            f"the run was to take {job.steps} steps and recorded {len(numbers)}, {last}. It "
            "ended early, or its data did, so there is no report."
        )
    measured = steps[WARM_UP:]
    seconds = sum(step.seconds for step in measured)
    if not seconds > 0:
        raise ConfigError(
            f"the {len(measured)} measured steps took {seconds} s by the run's own records: they "
            "have no times, so there is nothing to report."
        )
    machine = machine_facts()
    columns = {
        "framework": f"{package} {_version(package)}".rstrip(),
        "model": model_name(job.model),
        "parameters": num_parameters(job.model),
        "devices": f"{job.num_devices} x {device_name(job.device, machine)}",
        "seconds per 1,024 prompts": seconds * PROMPTS / (len(measured) * job.prompts_per_step),
        "epochs": job.epochs,
        "response tokens/s": sum(step.response_tokens for step in measured) / seconds,
        "hardware id": hashlib.sha256(json.dumps(machine).encode()).hexdigest()[:8],
        "commit": commit_of(package),
    }
    return {
        "columns": columns,
        "job": asdict(job),
        "warm_up_steps": WARM_UP,
        "steps": [asdict(step) for step in steps],
        "hardware": machine,
        "versions": versions(),
        **details,
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that affect speed."""
    versions = {name: _version(name) for name in PACKAGES}
    return {"python": platform.python_version(), **{name: v for name, v in versions.items() if v}}


def check_steps(steps: int) -> None:
    """Raise if no steps would remain to be measured."""
    if steps < FEWEST_STEPS:
        raise ConfigError(
            f"{steps} step{'s' * (steps != 1)}: the first one warms up and is left out, so a "
            f"benchmark takes {FEWEST_STEPS} or more. Choose with --steps (STEPS for a peer)."
        )


def table(record: Mapping[str, Any]) -> list[str]:
    """Return heading, rule and row in Markdown; rows of several runs can share a heading."""
    columns = record["columns"]
    rows = [list(columns), ["---"] * len(columns), [_cell(value) for value in columns.values()]]
    return [f"| {' | '.join(cells)} |" for cells in rows]


def _cell(value: Any) -> str:
    """Return a measured number with four digits."""
    if isinstance(value, float):
        return f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def model_name(folder: str) -> str:
    """Return the last parts of a path that identify it, since every folder is named model."""
    *before, last = Path(folder).parts
    return f"{before[-1]}/{last}" if before and before[-1] != "/" else last


def num_parameters(folder: str) -> int:
    """Count the weights in the model's configuration, tied ones once; no weights are read."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        return int(AutoModelForCausalLM.from_config(config).num_parameters())


def machine_facts() -> dict[str, Any]:
    """Return the facts about this machine, or a cluster's driver, that affect speed."""
    import torch

    num_cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cards = [torch.cuda.get_device_properties(card) for card in range(num_cards)]
    return {
        "processor": _processor(),
        "cores": usable_cores(),
        "memory_gib": round(memory_gib("MemTotal:") or 0),
        "cards": [f"{card.name}, {card.total_memory // 2**30} GiB" for card in cards],
    }


def device_name(device: str, machine: Mapping[str, Any]) -> str:
    """Return the first GPU's name, or the processor's."""
    if device == "cpu":
        return str(machine["processor"])
    if not machine["cards"]:
        raise ConfigError("the job ran on cuda, and this machine has no card: what ran it?")
    return str(machine["cards"][0]).partition(",")[0]


def _processor() -> str:
    """Return Linux's name for the processor."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text(encoding="utf-8").splitlines() if cpus.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def commit_of(package: str) -> str:
    """Return the commit from which the package is imported or installed; - for a release.

    A `+` is added if files differ from the commit.
    """
    try:
        source = json.loads(distribution(package).read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        source = {}
    if installed := source.get("vcs_info", {}).get("commit_id"):
        return str(installed)[:12]
    spec = find_spec(package.replace("-", "_"))
    if spec is None or spec.origin is None:
        return "-"
    file = Path(spec.origin).resolve()
    # a repository that does not belong to this package
    if not _git(file.parent, "ls-files", file.name):
        return "-"
    changed = _git(file.parent, "status", "--porcelain", "--untracked-files=no")
    return _git(file.parent, "rev-parse", "--short=12", "HEAD") + "+" * bool(changed)


def _git(folder: Path, *words: str) -> str:
    """Return git's output in this folder; empty without git or a repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
