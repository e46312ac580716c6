"""Joining or starting a Ray cluster, and what its nodes have."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from contextlib import contextmanager
from typing import Any

import ray

from verl_like.backends.ray.ending import end_in_time_at_exit
from verl_like.backends.ray.private_session import private_session
from verl_like.calls.diagnose import Deadlines
from verl_like.errors import WaitTimeoutError
from verl_like.placement.pools import Node
from verl_like.process.environment import ONE_THREAD, environment

OUTLIVES_A_HEAD = {"RAY_gcs_rpc_server_reconnect_timeout_s": str(10**9)}
"""Or Ray's client ends this process a minute after its head is gone, whatever it is doing, and
though it has another by then.
"""
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
        if ray.is_initialized():
            return
        env = dict(runtime_env or {})
        address = address or os.environ.get("RAY_ADDRESS")
        if address is not None:
            env["env_vars"] = {**ONE_THREAD, **env.get("env_vars", {})}
        else:
            options = {"include_dashboard": False, **options}
        options |= {"address": address or "local", "namespace": namespace}
        options |= {"runtime_env": env or None, "log_to_driver": True, "configure_logging": False}
        limit_s = (deadlines or Deadlines()).connect_s
        if address is not None:
            _init(options, address, limit_s)
            return
        unset = {name: value for name, value in ONE_THREAD.items() if name not in os.environ}
        with environment(unset), private_session(bool(options["include_dashboard"])) as private:
            _init(private | options, address, limit_s)


def _init(options: dict[str, Any], address: str | None, limit_s: float) -> None:
    """`ray.init` with a deadline.

    It has a thread of its own, because nothing can end it from outside when the cluster's head is
    silent.
    """
    done: Future[None] = Future()
    logging.getLogger("ray._private.worker").addFilter(_is_not_about_sigterm)
    work = options, done
    threading.Thread(target=_init_and_stay, args=work, name="ray.init", daemon=True).start()
    try:
        if not wait_futures([done], limit_s).done:
            raise WaitTimeoutError(_no_answer(address, limit_s))
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
        with _handler_kept(signal.SIGTERM), environment(OUTLIVES_A_HEAD):
            ray.init(**options)
    except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
        done.set_exception(error)
        return
    done.set_result(None)
    threading.Event().wait()


@contextmanager
def _handler_kept(number: int) -> Iterator[None]:
    """Whatever handles the signal before the block handles it afterwards.

    Ray puts a handler of C++ there, which prints a stack, and aborts the process 3 s after the
    signal, whatever it is doing to end well. Python's `signal` has no say outside the main thread.
    """
    libc, before = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    libc.sigaction(number, None, before)
    try:
        yield
    finally:
        libc.sigaction(number, before, None)


def _no_answer(address: str | None, limit_s: float) -> str:
    what, look = (
        "a Ray cluster of this machine's own",
        ("Look into session_latest/logs of Ray's folder (TMPDIR/verl-like-<user id>)"),
    )
    if address:
        what = f"the Ray cluster at {address}"
        look = "Check the address and, with `ray status`, the head"
    return (
        f"the driver waited {limit_s:g} s (watch.connect_s) for {what}, and its head did not "
        f"answer. {look}; if it is only slow, raise watch.connect_s. Start this program anew to "
        "try again."
    )


def _is_not_about_sigterm(record: logging.LogRecord) -> bool:
    """Drops Ray's warning that it could not set the handler which `_init` sets."""
    return "SIGTERM handler is not set" not in str(record.msg)


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
