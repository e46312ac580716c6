"""The network interfaces of a machine, and the settings of NCCL and gloo about them.

A setting that names no interface of the machine makes processes fail or hang only when they
connect. These checks report it earlier, by the name of the variable.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

INFINIBAND, IPV6 = Path("/sys/class/infiniband"), Path("/proc/net/if_inet6")
SIOCGIFADDR = 0x8915
"""Linux's request for an interface's IPv4 address."""
DEBUG_LEVELS = ("VERSION", "WARN", "INFO", "ABORT", "TRACE")
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
    states = {}
    for adapter in sorted(folder.iterdir()) if folder.is_dir() else []:
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


def wrong_settings(
    env: Mapping[str, str], networks: Mapping[str, str], hcas: Collection[str]
) -> Iterator[Wrong]:
    """Yield settings that name nothing on this machine, or are invalid."""
    usable = [name for name, address in networks.items() if address and name != LOOPBACK]
    there = ", ".join(usable or networks)
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = env.get(variable)
        if not value:
            continue
        is_exact = variable.startswith("GLOO")  # gloo takes whole names, NCCL prefixes
        chosen = _matching(value, list(networks), is_exact)
        fix = f"export {variable}={usable[0]}" if usable else f"unset {variable}"
        unknown = [name for name, names in chosen.items() if not names]
        if unknown:
            yield (
                f"{variable}={value}: {', '.join(unknown)} is not an interface of this machine, "
                f"which has {there}",
                fix,
            )
        elif not any(networks[name] for names in chosen.values() for name in names):
            yield f"{variable}={value}: no address; interfaces with one: {there}", fix

    value = env.get("NCCL_IB_HCA")
    if value and env.get("NCCL_IB_DISABLE", "0") == "0":
        unknown = [name for name, names in _matching(value, hcas).items() if not names]
        if unknown:
            has = f"which has {', '.join(hcas)}" if hcas else "which has none"
            problem = (
                f"NCCL_IB_HCA={value}: {', '.join(unknown)} is no adapter of this machine, {has}"
            )
            yield problem, f"export NCCL_IB_HCA={next(iter(hcas))}" if hcas else "unset NCCL_IB_HCA"

    value = env.get("NCCL_DEBUG")
    if value and value.upper() not in DEBUG_LEVELS:
        known = ", ".join(DEBUG_LEVELS)
        yield f"NCCL_DEBUG={value} is not a level of {known}", "export NCCL_DEBUG=WARN"


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


def _matching(value: str, names: Collection[str], is_exact: bool = False) -> dict[str, list[str]]:
    """Return each word of a list -> the names that match it; an exclusion list matches the others.

    NCCL's syntax: `eth,ib` are prefixes, `=eth0` is a whole name, `^docker` is excluded; `mlx5_0:1`
    is a port of an adapter.
    """
    leaves_out = not is_exact and value.startswith("^")
    rest = value.removeprefix("^") if leaves_out else value
    is_exact = is_exact or rest.startswith("=")
    words = [word.partition(":")[0].strip() for word in rest.removeprefix("=").split(",")]

    def fits(name: str, word: str) -> bool:
        return name == word if is_exact else name.startswith(word)

    if leaves_out:
        left = [name for name in names if not any(fits(name, word) for word in words if word)]
        return {value: left}
    return {word: [name for name in names if fits(name, word)] for word in words if word}
