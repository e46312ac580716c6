"""What Ray says of a worker that is gone, in our words."""

from __future__ import annotations

import re

_LOW_MEMORY = re.compile(
    r"Memory on the node \(IP: (?P<node>[^,)]+).*? was (?P<used>\S+) used / (?P<size>\S+) limit"
    r".*? exceeded threshold of \S+ \((?P<threshold>[\d.]+%)"
)
_USERS = re.compile(r"Top \d+ memory users: PID MEM\(GB\) COMMAND (.*)")
_USER = re.compile(r"(\d+) (\d+\.\d+) (\S+)")
_WAY_OUT = (
    "Give the role fewer rows at a time, put fewer processes on the node, or raise "
    "RAY_memory_usage_threshold where the node's Ray is started."
)


def cause_of_death(error: Exception) -> str:
    """Why a process ended, as far as Ray knows."""
    text = " ".join(str(error).split())
    if "low on memory" in text:
        return f"Ray killed it because {_shortage(text)}. {_WAY_OUT}"
    if "connection error code" in text:
        return (
            "it broke off without a word: killed by SIGKILL (by hand, or by the kernel when "
            "memory ran out), or crashed in native code, of which its log then has the stack."
        )
    return text.split("The actor died", 1)[-1].strip(" .:") if "The actor died" in text else text


def _shortage(text: str) -> str:
    found = _LOW_MEMORY.search(text)
    if found is None:
        return f"its node ran low on memory ({text[:300]})"
    users = _USER.findall(listed[1] if (listed := _USERS.search(text)) else "")[:3]
    most = ", ".join(f"{size} GB by pid {pid} ({command})" for pid, size, command in users)
    return (
        f"node {found['node']} ran low on memory: {found['used']} of {found['size']} were used, "
        f"and from {found['threshold']} on Ray kills workers"
        + (f"; most of it {most}" if most else "")
    )
