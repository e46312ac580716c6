"""Limits of the kernel for processes with untrusted code: system calls, rights, network, writes.

    isolate_network()                            # only its own loopback interface
    restrict_writes(folder)                      # nothing outside this folder
    deny(MACHINE, METADATA, KEEPS_TO_ITSELF)     # irrevocable, for this process and its children

A filter answers a denied call with EPERM, and clone3 with ENOSYS. It exists for Linux on x86_64 and
aarch64. A call that a machine does not have is left out. Nothing here imports torch.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import socket
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

from verl_like.errors import ConfigError
from verl_like.process.machine import IS_LINUX

MACHINE = (
    "acct adjtimex clock_adjtime clock_settime delete_module finit_module init_module ioperm iopl "
    "kexec_file_load kexec_load mknod mknodat reboot setdomainname sethostname settimeofday "
    "swapoff swapon"
).split()
"""Calls that change the machine, or make device files."""
METADATA = (
    "chmod chown fchmod fchmodat fchmodat2 fchown fchownat file_setattr fremovexattr fsetxattr "
    "futimesat lchown lremovexattr lsetxattr removexattr removexattrat setxattr setxattrat utime "
    "utimensat utimes"
).split()
"""Calls that change a file without writing to it, which Landlock does not cover."""
KEEPS_TO_ITSELF = (
    "add_key bpf chroot fcntl fsconfig fsmount fsopen fspick io_uring_enter io_uring_register "
    "io_uring_setup ioctl ioprio_set keyctl memfd_create memfd_secret mount mount_setattr "
    "move_mount msgget name_to_handle_at open_by_handle_at open_tree perf_event_open pidfd_getfd "
    "pivot_root prlimit64 process_vm_readv process_vm_writev ptrace quotactl quotactl_fd "
    "request_key sched_setaffinity sched_setattr sched_setparam sched_setscheduler semget setns "
    "setpriority shmget syslog umount2 unshare userfaultfd"
).split()
"""Calls that reach other processes, or memory that outlives the process or is not counted."""
OTHER_SOCKETS = "io_uring_setup socket socketpair".split()
"""Calls that reach sockets which no network namespace separates, such as Docker's Unix socket."""
SIGNALS = "kill pidfd_send_signal rt_sigqueueinfo rt_tgsigqueueinfo tgkill tkill".split()
PROCESSES = "clone clone3 fork vfork".split()
"""Calls that start processes; threads stay possible."""

_TABLE = """
acct 163 89, add_key 248 217, adjtimex 159 171, bpf 321 280, chmod 90 -, chown 92 -,
chroot 161 51, clock_adjtime 305 266, clock_settime 227 112, clone 56 220, clone3 435 435,
delete_module 176 106, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, fchown 93 55,
fchownat 260 54, fcntl 72 25, file_setattr 469 469, finit_module 313 273, fork 57 -,
fremovexattr 199 16,
fsconfig 431 431, fsetxattr 190 7, fsmount 432 432, fsopen 430 430, fspick 433 433,
futimesat 261 -, init_module 175 105, io_uring_enter 426 426, io_uring_register 427 427,
io_uring_setup 425 425, ioctl 16 29, ioperm 173 -, iopl 172 -, ioprio_set 251 30,
kexec_file_load 320 294, kexec_load 246 104, keyctl 250 219, kill 62 129, lchown 94 -,
lremovexattr 198 15, lsetxattr 189 6, memfd_create 319 279, memfd_secret 447 447, mknod 133 -,
mknodat 259 33, mount 165 40, mount_setattr 442 442, move_mount 429 429, msgget 68 186,
name_to_handle_at 303 264, open_by_handle_at 304 265, open_tree 428 428, perf_event_open 298 241,
pidfd_getfd 438 438, pidfd_send_signal 424 424, pivot_root 155 41, prlimit64 302 261,
process_vm_readv 310 270, process_vm_writev 311 271, ptrace 101 117, quotactl 179 60,
quotactl_fd 443 443, reboot 169 142, removexattr 197 14, removexattrat 466 466,
request_key 249 218, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240,
sched_setaffinity 203 122, sched_setattr 314 274, sched_setparam 142 118,
sched_setscheduler 144 119, semget 64 190, setdomainname 171 162, sethostname 170 161,
setns 308 268, setpriority 141 140, settimeofday 164 170, setxattr 188 5, setxattrat 463 463,
shmget 29 194, socket 41 198, socketpair 53 199, swapoff 168 225, swapon 167 224, syslog 103 116,
tgkill 234 131, tkill 200 130, umount2 166 39, unshare 272 97, userfaultfd 323 282, utime 132 -,
utimensat 280 88, utimes 235 -, vfork 58 -
"""
"""Each call with its numbers on x86_64 and aarch64; a dash means that the machine lacks the
call."""
_AUDIT_NUMBERS = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NUMBERS: dict[str, dict[str, int]] = {machine: {} for machine in _AUDIT_NUMBERS}
for _name, *_columns in map(str.split, _TABLE.split(",")):
    for _machine, _number in zip(_AUDIT_NUMBERS, _columns, strict=True):
        if _number != "-":
            _NUMBERS[_machine][_name] = int(_number)

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _ANSWER = 0x20, 0x15, 0x35, 0x45, 0x06
"""Operations of the filter's language (classic BPF)."""
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x50000
_CLONE_THREAD = 0x10000
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX, _FIOSETOWN, _SIOCSPGRP = 8, 10, 15, 0x8901, 0x8902
_SETFLAGS, _SETVERSION, _FSSETXATTR = 0x40086602, 0x40087602, 0x401C5820
"""Requests of ioctl that change a file's attributes; a descriptor to read it is enough."""
_INET, _INET6, _NETLINK, _DATAGRAM = 2, 10, 16, 2
_ONLY_WITH: dict[str, tuple[int, int, Sequence[int]]] = {
    "fcntl": (1, _EQUAL, (_F_SETOWN, _F_SETSIG, _F_SETOWN_EX)),
    "ioctl": (1, _EQUAL, (_FIOSETOWN, _SIOCSPGRP, _SETFLAGS, _SETVERSION, _FSSETXATTR)),
    "socketpair": (1, _ANY_BIT, (_DATAGRAM,)),  # it could send to, or connect to, another address
}
"""Calls that are denied only with some values: number of the argument, operation, values."""
_EXCEPT_WITH: dict[str, tuple[int, int, Sequence[int]]] = {
    "clone": (0, _ANY_BIT, (_CLONE_THREAD,)),
    "prlimit64": (0, _EQUAL, (0,)),  # its own limits
    "socket": (0, _EQUAL, (_INET, _INET6, _NETLINK)),
}
"""Calls that are allowed with some values: number of the argument, operation, values."""
PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_PR_CAPBSET_DROP, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 24, 47, 4
_CAPABILITY_VERSION, _LAST_CAPABILITY = 0x20080522, 63
_CAP_DAC_READ_SEARCH = 2
Instruction = tuple[int, int, int, int]
"""Operation, value, instructions to skip if true, and if not."""


def deny(*names: Iterable[str], gains_rights: bool = False) -> bool:
    """Make the kernel deny these system calls from now on; return False if it cannot.

    With `gains_rights`, programs such as sudo continue to work; this requires root.
    """
    numbers = _NUMBERS.get(platform.machine()) if IS_LINUX else None
    if numbers is None:
        return False
    denied = sorted({name for group in names for name in group} & numbers.keys())
    instructions = _filter(_AUDIT_NUMBERS[platform.machine()], numbers, denied)
    packed = b"".join(struct.pack("HBBI", code, yes, no, k) for code, k, yes, no in instructions)
    code = ctypes.create_string_buffer(packed, len(packed))
    program = struct.pack("HxxxxxxP", len(instructions), ctypes.addressof(code))
    libc = ctypes.CDLL(None)
    if not gains_rights and libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    result: int = libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0)
    return result == 0


def _filter(audit_number: int, numbers: dict[str, int], denied: list[str]) -> list[Instruction]:
    """Return the filter that denies these calls."""
    deny_it: Instruction = (_ANSWER, _ERROR | errno.EPERM, 0, 0)
    allow_it: Instruction = (_ANSWER, _ALLOW, 0, 0)
    kill_it: Instruction = (_ANSWER, _KILL, 0, 0)
    filters: list[Instruction] = [(_LOAD, 4, 0, 0), (_EQUAL, audit_number, 1, 0), kill_it]
    filters += [(_LOAD, 0, 0, 0), (_AT_LEAST, 0x40000000, 0, 1), kill_it]  # x32's calls
    for name in denied:
        if name in _ONLY_WITH or name in _EXCEPT_WITH:
            argument, operation, values = _ONLY_WITH.get(name) or _EXCEPT_WITH[name]
            answers = [allow_it, deny_it] if name in _ONLY_WITH else [deny_it, allow_it]
            tests = [(operation, v, len(values) - n, 0) for n, v in enumerate(values)]
            checks = [(_LOAD, 16 + 8 * argument, 0, 0), *tests, *answers]
            filters += [(_EQUAL, numbers[name], 0, len(checks)), *checks]
        elif name == "clone3":  # its flags cannot be read here; ENOSYS makes libraries use clone
            no_such_call: Instruction = (_ANSWER, _ERROR | errno.ENOSYS, 0, 0)
            filters += [(_EQUAL, numbers[name], 0, 1), no_such_call]
        elif name == "utimensat":  # a `touch` has no times: it succeeds, but changes nothing
            done: Instruction = (_ANSWER, _ERROR, 0, 0)
            filters += [(_EQUAL, numbers[name], 0, 6), (_LOAD, 32, 0, 0), (_EQUAL, 0, 0, 2)]
            filters += [(_LOAD, 36, 0, 0), (_EQUAL, 0, 1, 0), deny_it, done]
        else:
            filters += [(_EQUAL, numbers[name], 0, 1), deny_it]
    return [*filters, allow_it]


def drop_capabilities() -> None:
    """Give up root's rights, except to read files, for this process and its programs."""
    if not IS_LINUX:
        return
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    for number in range(_LAST_CAPABILITY + 1):
        if number != _CAP_DAC_READ_SEARCH:
            libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)  # fails where there is nothing to drop
    header, data = struct.pack("Ii", _CAPABILITY_VERSION, 0), ctypes.create_string_buffer(24)
    libc.capget(header, data)
    # effective, permitted and inheritable rights, the lower 32 bits first
    rights = struct.unpack("6I", data.raw)[1] & 1 << _CAP_DAC_READ_SEARCH
    libc.capset(header, struct.pack("6I", rights, rights, 0, 0, 0, 0))


_WRITES = sum(1 << bit for bit in (1, *range(4, 13)))
"""Landlock's rights to write, remove and make files; REFER and TRUNCATE came later."""


_DEVICES = 1 << 6 | 1 << 11
"""Landlock's rights to make files of character and block devices."""


_REFER, _TRUNCATE, _SIGNALS_AND_SOCKETS = 1 << 13, 1 << 14, 3


_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446


_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000


_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


def isolate_network(remedy: str = "") -> None:
    """Leave this process no network except its own loopback interface, and no Unix sockets.

    Pairs of sockets (`multiprocessing.Pipe`) remain. Raise if the machine does not allow a network
    namespace; the error ends with `remedy`.
    """
    if not IS_LINUX:
        raise ConfigError(f"a process without network needs Linux.{remedy}")
    deny(OTHER_SOCKETS)
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:  # not permitted: use a user namespace
        if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise ConfigError(
                f"this machine does not allow a network namespace ({reason}). Allow user "
                "namespaces (sysctl user.max_user_namespaces, "
                "kernel.apparmor_restrict_unprivileged_userns=0; in a container its seccomp "
                f"profile).{remedy}"
            )
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14s", b"lo", _IFF_UP, b""))


def restrict_writes(*places: str, extra: Iterable[str] = ()) -> None:
    """Keep this process, and those that it starts, from changing anything outside these places.

    It can write only these files and below these folders. It cannot change modes, owners, times or
    attributes of any file, attach to another process, or allocate memory that outlives it, on
    machines where `deny` works. A `touch` succeeds, but leaves the times of a file that exists. It
    has none of root's rights except to read files. `extra` are further system calls to deny. If the
    kernel has no Landlock, this raises after all other limits are set.
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
    rights = _WRITES
    if version > 1:
        rights |= _REFER
    if version > 2:
        rights |= _TRUNCATE
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
    if not IS_LINUX:
        return -1
    version: int = ctypes.CDLL(None).syscall(_LANDLOCK_CREATE, None, 0, 1)
    return version
