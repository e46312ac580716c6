"""Limits of a process that runs untrusted code: variables, memory, time and files.

    Sandbox(memory_gib=2).confine()      # in that process, before the code
    visible_environment(["API_KEY"])    # the variables that it gets

`verl_like.process.kernel_limits` limits system calls, network and writes.
`verl_like.process.supervisor` watches such a process from outside. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_like.config_key import config_field
from verl_like.errors import ConfigError
from verl_like.process.machine import IS_LINUX

MARK = "VERL_LIKE_SANDBOX"
"""Environment variable of every process in a sandbox."""
VISIBLE = frozenset(
    """
    CONDA_PREFIX CUDA_HOME CUDA_VISIBLE_DEVICES HF_DATASETS_OFFLINE HF_HOME HF_HUB_CACHE
    HF_HUB_OFFLINE HOME LANG LANGUAGE LD_LIBRARY_PATH LOGNAME NLTK_DATA PATH REQUESTS_CA_BUNDLE
    SHELL SSL_CERT_DIR SSL_CERT_FILE TERM TORCH_HOME TRANSFORMERS_OFFLINE TZ USER VIRTUAL_ENV
    XDG_CACHE_HOME
    """.split()
)
"""Variables that a sandbox sees: none of them holds a secret."""
VISIBLE_PREFIXES = ("LC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "TOKENIZERS_")
REMOVE_S = 30.0
"""Maximum seconds for the removal of a deep folder."""
KILL_S = 5.0
"""Seconds to wait for killed processes to end."""
OPEN_FILES = 1024
"""Files that a process in a sandbox may have open."""


@dataclass(frozen=True)
class Sandbox:
    """Limits of processes that run untrusted code."""

    memory_gib: float = config_field(8.0, above=0)
    """GiB of memory, per process and in total."""
    cpu_s: float = config_field(60.0, above=0)
    """CPU seconds per sample, or per call of an environment; a batch gets twelve times as many."""
    file_gib: float = config_field(1.0, at_least=0)
    """GiB per file, and for the working folder."""
    max_processes: int = config_field(64, above=0)
    """Maximum number of processes at a time."""
    network: bool = config_field(True)
    """Allow network access; false needs Linux network namespaces."""
    env: tuple[str, ...] = config_field((), allows="names of variables")
    """Environment variables to pass on, such as API keys."""

    @classmethod
    def from_limits(cls, limits: Mapping[str, Any]) -> Sandbox:
        """Return a sandbox with these limits, as a configuration has them."""
        return cls(**{**limits, "env": tuple(limits.get("env", ()))})

    def confine(self) -> None:
        """Limit this process and those that it starts; only root can raise the limits again.

        Root also loses the system calls that change the machine, which other users may not make.
        """
        _limit(resource.RLIMIT_DATA, self.memory_gib * 2**30)
        _limit(resource.RLIMIT_FSIZE, self.file_gib * 2**30)
        _limit(resource.RLIMIT_NOFILE, OPEN_FILES)
        _limit(resource.RLIMIT_CORE, 0)
        if os.geteuid() == 0:
            from verl_like.process.kernel_limits import MACHINE, deny  # only sandboxes need it

            deny(MACHINE, gains_rights=True)

    def allow_cpu(self, shares: float = 1.0) -> None:
        """Allow this process `shares` times `cpu_s` of processor time from now on."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = used.ru_utime + used.ru_stime + shares * self.cpu_s
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        rounded = math.ceil(seconds)
        soft = rounded if hard == resource.RLIM_INFINITY else min(rounded, hard)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _limit(which: int, value: float) -> None:
    hard = resource.getrlimit(which)[1]
    limit = int(value) if hard == resource.RLIM_INFINITY else min(int(value), hard)
    resource.setrlimit(which, (limit, limit))


def visible_environment(extra: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment variables that a sandbox sees, including the names in `extra`."""
    variables = {MARK: "1"}
    for name, value in os.environ.items():
        if name in VISIBLE or name in extra or name.startswith(VISIBLE_PREFIXES):
            variables[name] = value
    return variables


def check_can_confine_programs() -> None:
    """Raise if this system has no sandbox for programs that a model writes."""
    if not IS_LINUX:
        raise ConfigError(
            "programs that a model writes run only on Linux, in a sandbox that this system "
            f"({sys.platform}) does not have. Train on Linux, or use a reward and an environment "
            "that run no programs."
        )


def reject_nested_run() -> None:
    """Raise if code in a sandbox starts a run: that run would start the code again, forever."""
    if MARK in os.environ:
        raise ConfigError(
            "code in a sandbox tries to start a run, which would execute that code again. Put the "
            "lines that start a run under `if __name__ == '__main__':`, or move the reward "
            "function or environment into a separate file."
        )


def remove_folder(folder: str) -> None:
    """Remove a folder with everything in it that can be removed; never raise."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):  # it may be deeper than Python can recurse
        command = ["rm", "-rf", "--", folder]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(command, stderr=subprocess.DEVNULL, timeout=REMOVE_S, check=False)
