"""A Ray cluster: join or start it, list its nodes, and leave it in bounded time.

A cluster that is started here belongs to one user. Ray makes its session folder readable to
everyone, so the session folder is inside a folder that only the user can enter, which is removed
when the process ends. Ray's token is in a file that only the user can read. The metrics ports,
which no token protects, stay closed unless the dashboard is on.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray._private import ray_constants
from ray._private.internal_api import node_stats
from ray.exceptions import RayError
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_like.calls.deadlines import Deadlines, in_daemon
from verl_like.errors import PlacementError, WaitTimeoutError, WorkerError, join_few
from verl_like.placement.plan import ROUNDING
from verl_like.placement.pools import NodeSpec
from verl_like.process.info import ONE_THREAD, environment
from verl_like.process.machine import is_running

logger = logging.getLogger(__name__)
T = TypeVar("T")
RELEASE_S = 5.0
"""Seconds to wait for Ray to end workers and release their places; it may never answer."""
SHUTDOWN_S = 10.0
"""Seconds to wait for Ray's shutdown; after that its daemons are killed."""
DAEMONS = ("gcs_server", "raylet")
"""The processes that a head and a node cannot run without."""
TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
LONGEST_PATH = 22
"""Maximum length of the path above a session folder: a Unix socket's path has at most 107
characters, and Ray takes 85 of them."""
OUTLIVES_A_HEAD = {"RAY_gcs_rpc_server_reconnect_timeout_s": str(10**9)}
"""Setting without which Ray ends this process a minute after the cluster's head is gone.

This happens even if the process has joined another cluster by then.
"""
WITHOUT_METRICS = {
    "RAY_enable_metrics_collection": "0",
    # every process would send its calls each second, for the dashboard's page of tasks
    "RAY_task_events_report_interval_ms": "0",
    # Ray has no switch for these two, and only logs that it cannot open such a port
    "AUTOSCALER_METRIC_PORT": "-1",
    "DASHBOARD_METRIC_PORT": "-1",
}
NOTICES = {
    "worker": "SIGTERM handler is not set",
    "authentication.authentication_token_setup": "Token authentication is enabled",
}
"""Module of Ray -> the beginning of a message that no user of a run can act on."""
ATTEMPT_EVERY_S = 1.0
"""Minimum seconds between two attempts to reach an address."""
NUM_TRIES = 3
"""An address counts as gone after this many failed attempts in a row."""
_connecting = threading.Lock()


def connect(
    address: str | None = None,
    namespace: str | None = None,
    runtime_env: dict[str, Any] | None = None,
    deadlines: Deadlines | None = None,
    **options: Any,
) -> None:
    """Join a Ray cluster (`address`, or RAY_ADDRESS), or start one here.

    Do nothing if the process is connected, and wait if another thread is connecting it. Workers get
    the variables of `ONE_THREAD`, unless `runtime_env` sets them, or, for a cluster that is started
    here, this process's environment.
    """
    with _connecting:
        if ray.is_initialized():
            return
        env = dict(runtime_env or {})
        variables = dict(OUTLIVES_A_HEAD)
        address = address or os.environ.get("RAY_ADDRESS")
        if address is not None:
            env["env_vars"] = {**ONE_THREAD, **env.get("env_vars", {})}
        else:
            with_dashboard = bool(options.setdefault("include_dashboard", False))
            defaults = ONE_THREAD | ({} if with_dashboard else WITHOUT_METRICS)
            variables |= {name: v for name, v in defaults.items() if name not in os.environ}
            _guard_token()
            options = {"_temp_dir": str(_session_folder()), **options}
        options |= {"address": address or "local", "namespace": namespace}
        options |= {"runtime_env": env or None, "log_to_driver": True, "configure_logging": False}
        with environment(variables):
            _init(options, address, (deadlines or Deadlines()).connect_s)
        atexit.unregister(_leave_at_exit)
        # ahead of Ray's own exit handler, and of the folder's removal
        atexit.register(_leave_at_exit, os.getpid())


def _is_other(notice: str, record: logging.LogRecord) -> bool:
    return notice not in str(record.msg)


def _init(options: dict[str, Any], address: str | None, limit_s: float) -> None:
    """Call `ray.init` with a deadline.

    The call runs in its own thread, because nothing can end it if the cluster's head is silent. The
    thread stays, because the cluster's processes end with the thread that started them.
    """
    done: Future[None] = Future()

    def init() -> None:
        try:
            ray.init(**options)
        except BaseException as error:  # noqa: BLE001 - Ray raises all kinds, raised below
            done.set_exception(error)
            return
        done.set_result(None)
        threading.Event().wait()

    # instead of a handler of SIGTERM in C++ that aborts this process after 3 s
    ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))
    for module, notice in NOTICES.items():
        logging.getLogger(f"ray._private.{module}").addFilter(partial(_is_other, notice))
    threading.Thread(target=init, name="ray.init", daemon=True).start()
    try:
        if not wait_futures([done], limit_s).done:
            subject = "a new Ray cluster on this machine"
            look = "To see why, start it with `ray start --head`, and set ray.address=auto"
            if address:
                subject = f"the Ray cluster at {address}"
                look = "Check the address and, with `ray status`, the head"
            raise WaitTimeoutError(
                f"the driver waited {limit_s:g} s (timeouts.connect_s) for {subject}, and its "
                f"head did not answer. {look}; if the head is only slow, raise "
                "timeouts.connect_s. Start this program again to retry."
            )
    except BaseException:
        atexit.unregister(ray.shutdown)  # this call waits for a lock that the thread may hold
        raise
    error = done.exception()
    if error is not None:
        raise WorkerError(_describe_failed_start(error, address, options)) from None


def _describe_failed_start(
    error: BaseException, address: str | None, options: Mapping[str, Any]
) -> str:
    """Return what to do about an error of `ray.init`."""
    reason = " ".join(str(error).split()).rstrip(".")
    reason = f"{type(error).__name__}: {reason:.300}"
    if address is not None:
        return (
            f"Ray cannot join the cluster at {address} ({reason}). Set ray.address, or "
            "RAY_ADDRESS, to the HOST:PORT that `ray start --head` printed, or unset both to "
            "start a new cluster on this machine."
        )
    places = [place for place in (options["_temp_dir"], "/dev/shm") if os.path.isdir(place)]
    space = [f"{place} has {shutil.disk_usage(place).free / 2**30:.1f} GiB" for place in places]
    return (
        f"Ray cannot start on this machine ({reason}). Run `ray start --head`, whose logs say why, "
        f"free space if it lacks ({', '.join(space)}), or set trainer.backend=local, which needs "
        "no Ray."
    )


def _guard_token() -> None:
    """Create the file with Ray's token if there is none: Ray would let everyone read it."""
    if any(name in os.environ for name in TOKEN_VARIABLES):
        return
    path = Path.home() / ".ray" / "auth_token"
    with contextlib.suppress(OSError):  # Ray reports a home that cannot be written
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if path.exists():
            path.chmod(0o600)
            return
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))


def _session_folder() -> Path:
    """Create a folder that is removed when this process ends; remove folders of killed runs."""
    parent = private_folder(os.environ.get("RAY_TMPDIR"))
    if len(str(parent)) > LONGEST_PATH:
        parent = private_folder("/tmp")
    for old in parent.glob("ray-*-*"):
        pid = old.name.split("-")[1]
        if pid.isdigit() and not is_running(int(pid)):
            shutil.rmtree(old, ignore_errors=True)
    folder, owner = Path(tempfile.mkdtemp(prefix=f"ray-{os.getpid()}-", dir=parent)), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a fork of the process keeps the folder
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


# ------------------------------------------------------------------------------- nodes of a cluster


def living_nodes() -> list[dict[str, Any]]:
    """Return Ray's records of its living nodes, sorted by address."""
    nodes: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]
    return sorted(nodes, key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))


def cluster_nodes(slots_per_node: int | None = None, use_gpu: bool = True) -> list[NodeSpec]:
    """Return the living nodes, sorted by address.

    A node without GPUs, or without `use_gpu`, has `slots_per_node` CPU slots, or one for every CPU.
    """
    prefixes = ("CPU", "GPU", "memory", "object_store_memory", "node:", "accelerator_type:")
    nodes = []
    for node in living_nodes():
        have = node["Resources"]
        gpus, cpus = int(have.get("GPU", 0)) if use_gpu else 0, float(have.get("CPU", 0.0))
        nodes.append(
            NodeSpec(
                node["NodeManagerAddress"],
                gpus or (int(cpus) if slots_per_node is None else slots_per_node),
                cpus,
                "GPU" if gpus else "CPU slot",
                node["NodeID"],
                {name: n for name, n in have.items() if not name.startswith(prefixes)},
                node["Labels"],
            )
        )
    return nodes


def address_of_head() -> str:
    """Return the address at which other nodes join the cluster; "" without one."""
    if not ray.is_initialized():  # a simulated cluster
        return ""
    return str(ray.get_runtime_context().gcs_address)


def draining_nodes() -> dict[str, float]:
    """Return the ids of nodes that Ray drains (`ray drain-node`), with the seconds that are left.

    The seconds are infinite if the notice names no deadline.
    """
    if not ray.is_initialized():  # a simulated cluster
        return {}
    now_ms = time.time() * 1000
    deadlines = ray._private.state.state.get_draining_nodes()
    return {node: (ms - now_ms) / 1000 if ms else math.inf for node, ms in deadlines.items()}


def describe_shortage(need: Mapping[str, float], num_processes: int) -> str:
    """Describe what is free, what these processes lack in total, and who holds the rest."""
    total, free = ray.cluster_resources(), defaultdict(float, ray.available_resources())
    lacking = {kind: amount * num_processes - free[kind] for kind, amount in need.items()}
    lacking = {kind: amount for kind, amount in lacking.items() if amount > ROUNDING}
    others = {kind: total.get(kind, 0.0) - free[kind] for kind in need}
    holders = []
    for group in placement_group_table().values():
        if group["state"] == "CREATED":
            bundles = group["bundles"].values()
            taken = {kind: sum(bundle.get(kind, 0.0) for bundle in bundles) for kind in need}
            others = {kind: others[kind] - amount for kind, amount in taken.items()}
            name = group["name"] or group["placement_group_id"]
            holders.append(f"placement group {name} ({amounts(taken)})")
    if any(amount > ROUNDING for amount in others.values()):
        holders.append(f"tasks and actors without a placement group ({amounts(others)})")
    text = f"free: {amounts({kind: free[kind] for kind in need})}"
    if lacking:
        text += f"; missing: {amounts(lacking)}"
    return f"{text}; held by {join_few(holders, 4) or 'nobody'}"


def store_usage() -> tuple[int, int, int]:
    """Return this node's bytes in the object store, those it has room for, and those spilled."""
    if not ray.is_initialized():  # a simulated cluster
        return 0, 0, 0
    node_id = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == node_id)
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], False).store_stats
    used, room = stats.object_store_bytes_used, stats.object_store_bytes_avail
    return used, room, stats.spilled_bytes_total


def amounts(resources: dict[str, float]) -> str:
    """Describe resources, such as `2 CPU, 1 GPU`."""
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


class ClusterProbe:
    """Checks whether the head and the nodes of a cluster still listen.

    Ray itself waits for a lost head (the GCS) for a minute, and takes half a minute to declare a
    node dead.
    """

    def __init__(self) -> None:
        """Read the addresses, which only a living head knows."""
        self._nodes: dict[str, dict[str, Any]] = {node["NodeID"]: node for node in ray.nodes()}
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        self._head = host, int(port)
        self._tried: dict[tuple[str, int], float] = {}
        self._silent: dict[tuple[str, int], int] = {}
        self._trying = threading.Lock()

    def address(self, node_id: str) -> str:
        """Return the network address of a node."""
        return str(self._nodes[node_id]["NodeManagerAddress"])

    def node_failure(self, node_id: str) -> str | None:
        """Return why no process on that node can answer, or None while the node lives."""
        address, port = self.address(node_id), self._nodes[node_id]["NodeManagerPort"]
        return _silent_node(node_id, address, port) if self._is_gone(address, port) else None

    def head_failure(self) -> str | None:
        """Return why no worker of the cluster can answer, or None while the head lives."""
        host, port = self._head
        if not self._is_gone(host, port):
            return None
        return (
            f"the head of the Ray cluster is gone: no GCS listens at {host}:{port}. Start the "
            "cluster again; the same command then resumes from the last checkpoint."
        )

    def _is_gone(self, address: str, port: int) -> bool:
        place = address, port
        with self._trying:  # several waiting threads count as one try
            if time.monotonic() - self._tried.get(place, -ATTEMPT_EVERY_S) >= ATTEMPT_EVERY_S:
                self._tried[place] = time.monotonic()
                self._silent[place] = 0 if _answers(place) else self._silent.get(place, 0) + 1
            return self._silent[place] >= NUM_TRIES


def node_failure_cause(node_id: str) -> str | None:
    """Return why no worker can be started on that node: it is gone or drained; None if not."""
    node = next((node for node in ray.nodes() if node["NodeID"] == node_id), None)
    if node is None or not node["Alive"]:
        where = node["NodeManagerAddress"] if node else "of this pool"
        return f"its node {where} ({node_id[:8]}) is gone: Ray has declared it dead."
    address, port = str(node["NodeManagerAddress"]), int(node["NodeManagerPort"])
    if node_id in draining_nodes():
        return f"its node {address} ({node_id[:8]}) is drained."
    is_gone = not any(_answers((address, port)) for _ in range(NUM_TRIES))
    return _silent_node(node_id, address, port) if is_gone else None


def _silent_node(node_id: str, address: str, port: int) -> str:
    at = f"{address}:{port}"
    return f"its node {address} ({node_id[:8]}) is gone: no Ray daemon answers at {at}."


def _answers(place: tuple[str, int]) -> bool:
    try:
        socket.create_connection(place, timeout=1.0).close()
    except OSError:
        return False
    return True


# -------------------------------------------------------------------------------- leaving a cluster


def within(seconds: float, work: Callable[[], T], subject: str) -> Future[T]:
    """Run `work` in a thread and wait so long; log its failure, or that it is left running."""
    running = in_daemon(subject, work)
    if not wait_futures([running], seconds).done:
        logger.warning("%s did not end within %.0f s and is left running", subject, seconds)
    elif error := running.exception():  # a run that ends has its own error to raise
        logger.warning("%s failed: %s", subject, error)
    return running


def leave_if_broken() -> bool:
    """Leave a cluster that does not answer or has lost its nodes, so that `connect` works again.

    Return whether this process is in no cluster now.
    """
    if ray.is_initialized():
        daemons = [processes[0].process for kind, processes in _own_processes() if kind in DAEMONS]
        is_broken = any(daemon.poll() is not None for daemon in daemons)
        if not is_broken:
            nodes = within(RELEASE_S, ray.nodes, "asking Ray's nodes")
            has_answer = nodes.done() and nodes.exception() is None
            is_broken = not has_answer or not any(node["Alive"] for node in nodes.result())
        if is_broken:
            _leave()
    return not ray.is_initialized()


def _leave_at_exit(owner: int) -> None:
    if os.getpid() == owner:  # a fork of the process does not leave
        _leave()


def _leave() -> None:
    """Leave Ray; this also ends a cluster that this process started."""
    if not ray.is_initialized():
        return
    atexit.unregister(ray.shutdown)
    pids = [process.process.pid for _, processes in _own_processes() for process in processes]
    # with `_exiting_interpreter` it prints the rest of the logs
    shut_down = partial(ray.shutdown, _exiting_interpreter=True)
    leaving = within(SHUTDOWN_S, shut_down, "leaving Ray")
    if not leaving.done():
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        # without its daemons the shutdown ends; until then it may write into the session's folder
        wait_futures([leaving], SHUTDOWN_S)
    if threading.current_thread() is threading.main_thread():
        # if the user's code has connected, Ray's shutdown restores the system's handler, but Python
        # still reports its own
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def _own_processes() -> list[tuple[str, Any]]:
    """Return the processes of a cluster that this process started, by kind."""
    node = ray._private.worker._global_node
    return list(node.all_processes.items()) if node is not None and node.is_head() else []


def private_folder(place: str | None = None) -> Path:
    """Return the user's own folder (mode 700) in `place`, by default in the temporary folder.

    Raise if others could enter it.
    """
    folder = Path(place or tempfile.gettempdir()) / f"verl-like-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise WorkerError(
            f"{folder}, the folder of Ray's sessions, cannot be created ({error.strerror}). Set "
            "RAY_TMPDIR to a folder with a short path in which you can write."
        ) from None
    status = folder.lstat()
    is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    if not is_private or status.st_uid != os.getuid():
        raise WorkerError(
            f"{folder} is not private to this user (mode 700), so other users could reach the "
            "sockets, logs and data of this run. Remove it, or set RAY_TMPDIR to another folder "
            "with a short path."
        )
    return folder


ANSWER_S = 60.0
"""Seconds in which a node must answer whether it sees a file."""


def require_shared_folder(folder: Path, nodes: Iterable[NodeSpec]) -> None:
    """Raise if some node does not see this folder, because its workers' files would be lost."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".probe-{uuid.uuid4().hex}"
    probe.touch()
    try:
        blind = nodes_without_path(probe, nodes)
    finally:
        probe.unlink()
    if blind:
        raise PlacementError(
            f"trainer.default_local_dir={folder}: a file that the driver writes there is not "
            f"visible on {', '.join(blind)}. Logs and checkpoints of the workers on these nodes "
            "would be lost. Set a folder on a file system that all nodes share, or keep the pools "
            "on nodes that see it."
        )


def nodes_without_path(path: Path, nodes: Iterable[NodeSpec]) -> list[str]:
    """Return the names of the nodes that have no such path, or do not answer within a minute."""
    node_of_answer = {}
    for key, node in {node.key: node for node in nodes}.items():
        on_the_node = NodeAffinitySchedulingStrategy(key, soft=False)
        node_of_answer[_exists.options(scheduling_strategy=on_the_node).remote(str(path))] = node

    missing, until = [], time.monotonic() + ANSWER_S
    for answer, node in node_of_answer.items():
        try:
            sees = ray.get(answer, timeout=max(until - time.monotonic(), 0.0))
        except RayError:  # the node cannot answer, or not in time
            sees = False
        if not sees:
            missing.append(f"{node.name} ({node.key[:8]})")
    return missing


@ray.remote(num_cpus=0)
def _exists(path: str) -> bool:
    return os.path.exists(path)
