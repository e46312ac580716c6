"""The actor of a worker process on Ray: a `WorkerHost` behind Ray's method calls."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from verl_like.backends import rpc
from verl_like.calls.messages import Answer, Call, combine_answer
from verl_like.errors import WorkerError
from verl_like.process.child import ROOT
from verl_like.process.host import WorkerHost
from verl_like.process.info import ProcessInfo


@dataclass(frozen=True)
class Location:
    """The node of a worker process, and the address where it waits for its driver."""

    node: str
    endpoint: rpc.Endpoint


class RayHost:
    """The actor class.

    Calls run in turn, in the main thread: Ray's own threads would slow down every call.
    """

    def __init__(
        self, recipes: bytes, process_info: ProcessInfo, local_packages: list[str]
    ) -> None:
        """Set the import path before roles are unpickled, because that imports their modules."""
        prefer_local_packages(local_packages)
        import torch

        torch.set_num_threads(1)
        self._host = WorkerHost(
            recipes, replace(process_info, device_index=_device_index(process_info))
        )

    def process_info(self) -> ProcessInfo:
        """Return the data that this process was started with."""
        return self._host.process_info

    def location(self) -> Answer:
        """Return the `Location` where a driver connects for concurrent calls."""
        return combine_answer(*self._host.located(self._wait_for_driver))

    def _wait_for_driver(self) -> Location:
        # if there is only one node, the driver is on it
        one_node = self._host.process_info.one_node
        address = "127.0.0.1" if one_node else ray.util.get_node_ip_address()
        node = ray.get_runtime_context().get_node_id()
        return Location(node, rpc.listen(address, self._host))

    def open_store(self, port: int) -> tuple[str, int] | WorkerError:
        """Bind the rendezvous store on this node, or return the error, which `start` reports."""
        try:
            return self._host.open_store(ray.util.get_node_ip_address(), port)
        except WorkerError as error:
            return error

    def start(self, master: tuple[str, int] | WorkerError) -> bytes:
        """Construct the roles."""
        return self._host.start(master).packed()

    def construct_again(self) -> bytes:
        """Construct the roles again."""
        return self._host.construct_again().packed()

    def start_header(self) -> bytes:
        """Return the header of `start`, from which another driver learns the meshes."""
        return self._host.started().packed()

    def call(self, packed: bytes | Call, *parts: Any) -> Answer | tuple[Any, bytes]:
        """Run one method, and return header and payload as one object, which is faster than two.

        If the payload may go to other workers, payload and header are two objects. The call is
        pickled unless only Ray can pickle it.
        """
        call: Call = pickle.loads(packed) if isinstance(packed, bytes) else packed
        payload, header = self._host.call(call, parts)
        if call.payload_is_apart:
            return payload, header.packed()
        return combine_answer(payload, header)


HostActor = ray.remote(RayHost)


def _device_index(process_info: ProcessInfo) -> int | None:
    """Return the index of the assigned GPU among those that this process sees; None if unknown.

    Ray shows a worker its own GPU only, unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set.
    """
    assigned = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    if process_info.device_kind != "cuda" or len(assigned) != 1:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible:
        names = visible.split(",")
        return names.index(assigned[0]) if assigned[0] in names else None
    return int(assigned[0])


def local_packages() -> list[str]:
    """Return the imported packages that are in the folder of this project's packages."""
    packages = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if "." not in name and file and Path(file).parent == Path(ROOT, name):
            packages.append(name)
    return packages


def prefer_local_packages(names: Iterable[str]) -> None:
    """Move folders with packages of the same names behind our folder on the import path.

    Ray puts the driver's folder first.
    """
    files = {file for name in names for file in (name, f"{name}.py")}
    folders = [path for path in sys.path if path != ROOT and os.path.isdir(path)]
    namesakes = [path for path in folders if files & set(os.listdir(path))]
    if namesakes:
        rest = [path for path in sys.path if path not in namesakes and path != ROOT]
        sys.path[:] = [*rest, ROOT, *namesakes]
