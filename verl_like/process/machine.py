"""This machine's cores, memory, processes and loopback interface.

Only the modules of this folder know what Linux has and other systems lack.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit

CONTAINER = Path("/sys/fs/cgroup")
"""The folder of this process's control group in a container."""
ON_THIS_MACHINE = ("127.0.0.1", "localhost", "::1")
"""Names of the loopback interface, which other machines cannot reach."""
IS_LINUX = sys.platform == "linux"
MAX_OPEN_FILES = 10_240
"""Files that a process of macOS may open if their number is not limited."""


def usable_cores(container: Path = CONTAINER) -> int:
    """Return the number of CPU cores that this process may use.

    The quota of the control group at `container` counts in whole cores, and as at least one.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with contextlib.suppress(OSError, ValueError):  # no quota
        quota, period = map(int, (container / "cpu.max").read_text(encoding="ascii").split())
        return max(1, min(cores or 1, quota // period))
    return cores or 1


def address_toward(host: str) -> str:
    """Return the address at which that host reaches this machine.

    A host without a route, such as "", gets the address of this machine's name.
    """
    with contextlib.suppress(OSError):  # no name of that kind, or no route
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # nothing is sent: the system only chooses the route
            return str(probe.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())


def http_url(host: str, port: int) -> str:
    """Return the URL of a server; an IPv6 address gets brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def foreign_header(host: str | None, origin: str | None) -> str:
    """Say which of these headers of a request is not of this machine; return "" if none is.

    A page of another site can make a browser send requests to this machine; its name may even
    resolve to 127.0.0.1 (DNS rebinding).
    """
    for name, prefix, value in (("Host", "//", host), ("Origin", "", origin)):
        if value is not None and not _is_local(prefix + value):
            return f"the header {name}: {value:.80} is not an address of this machine"
    return ""


def _is_local(url: str) -> bool:
    try:
        return urlsplit(url).hostname in ON_THIS_MACHINE
    except ValueError:
        return False


def loopback_interface() -> str:
    """Return the name of the loopback interface: lo, or lo0 on macOS."""
    names = [name for _, name in socket.if_nameindex()]
    return "lo0" if "lo0" in names and "lo" not in names else "lo"


def allow_many_open_files() -> None:
    """Raise this process's limit of open files as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def is_running(pid: int) -> bool:
    """Return whether there is a process of this number, whoever started it."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def process_state(pid: int) -> str | None:
    """Return Linux's letter for a process: R if it runs, T if it is stopped, Z for a zombie.

    Return None if there is no such process, or no /proc.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[0]  # after the program's name, which may be any text


def limit_new_memory(num_bytes: int) -> None:
    """Let this process of Linux map at most this many more bytes."""
    now = int(proc_fields("/proc/self/statm")[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + num_bytes, now + num_bytes))


def resident_bytes(pid: int) -> int | None:
    """Return the resident memory of a process; None if it is gone, or without /proc."""
    words = proc_fields(f"/proc/{pid}/statm")
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE") if words else None


def proc_fields(path: str) -> list[bytes]:
    """Return the words of a file in /proc, or an empty list if its process is gone.

    It is read without a file object, because a watch over processes reads many files.
    """
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return []
    content = b""
    try:
        while chunk := os.read(file, 65536):
            content += chunk
    except OSError:  # its process has gone meanwhile
        return []
    finally:
        os.close(file)
    return content.split()


def memory_gib(field: str) -> float | None:
    """Return an entry of /proc/meminfo ("MemTotal:", "MemAvailable:") in GiB, or None."""
    kilobytes = _number_in(Path("/proc/meminfo"), field)
    return None if kilobytes is None else kilobytes / 2**20


def free_memory_gib(container: Path = CONTAINER) -> float | None:
    """Return the free GiB of the machine, or of the control group at `container` if less.

    The group's inactive file cache counts as free. Return None without /proc/meminfo.
    """
    free = memory_gib("MemAvailable:")
    limits = [container / "memory.max", container / "memory.current"]
    if free is None or not all(path.is_file() for path in limits):
        return free
    most, taken = (path.read_text(encoding="ascii").strip() for path in limits)
    if most == "max":
        return free
    cached = _number_in(container / "memory.stat", "inactive_file") or 0
    return min(free, (int(most) - int(taken) + cached) / 2**30)


def _number_in(table: Path, name: str) -> int | None:
    """Return the number in the line with this name; None if the file or the line is missing."""
    if not table.is_file():
        return None
    lines = (line.split() for line in table.read_text(encoding="ascii").splitlines())
    return next((int(words[1]) for words in lines if words[0] == name), None)
