"""Two hosts on one machine: network namespaces with separate loopbacks, joined by a cable.

    with two_hosts() as hosts:
        subprocess.run(["ip", "netns", "exec", hosts[0], ...])

A process in one namespace can reach the other only by its address, and nothing else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

CABLE = "eth0"
"""The interface of either host."""
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def ip(*words: str) -> str:
    """Run an `ip` command; return its error text."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    return done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else ""


def why_no_hosts() -> str:
    """Return why this machine allows no network namespaces; "" if it allows them."""
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    name = f"vl-try-{os.getpid()}"
    reason = ip("netns", "add", name)
    if not reason:
        reason = ip("-n", name, "link", "add", CABLE, "type", "veth", "peer", "name", "other")
        ip("netns", "delete", name)
    return reason


@contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Context with the names of the two hosts; `ADDRESSES` has their addresses."""
    first, second = (f"vl-{os.getpid()}-{number}" for number in (1, 2))
    peer = ("type", "veth", "peer", "name", CABLE, "netns", second)
    steps = [("netns", "add", first), ("netns", "add", second)]
    steps += [("link", "add", CABLE, "netns", first, *peer)]
    for host, address in zip((first, second), ADDRESSES, strict=True):
        steps += [
            ("-n", host, "address", "add", f"{address}/24", "dev", CABLE),
            ("-n", host, "link", "set", "lo", "up"),
            ("-n", host, "link", "set", CABLE, "up"),
            # with a default route, a host reports this address as its own
            ("-n", host, "route", "add", "default", "dev", CABLE),
        ]
    try:
        for step in steps:
            reason = ip(*step)
            assert not reason, f"ip {' '.join(step)}: {reason}"
        yield first, second
    finally:
        for host in (first, second):
            ip("netns", "delete", host)
