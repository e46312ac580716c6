"""Take Linux away from every Python process that has this folder on PYTHONPATH (`run_portable.sh`).

What this simulates of macOS:

- `sys.platform` is "darwin" for code of this repository and of its users.
- The files in /proc, /sys and /dev/shm do not exist.
- Functions and constants that Python has only on Linux are gone, such as `os.sched_getaffinity`,
  `os.memfd_create`, `os.pidfd_open`, `select.epoll` and `mmap.MADV_HUGEPAGE`.
- The C library has no `prctl`, `syscall`, `unshare` and `mallopt`, so neither seccomp nor Landlock.
- Unix sockets cannot have abstract names, and their paths have at most 103 bytes.
- `multiprocessing` starts processes with "spawn".
- The folder for temporary files is behind a link, and has a long name.
- The largest number of open files is unlimited, but may not be set to that.

What stays Linux's: installed packages, which see Linux as it is, because their wheels are for it;
`sys.platform` for the standard library; files whose names differ only in case; the interface `lo`;
and external programs such as `ps` and bash.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import multiprocessing.context
import multiprocessing.heap
import multiprocessing.util
import os
import resource
import select
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

HIDDEN = ("/proc", "/sys", "/dev/shm")
LIBRARY = os.path.dirname(os.__file__)
"""The folder of the standard library."""
PACKAGES = "/site-packages/"
MISSING: dict[ModuleType, str] = {
    os: """
        copy_file_range eventfd eventfd_read eventfd_write fdatasync getrandom getresgid getresuid
        getxattr listxattr memfd_create pidfd_open pipe2 posix_fadvise posix_fallocate removexattr
        sched_getaffinity sched_getparam sched_getscheduler sched_rr_get_interval sched_setaffinity
        sched_setparam sched_setscheduler setns setresgid setresuid setxattr splice unshare waitid
        O_DIRECT O_LARGEFILE O_NOATIME O_PATH O_RSYNC O_TMPFILE P_PIDFD
    """,
    fcntl: "F_ADD_SEALS F_GETPIPE_SZ F_GET_SEALS F_NOTIFY F_SETPIPE_SZ",
    mmap: """
        MADV_DODUMP MADV_DOFORK MADV_DONTDUMP MADV_DONTFORK MADV_HUGEPAGE MADV_HWPOISON
        MADV_MERGEABLE MADV_NOHUGEPAGE MADV_REMOVE MADV_SOFT_OFFLINE MADV_UNMERGEABLE MAP_POPULATE
        MAP_DENYWRITE MAP_EXECUTABLE
    """,
    resource: "RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_RTPRIO RLIMIT_SIGPENDING prlimit",
    select: "EPOLLIN POLLRDHUP epoll",
    signal: "SIGPOLL SIGPWR SIGRTMAX SIGRTMIN SIGSTKFLT pidfd_send_signal sigtimedwait sigwaitinfo",
    socket: """
        AF_ALG AF_CAN AF_NETLINK AF_PACKET AF_VSOCK MSG_CMSG_CLOEXEC MSG_CONFIRM MSG_ERRQUEUE
        MSG_MORE SO_BINDTODEVICE SO_DOMAIN SO_MARK SO_PASSCRED SO_PEERCRED SO_PRIORITY SO_PROTOCOL
        SOCK_CLOEXEC SOCK_NONBLOCK TCP_CORK TCP_DEFER_ACCEPT TCP_KEEPIDLE TCP_QUICKACK
        TCP_USER_TIMEOUT
    """,
    time: "CLOCK_BOOTTIME CLOCK_TAI pthread_getcpuclockid",
}
"""Module -> names that it lacks on macOS."""
MISSING_IN_LIBC = {"capget", "capset", "mallopt", "malloc_trim", "prctl", "syscall", "unshare"}
LONGEST_SOCKET = 103
"""Longest path of a Unix socket on macOS, in bytes."""


class _System(ModuleType):
    """The class of the module `sys`."""

    @property
    def platform(self) -> str:
        file = sys._getframe(1).f_code.co_filename
        is_other = PACKAGES in file or file.startswith((LIBRARY, "<"))
        return "linux" if is_other else "darwin"

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        return __import__, ("sys",)


def is_package() -> bool:
    """Return whether the nearest caller outside this file and the library is a package's."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if PACKAGES in file:
            return True
        if file != __file__ and not file.startswith((LIBRARY, "<frozen")):
            return False
        frame = frame.f_back
    return False


def hide(path: Any) -> None:
    """Raise if the path is in a hidden folder."""
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
    if isinstance(path, str) and path.startswith(HIDDEN) and not is_package():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def hiding(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a check of its first argument."""

    def checked(path: Any, *args: Any, **kwargs: Any) -> Any:
        hide(path)
        return function(path, *args, **kwargs)

    return checked


def access(path: Any, mode: int, **kwargs: Any) -> bool:
    """Replace `os.access`."""
    try:
        hide(path)
    except FileNotFoundError:
        return False
    return _access(path, mode, **kwargs)


def check_event(event: str, args: tuple[Any, ...]) -> None:
    """Raise in calls that Python reports to its audit hooks."""
    if event in ("open", "os.listdir", "os.scandir", "os.chdir"):
        hide(args[0])
    elif event in ("socket.bind", "socket.connect"):
        address = args[1]
        if isinstance(address, str | bytes):
            name = os.fsencode(address)
            if name.startswith(b"\0"):
                raise OSError(errno.ENOENT, "no abstract names of sockets on this system")
            if len(name) > LONGEST_SOCKET:
                raise OSError("AF_UNIX path too long")


def find_in_library(self: Any, name: str) -> Any:
    """Find a function in a library; replaces `ctypes.CDLL.__getattr__`."""
    if self._name is None and name in MISSING_IN_LIBC:
        raise AttributeError(f"dlsym(RTLD_DEFAULT, {name}): symbol not found")
    return _find_in_library(self, name)


def set_limit(which: int, limits: tuple[int, int]) -> None:
    """Set a limit; replaces `resource.setrlimit`."""
    if which == resource.RLIMIT_NOFILE and limits[0] == resource.RLIM_INFINITY:
        raise ValueError("current limit exceeds maximum limit")
    _set_limit(which, limits)


def get_limit(which: int) -> tuple[int, int]:
    """Return a limit; replaces `resource.getrlimit`."""
    soft, hard = _get_limit(which)
    return soft, resource.RLIM_INFINITY if which == resource.RLIMIT_NOFILE else hard


def ioctl(descriptor: Any, request: int, *args: Any) -> Any:
    """Replace `fcntl.ioctl`: Linux's requests to network interfaces are unknown."""
    if request >> 8 == 0x89:
        raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))
    return _ioctl(descriptor, request, *args)


def remove(module: ModuleType, names: list[str]) -> None:
    """Remove names from a module, except for packages."""
    removed = {name: vars(module).pop(name) for name in names if name in vars(module)}

    def find(name: str) -> Any:
        if name in removed and PACKAGES in sys._getframe(1).f_code.co_filename:
            return removed[name]
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    module.__getattr__ = find  # type: ignore[method-assign]


for _module, _names in MISSING.items():
    remove(_module, _names.split())
for _name in ("stat", "lstat", "readlink", "statvfs"):
    setattr(os, _name, hiding(getattr(os, _name)))
_access, os.access = os.access, access
sys.addaudithook(check_event)
_find_in_library, ctypes.CDLL.__getattr__ = ctypes.CDLL.__getattr__, find_in_library
_set_limit, resource.setrlimit = resource.setrlimit, set_limit
_get_limit, resource.getrlimit = resource.getrlimit, get_limit
_ioctl, fcntl.ioctl = fcntl.ioctl, ioctl
selectors.DefaultSelector = selectors.PollSelector  # a Mac has kqueue
shutil._copyxattr = lambda *_, **__: None
tempfile._O_TMPFILE_WORKS = False
multiprocessing.util.abstract_sockets_supported = False
multiprocessing.heap.Arena._dir_candidates = []
multiprocessing.context._default_context._default_context = (
    multiprocessing.context._concrete_contexts["spawn"]
)
sys.__class__ = _System
