"""The network interfaces of a machine, and the settings of NCCL and gloo about them.

A setting that names no interface of the machine makes processes fail or hang only when they
connect. These checks report it earlier, by the name of the variable.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

INFINIBAND, IPV6 = Path("/sys/class/infiniband"), Path("/proc/net/if_inet6")
SIOCGIFADDR = 0x8915
"""Linux's request for an interface's IPv4 address."""
LOOPBACK = "lo"
Wrong = tuple[str, str]
"""The problem, and the command that fixes it."""


def interfaces() -> dict[str, str]:
    """Return network interface -> its IPv4 address, or else its IPv6 address, or ""."""
    # addresses of global scope by interface, as Linux lists them
    lines = IPV6.read_text(encoding="utf-8").splitlines() if IPV6.is_file() else []
    rows = [line.split() for line in lines]
    wide = {
        name: socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
        for address, _, _, scope, _, name in rows
        if scope == "00"
    }
    return {name: _ipv4_address(name) or wide.get(name, "") for _, name in socket.if_nameindex()}


def _ipv4_address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name.encode()[:15])
        try:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, request)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def adapters(folder: Path = INFINIBAND) -> dict[str, str]:
    """Return InfiniBand adapter -> the state of its first port, such as ACTIVE."""
    if not folder.is_dir():
        return {}
    states = {}
    for adapter in sorted(folder.iterdir()):
        state = adapter / "ports" / "1" / "state"
        text = state.read_text(encoding="utf-8") if state.is_file() else ""
        states[adapter.name] = text.rpartition(":")[2].strip() or "unknown"
    return states


def settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of NCCL and gloo that are set."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith("NCCL_") or name == "GLOO_SOCKET_IFNAME"
    }


def wrong_settings(env: Mapping[str, str], networks: Mapping[str, str]) -> Iterator[Wrong]:
    """Yield settings that name no interface of this machine.

    gloo takes whole names. NCCL takes prefixes (`eth,ib`), whole names after `=` (`=eth0`), and
    after `^` the interfaces that it leaves out, which need not exist.
    """
    usable = [name for name, address in networks.items() if address and name != LOOPBACK]
    there = ", ".join(usable or networks)
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = env.get(variable, "")
        if value.startswith("^"):
            continue
        is_exact = variable.startswith("GLOO") or value.startswith("=")
        words = [word.strip() for word in value.removeprefix("=").split(",")]
        unknown = [
            word
            for word in words
            if not any(name == word if is_exact else name.startswith(word) for name in networks)
        ]
        if value and unknown:
            yield (
                f"{variable}={value}: {', '.join(unknown)} is not an interface of this machine, "
                f"which has {there}",
                f"export {variable}={usable[0]}" if usable else f"unset {variable}",
            )


def name_that_leads_nowhere(env: Mapping[str, str], networks: Mapping[str, str]) -> Wrong | None:
    """Return the problem if gloo would listen on a host name that is loopback or unknown."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = ""
    usable = [interface for interface, at in networks.items() if at and interface != LOOPBACK]
    if env.get("GLOO_SOCKET_IFNAME") or not usable or (address and address[:4] != "127."):
        return None
    return (
        f"this machine's name, {name}, resolves to {address or 'nothing'}: in a run on several "
        "machines, gloo would offer no address that other machines can reach",
        f"export GLOO_SOCKET_IFNAME={usable[0]}",
    )
