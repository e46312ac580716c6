"""The TCP ports that processes of this machine listen on, read from /proc."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path

LISTENS = "0A"
ALL_INTERFACES = ("0.0.0.0", "::")


def listeners(pids: Iterable[int]) -> set[tuple[str, int, int]]:
    """Return (address, port, pid) of every TCP socket that these processes listen on."""
    owners = {inode: pid for pid in pids for inode in _socket_inodes(pid)}
    listening = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and fields[9] in owners:
                address, port = fields[1].split(":")
                listening.add((_address(address), int(port, 16), owners[fields[9]]))
    return listening


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if target.startswith("socket:["):
                    inodes.add(target[len("socket:[") : -1])
    return inodes


def _address(text: str) -> str:
    """Parse an address of /proc: four-byte words, each in the machine's byte order."""
    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
