"""Limits of a process that runs untrusted code: variables, memory, time, files, network.

    Sandbox(memory_gib=2).confine()      # in that process, before the code
    visible_environment(["API_KEY"])    # the variables that it gets

`verl_like.process.supervisor` watches such a process from outside. Nothing here imports torch.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import os
import resource
import socket
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_like.config_key import config_field
from verl_like.errors import ConfigError
from verl_like.process.system_calls import (
    KEEPS_TO_ITSELF,
    MACHINE,
    METADATA,
    OTHER_SOCKETS,
    PR_SET_NO_NEW_PRIVS,
    deny,
    drop_capabilities,
)

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
OPEN_FILES = 1024
"""Files that a process in a sandbox may have open."""

_WRITES = sum(1 << bit for bit in (1, *range(4, 13)))
"""Landlock's rights to write, remove and make files; REFER and TRUNCATE came later."""
_DEVICES = 1 << 6 | 1 << 11
"""Landlock's rights to make files of character and block devices."""
_REFER, _TRUNCATE, _SIGNALS_AND_SOCKETS = 1 << 13, 1 << 14, 3
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


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
    def of(cls, limits: Mapping[str, Any]) -> Sandbox:
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


def reject_nested_run() -> None:
    """Raise if code in a sandbox starts a run: that run would start the code again, forever."""
    if MARK in os.environ:
        raise ConfigError(
            "code in a sandbox tries to start a run, which would execute that code again. Put the "
            "lines that start a run under `if __name__ == '__main__':`, or move the reward "
            "function or environment into a separate file."
        )


def isolate_network(way_out: str = "") -> None:
    """Leave this process no network except its own loopback interface, and no Unix sockets.

    Pairs of sockets (`multiprocessing.Pipe`) remain. Raise if the machine does not allow a network
    namespace; the error ends with `way_out`.
    """
    deny(OTHER_SOCKETS)
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare"):
        raise ConfigError(f"this machine has no Linux namespaces.{way_out}")
    if libc.unshare(_CLONE_NEWNET) != 0:  # not permitted: use a user namespace
        if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise ConfigError(
                f"this machine does not allow a network namespace ({reason}). Allow user "
                "namespaces (sysctl user.max_user_namespaces, "
                "kernel.apparmor_restrict_unprivileged_userns=0; in a container its seccomp "
                f"profile).{way_out}"
            )
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14s", b"lo", _IFF_UP, b""))


def restrict_writes(*places: str, extra: Iterable[str] = ()) -> None:
    """Keep this process, and those that it starts, from changing anything outside these places.

    It can write only these files and below these folders. It cannot change modes or owners of
    files, set their times, attach to another process, or allocate memory that outlives it, on
    machines where `deny` works. It has none of root's rights except to read files. `extra` are
    further system calls to deny. If the kernel has no Landlock, this raises after all other limits
    are set.
    """
    drop_capabilities()
    deny(MACHINE, METADATA, KEEPS_TO_ITSELF, extra)
    _restrict_with_landlock(*places)


def _restrict_with_landlock(*places: str) -> None:
    """Let this process, and those that it starts, write only below these folders and files.

    Linux 6.12 and later also keep them from sending signals to other processes.
    """
    libc, version = ctypes.CDLL(None, use_errno=True), _landlock_version()
    if version < 1:
        raise ConfigError(
            "cannot restrict file writes on this machine: Linux 5.13+ with Landlock enabled is "
            "required ('landlock' must be listed in /sys/kernel/security/lsm)."
        )
    rights = _WRITES | (_REFER if version > 1 else 0) | (_TRUNCATE if version > 2 else 0)
    handled = struct.pack("QQQ", rights, 0, _SIGNALS_AND_SOCKETS if version > 5 else 0)
    size = 24 if version > 5 else 8
    rules = libc.syscall(_LANDLOCK_CREATE, handled, size, 0)
    for place in places:
        descriptor = os.open(place, os.O_PATH | os.O_CLOEXEC)
        is_folder = os.path.isdir(place)
        allowed = rights & ~_DEVICES if is_folder else rights & (1 << 1 | _TRUNCATE)
        rule = struct.pack("=Qi", allowed, descriptor)
        libc.syscall(_LANDLOCK_ADD, rules, 1, rule, 0)
        os.close(descriptor)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.syscall(_LANDLOCK_RESTRICT, rules, 0) != 0:
        raise ConfigError(
            f"cannot restrict file writes to {places[0]} ({os.strerror(ctypes.get_errno())})."
        )
    os.close(rules)


def can_restrict_writes() -> bool:
    """Return whether this machine can keep a process from writing outside a folder."""
    return _landlock_version() >= 1


def _landlock_version() -> int:
    """Return the version of Landlock, or less than 1 if the kernel has none."""
    if sys.platform != "linux":
        return -1
    version: int = ctypes.CDLL(None).syscall(_LANDLOCK_CREATE, None, 0, 1)
    return version
