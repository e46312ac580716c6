"""Joining or starting a Ray cluster, what its nodes have, and whether they still live."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from typing import Any

import ray

from verl_like.backends.ray.ending import end_in_time_at_exit
from verl_like.backends.ray.private_session import private_session
from verl_like.backends.ray.probes import EVERY_S
from verl_like.calls.waiting import Deadlines, WaitClock
from verl_like.errors import WaitTimeoutError
from verl_like.placement.pools import Node
from verl_like.process.environment import ONE_THREAD, environment

_connecting = threading.Lock()


def connect(
    address: str | None = None,
    namespace: str | None = None,
    runtime_env: dict[str, Any] | None = None,
    deadlines: Deadlines | None = None,
    **options: Any,
) -> None:
    """Join a Ray cluster (`address`, or RAY_ADDRESS), or start one here.

    A process that is connected already stays so; a thread that is connecting it is waited for.
    Workers get one thread each, unless the user's
    environment or `runtime_env` says otherwise. A cluster that is started is the user's alone
    (`private_session`).
    """
    with _connecting:
        if not ray.is_initialized():
            _connect(address, namespace, runtime_env, deadlines, options)


def _connect(
    address: str | None,
    namespace: str | None,
    runtime_env: dict[str, Any] | None,
    deadlines: Deadlines | None,
    options: dict[str, Any],
) -> None:
    env = dict(runtime_env or {})
    unset = {name: value for name, value in ONE_THREAD.items() if name not in os.environ}
    address = address or os.environ.get("RAY_ADDRESS")
    if address is not None:
        env["env_vars"] = {**ONE_THREAD, **env.get("env_vars", {})}
    else:
        options = {"include_dashboard": False, **options}
    options |= {"address": address or "local", "namespace": namespace, "runtime_env": env or None}
    options |= {"log_to_driver": True, "configure_logging": False}
    limits = deadlines or Deadlines()
    if address is not None:
        _init(options, address, limits)
        return
    with environment(unset), private_session(bool(options["include_dashboard"])) as private:
        _init(private | options, address, limits)


def _init(options: dict[str, Any], address: str | None, limits: Deadlines) -> None:
    """`ray.init` with a deadline.

    It has a thread of its own, because nothing can end it from outside when the cluster's head is
    silent.
    """
    done: Future[None] = Future()
    logging.getLogger("ray._private.worker").addFilter(_is_not_about_sigterm)
    work = options, done
    threading.Thread(target=_init_and_stay, args=work, name="ray.init", daemon=True).start()
    try:
        _await(done, address, limits)
    except BaseException:
        atexit.unregister(ray.shutdown)  # it waits for the lock that the thread may hold
        raise
    done.result()
    end_in_time_at_exit()
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        # as `ray.init` does in the main thread
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))


def _init_and_stay(options: dict[str, Any], done: Future[None]) -> None:
    """Connect, then wait for ever: the cluster's processes end with the thread that made them."""
    try:
        ray.init(**options)
    except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
        done.set_exception(error)
        return
    done.set_result(None)
    threading.Event().wait()


def _await(done: Future[None], address: str | None, limits: Deadlines) -> None:
    what = f"the Ray cluster at {address}" if address else "a Ray cluster of this machine's own"
    clock = WaitClock("the driver's connection", limits.connect_s, limits.warn_s)
    while not wait_futures([done], clock.remaining()).done:
        if clock.over():
            look = (
                "Check the address and, with `ray status`, the head"
                if address
                else "Look into session_latest/logs of Ray's folder (TMPDIR/verl-like-<user id>)"
            )
            raise WaitTimeoutError(
                f"the driver waited {limits.connect_s:g} s (watch.connect_s) for {what}, and its "
                f"head did not answer. {look}; if it is only slow, raise watch.connect_s. Start "
                "this program anew to try again."
            )
        clock.warn_if_old(what)


def _is_not_about_sigterm(record: logging.LogRecord) -> bool:
    """Drops Ray's warning that it could not set the handler which `_init` sets."""
    return "SIGTERM handler is not set" not in str(record.msg)


class NodeProbe:
    """Tells soon whether a node is gone: its Ray daemon does not answer three times in a row.

    The cluster itself may take half a minute to declare a node dead.
    """

    def __init__(self, every_s: float = EVERY_S, num_tries: int = 3) -> None:
        """A node is asked at most once in `every_s` seconds; it is gone after so many tries."""
        self.every_s, self.num_tries = every_s, num_tries
        self._known: dict[str, dict[str, Any]] = {}
        self._asked: dict[str, float] = {}
        self._silent: dict[str, int] = {}
        self._asking = threading.Lock()

    def name(self, node_id: str) -> str:
        """The node's address."""
        return str(self._node(node_id)["NodeManagerAddress"])

    def why_gone(self, node_id: str) -> str | None:
        """Why nothing on that node can ever answer; None while it lives."""
        with self._asking:  # threads that wait for the same silence count it once
            if time.monotonic() - self._asked.get(node_id, 0.0) >= self.every_s:
                self._asked[node_id] = time.monotonic()
                silent = 0 if self._answers(node_id) else self._silent.get(node_id, 0) + 1
                self._silent[node_id] = silent
        if self._silent.get(node_id, 0) < self.num_tries:
            return None
        node = self._node(node_id)
        where = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
        return (
            f"its node {node['NodeManagerAddress']} ({node_id[:8]}) is gone: no Ray daemon "
            f"answers at {where}."
        )

    def _answers(self, node_id: str) -> bool:
        node = self._node(node_id)
        try:
            with socket.create_connection(
                (node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=1.0
            ):
                return True
        except OSError:
            return False

    def _node(self, node_id: str) -> dict[str, Any]:
        if node_id not in self._known:
            self._known |= {node["NodeID"]: node for node in ray.nodes()}
        return self._known[node_id]


def why_gone(node_id: str) -> str | None:
    """Why no worker can be started on that node; None while it lives."""
    known = {node["NodeID"]: node for node in ray.nodes()}
    node = known.get(node_id)
    if node is None or not node["Alive"]:
        where = node["NodeManagerAddress"] if node else "of this pool"
        return f"its node {where} ({node_id[:8]}) is gone: Ray has declared it dead."
    probe = NodeProbe(every_s=0.0)
    return next(filter(None, (probe.why_gone(node_id) for _ in range(probe.num_tries))), None)


def has_one_node() -> bool:
    """Whether the whole cluster is one machine: its processes then talk over loopback.

    A node that was lost counts: its like may come, and has to reach what is started until then.
    """
    return len(ray.nodes()) == 1


def living_nodes() -> list[dict[str, Any]]:
    """What Ray says of each of its living nodes, by address."""
    nodes: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]
    return sorted(nodes, key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))


def cluster_nodes(slots_per_node: int | None = None, use_gpu: bool = True) -> list[Node]:
    """The living nodes, by address.

    With their GPUs, or (where there are none) with that many CPU slots, or one slot per CPU.
    """
    nodes = []
    for node in living_nodes():
        have = node["Resources"]
        gpus, cpus = int(have.get("GPU", 0)) if use_gpu else 0, float(have.get("CPU", 0.0))
        devices = gpus or (int(cpus) if slots_per_node is None else slots_per_node)
        nodes.append(
            Node(
                node["NodeManagerAddress"],
                devices,
                cpus,
                "GPU" if gpus else "CPU slot",
                node["NodeID"],
                {name: n for name, n in have.items() if not _is_built_in(name)},
            )
        )
    return nodes


def _is_built_in(resource: str) -> bool:
    """Whether it is one that Ray gives every node, not one of the user's own."""
    prefixes = ("CPU", "GPU", "memory", "object_store_memory", "node:", "accelerator_type:")
    return resource.startswith(prefixes)


def free_resources() -> str:
    """What the cluster could give right now, in words."""
    free = ray.available_resources()
    return amounts(
        {name: free.get(name, 0) for name in ("CPU", "GPU") if name in ray.cluster_resources()}
    )


def amounts(resources: dict[str, float]) -> str:
    """Resources in words: `2 CPU, 1 GPU`."""
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
