"""Connect the ranks of a sync, and create the groups that the weights travel over.

The sender has a torch `TCPStore`. Each sync has its own part of this store, and the driver passes
the part's address to both sides. Every rank registers there, so an error can name missing ranks. A
sender and its receivers create groups at their first sync and then reuse them. They create them
again only if a rank does not have them, because it is new or the previous sync failed.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from verl_like.calls.deadlines import in_daemon
from verl_like.errors import WeightSyncError
from verl_like.process.info import environment, new_secret
from verl_like.process.machine import address_toward, loopback_interface
from verl_like.process.store import SignedStore, open_store
from workers.weights.channel import TRANSFER_TIMEOUT, Channel, Connection, name_errors

LOOPBACK = "127.0.0.1"
JOIN_TIMEOUT = timedelta(seconds=20)
"""Time that a rank waits for the other ranks to register."""
MAX_CTAS = 4
"""Multiprocessors that NCCL may use for weights."""
LOOK_S = 0.5
"""Seconds between a joining rank's checks that the sync has not been given up."""
GIVEN_UP = "given up"
"""A rank's message instead of its info, so that the others do not wait for it."""


@dataclass(frozen=True)
class Address:
    """The address of one sync, passed between processes as `str(address)`.

    Do not print it: it contains the secret of the sync.
    """

    place: str
    """`host:port` of the sender's store."""
    number: int
    """Number of the sync at this sender."""
    secret: str

    @classmethod
    def read(cls, text: str) -> Address:
        """Parse `text`, the output of `str`."""
        place, number, secret = text.split("/")
        return cls(place, int(number), secret)

    def __str__(self) -> str:
        return f"{self.place}/{self.number}/{self.secret}"

    def part_of(self, store: TCPStore) -> SignedStore:
        """Return the part of the store at `place` that belongs to this sync."""
        return SignedStore(store, self.secret, f"sync {self.number}")


def open_weight_store(toward: str = "") -> tuple[TCPStore, str]:
    """Open a store on a free port; return it and its `host:port`.

    `toward` is a host that must be able to reach the store. Without it, the processes of
    this run can reach the store; on one machine, they use loopback.
    """
    host = LOOPBACK
    if toward or os.environ.get("GLOO_SOCKET_IFNAME") != loopback_interface():
        host = address_toward(toward or os.environ.get("MASTER_ADDR", ""))
    store = open_store(host)
    store.set_timeout(JOIN_TIMEOUT)
    return store, f"{host}:{store.port}"


def join_weight_store(place: str) -> TCPStore:
    """Connect to the sender's store, from another process or over another connection.

    Torch tries to connect for at least 20 s. Meanwhile the port is probed, and if nobody listens on
    it any more, the sender is gone and an error is raised at once.
    """
    host, _, port = place.rpartition(":")
    join = partial(TCPStore, host, int(port), is_master=False, timeout=JOIN_TIMEOUT)
    joining = in_daemon("weight sync: joining its store", join)
    with name_errors(f"cannot reach the sender's store at {place}"):
        while not wait([joining], LOOK_S).done:
            with suppress(TimeoutError):
                socket.create_connection((host, int(port)), LOOK_S).close()
        store: TCPStore = joining.result()
        return store


class Connections:
    """Groups and store connections that a process reuses in later syncs.

    A sync takes its connection out and puts it back at the end. So two syncs never use the same
    connection at a time, and a failed sync does not put its connection back.
    """

    def __init__(self, toward: str = "") -> None:
        """Give the receivers' host as `toward` if they are not processes of this run."""
        self._toward = toward
        self._by_receivers: dict[str, Connection] = {}
        self._stores: list[tuple[str, TCPStore]] = []
        self._own_store: tuple[TCPStore, str] | None = None
        self._num_addresses = 0
        self._opening = threading.Lock()
        """Held while an address is created, because several threads request addresses."""

    def new_address(self) -> Address:
        """Return an unused part of this process's store, with its own secret."""
        with self._opening:
            self._own_store = self._own_store or open_weight_store(self._toward)
            self._num_addresses += 1
            return Address(self._own_store[1], self._num_addresses, new_secret())

    def give_up(self, address: str, num_receivers: int) -> None:
        """Release all ranks that wait at this address, if it belongs to this process."""
        where = Address.read(address)
        if self._own_store is not None and self._own_store[1] == where.place:
            # a new connection, because the existing one may be blocked in a wait
            give_up(where.part_of(join_weight_store(where.place)), num_receivers)

    @contextmanager
    def _store(self, address: Address) -> Iterator[SignedStore]:
        """Context with the sync's part of the sender's store.

        Connections to stores are reused, because torch resolves the peer's host name for each new
        one, which can be slow.
        """
        try:
            place, store = self._stores.pop()
        except IndexError:
            place = ""
        if place != address.place:
            store = join_weight_store(address.place)
        yield address.part_of(store)
        self._stores.append((address.place, store))

    @contextmanager
    def sending(self, address: str, num_receivers: int, device: torch.device) -> Iterator[Channel]:
        """Open the sender's channel, once all receivers are connected."""
        where, size = Address.read(address), num_receivers + 1
        with self._store(where) as store:
            with name_errors("cannot read which receivers are connected"):
                others = wait_for_receivers(store, num_receivers)
            receivers = str(others[0]["name"])
            existing = self._by_receivers.pop(receivers, None)
            numbers = {other["connection"] for other in others}
            if existing is not None and (numbers, existing.size) != ({existing.number}, size):
                existing.close()
                existing = None
            gpus = [gpu_of(device), *(other["gpu"] for other in others)]
            has_own_gpus = all(gpus) and len(set(gpus)) == len(gpus)
            reply = {"is_formed": existing is not None, "gpus": has_own_gpus}
            store.set("complete", json.dumps(reply))
            connection = existing or form_groups(where, store, 0, size, has_own_gpus)
            with self._borrowed(receivers, connection):
                yield Channel(connection, store, 0, device)
                store.delete_all()

    @contextmanager
    def receiving(
        self, address: str, rank: int, num_receivers: int, device: torch.device, name: str
    ) -> Iterator[Channel]:
        """Open a receiver's channel: `rank` counts from 1, `name` is the same for all receivers."""
        where, size = Address.read(address), num_receivers + 1
        with self._store(where) as store:
            existing = self._by_receivers.pop(name, None)
            if existing is not None and existing.place != where.place:
                existing.close()
                existing = None
            info = {"connection": existing and existing.number, "gpu": gpu_of(device), "name": name}
            reply = wait_for_sender(store, rank, num_receivers, info)
            if existing is not None and not reply["is_formed"]:
                existing.close()
                existing = None
            connection = existing or form_groups(where, store, rank, size, reply["gpus"])
            with self._borrowed(name, connection):
                yield Channel(connection, store, rank, device)

    @contextmanager
    def _borrowed(self, name: str, connection: Connection) -> Iterator[None]:
        try:
            yield
        except BaseException:
            connection.close()
            raise
        self._by_receivers[name] = connection


def gpu_of(device: torch.device) -> str:
    """Return a unique name of the GPU; "" on a CPU or without nccl."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return ""
    return f"{socket.gethostname()}/{torch.cuda.get_device_properties(device).uuid}"


def wait_for_sender(
    store: SignedStore, rank: int, num_receivers: int, info: dict[str, Any]
) -> dict[str, Any]:
    """Register this receiver with `info`; return the sender's reply once all have registered."""
    with name_errors("cannot reach the sender's store"):
        store.set(f"joined/{rank}", json.dumps(info))
    with name_errors("the sender is gone"), _naming_absent(store, num_receivers):
        store.wait(["complete"], JOIN_TIMEOUT)
        return _read(store, "complete")


def wait_for_receivers(store: SignedStore, num_receivers: int) -> list[dict[str, Any]]:
    """Return what every receiver registered; raise an error that names the missing ones."""
    with name_errors("cannot reach the sender's store"):
        store.set("joined/0", "{}")
    keys = [f"joined/{rank}" for rank in range(1, num_receivers + 1)]
    with _naming_absent(store, num_receivers):
        store.wait(keys, JOIN_TIMEOUT)
        return [_read(store, key) for key in keys]


def give_up(store: SignedStore, num_receivers: int) -> None:
    """Release all waiting ranks, because a rank has failed and will not join."""
    for rank in range(1, num_receivers + 1):
        if not store.check([f"joined/{rank}"]):
            store.set(f"joined/{rank}", GIVEN_UP)
    store.set("complete", GIVEN_UP)


def _read(store: SignedStore, key: str) -> dict[str, Any]:
    text = store.get(key).decode()
    if text == GIVEN_UP:
        raise WeightSyncError(
            "weight sync: stopped, because another rank failed. See that rank's error."
        )
    info: dict[str, Any] = json.loads(text)
    return info


def form_groups(
    address: Address, store: SignedStore, rank: int, size: int, has_own_gpus: bool
) -> Connection:
    """Create the gloo and NCCL groups of registered ranks; raise once the sync is given up.

    A rank may have died since it registered. Gloo then waits 20 s for this rank, or 100 s on one of
    the connections, and cannot be interrupted. So gloo has a thread, which is abandoned
    if necessary.
    """
    with name_errors("the group of sender and receivers did not form"):
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = JOIN_TIMEOUT
        options._devices = _gloo_devices(store.host)
        own_store, name = PrefixStore("weights", store), "weight sync: forming its group"
        forming = in_daemon(name, dist.ProcessGroupGloo, own_store, rank, size, options)
        while not wait([forming], LOOK_S).done:
            with name_errors("the sender is gone"):  # gloo's wait blocks its own connection
                _read(address.part_of(join_weight_store(address.place)), "complete")
        connection = Connection(address.place, address.number, size, forming.result())
        if has_own_gpus:
            # a connection of its own: NCCL's threads use it as long as the group exists
            other = SignedStore(join_weight_store(address.place), address.secret, "gpus")
            connection.gpus = group_of_gpus(other.unsigned(str(address.number)), rank, size)
        return connection


def _gloo_devices(host: str) -> list[Any]:
    """Return the interfaces of GLOO_SOCKET_IFNAME, or the interface that reaches the store's host.

    The variable may be `lo` although the run sends weights to a server on another machine. Torch's
    default device is not used: it ignores the variable and takes the address of this machine's host
    name, which is often loopback.
    """
    gloo = dist.ProcessGroupGloo
    loopback = loopback_interface()
    names = os.environ.get("GLOO_SOCKET_IFNAME") or loopback
    if host == LOOPBACK or names == loopback:
        return [gloo.create_device(hostname=address_toward(host))]
    return [gloo.create_device(interface=name) for name in names.split(",")]


def group_of_gpus(store: Store, rank: int, size: int) -> Any:
    """Create the NCCL group, which needs a separate GPU for every rank.

    The group gets few of the GPU's multiprocessors, because a delivery runs while the trainer's
    ranks communicate over another group, and neither may keep the other from starting. NCCL's time
    limit is longer than gloo's, because only the error of gloo names a lost rank. When
    NCCL fails, torch may only abort this group. By default it would end the whole process, so a
    lost generator would end the trainer.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 2 * TRANSFER_TIMEOUT
    options.config.max_ctas = MAX_CTAS
    with environment({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}):
        return dist.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _naming_absent(store: SignedStore, num_receivers: int) -> Iterator[None]:
    """Context that turns a timeout of the store into an error that names the missing ranks."""
    try:
        yield
    except dist.DistStoreError as error:
        keys = [f"joined/{rank}" for rank in range(num_receivers + 1)]
        joined = [store.check([key]) and store.get(key) != GIVEN_UP.encode() for key in keys]
        ranks = ["the sender", *(f"receiving rank {rank}" for rank in range(num_receivers))]
        absent = [rank for rank, is_there in zip(ranks, joined, strict=True) if not is_there]
        raise WeightSyncError(
            f"weight sync: {', '.join(absent) or ranks[0]} did not connect within "
            f"{JOIN_TIMEOUT.total_seconds():.0f} s. Look for a process that is dead, or busy with "
            "another call."
        ) from error
