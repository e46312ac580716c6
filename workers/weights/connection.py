"""How the ranks of a sync find each other, and the groups that the weights travel over.

The sender has a store. Each sync has a part of it, whose address the driver hands to both sides;
there every rank says that it has come, so one that does not is named. The groups last: they are
formed at the first sync of a sender with its receivers, and again only where a rank does not hold
them, since it is new or the sync before has broken off.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from verl_like.errors import WeightSyncError
from verl_like.process.facts import new_secret
from verl_like.process.store import SignedStore, open_store

LOOPBACK = "127.0.0.1"
JOIN_TIMEOUT = timedelta(seconds=20)
"""How long a rank waits for the others to come."""
TRANSFER_TIMEOUT = timedelta(seconds=120)
"""How long one broadcast may take, the gathering of its tensors included."""
LOOK_S = 0.5
"""How often a rank that joins the store or forms its groups looks whether the sync goes on."""
GIVEN_UP = "given up"
"""In the place of what a rank says of itself: nobody is to wait for it."""
Manifest = dict[str, list[Any]]
"""Of tensors, by name: dtype, shape and hash."""


@dataclass(frozen=True)
class Address:
    """Of one sync. Its text is what travels; the secret is not shown in errors."""

    place: str
    """`host:port` of the sender's store."""
    number: int
    """Which of its syncs."""
    secret: str

    @classmethod
    def read(cls, text: str) -> Address:
        """The counterpart of `str`."""
        place, number, secret = text.split("/")
        return cls(place, int(number), secret)

    def __str__(self) -> str:
        return f"{self.place}/{self.number}/{self.secret}"

    def part_of(self, store: dist.TCPStore) -> SignedStore:
        """What this sync alone has of the store at `place`."""
        return SignedStore(store, self.secret, f"sync {self.number}")


def open_weight_store(toward: str = "") -> tuple[dist.TCPStore, str]:
    """A store on a free port, and its place `host:port`, which the host `toward` can reach.

    By default that is whoever is in this run: on one machine loopback.
    """
    host = LOOPBACK
    if toward or os.environ.get("GLOO_SOCKET_IFNAME") != "lo":
        host = _own_host(toward or os.environ.get("MASTER_ADDR", ""))
    store = open_store(host)
    store.set_timeout(JOIN_TIMEOUT)
    return store, f"{host}:{store.port}"


def _own_host(toward: str) -> str:
    """The address from which this node reaches that host: a sender may be on another node."""
    with suppress(OSError):  # no name of that kind, or no route
        family, kind, _, _, place = socket.getaddrinfo(toward, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as connected:
            connected.connect(place)  # nothing is sent: the system only chooses the route
            return str(connected.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())


def join_weight_store(place: str) -> dist.TCPStore:
    """The sender's store, from another process or over another connection.

    Torch tries a port for 20 s and more; where nobody listens any longer, the sender is gone.
    """
    host, _, port = place.rpartition(":")
    join = partial(dist.TCPStore, host, int(port), is_master=False, timeout=JOIN_TIMEOUT)
    joining = call_in_thread("joining its store", join)
    with explained(f"cannot reach the sender's store at {place}"):
        while not wait([joining], LOOK_S).done:
            with suppress(TimeoutError):
                socket.create_connection((host, int(port)), LOOK_S).close()
        return joining.result()


@dataclass
class Connection:
    """The groups of one sender (rank 0) and its receivers."""

    place: str
    number: int
    """The sync in which they were formed."""
    size: int
    group: Any
    """What is agreed on goes over gloo, and buckets too, unless there are `gpus`."""
    gpus: Any = None
    """NCCL's group, where every rank has a GPU of its own."""
    held: Manifest = field(default_factory=dict)
    """At the sender, of syncs of what has changed: what every receiver holds."""

    def close(self) -> None:
        """Let go of the groups, in a thread: gloo waits for what is still on its way."""
        own = vars(self)
        threading.Thread(target=lambda: own.update(group=None, gpus=None), daemon=True).start()


class Connections:
    """What a process keeps from one sync to the next: groups, and connections to stores.

    A sync takes what it uses out and puts it back in the end, so that no two use the same, and what
    a failed one has used is gone.
    """

    def __init__(self, toward: str = "") -> None:
        """`toward` is the receivers' host, where they are none of this run's processes."""
        self._toward = toward
        self._by_receivers: dict[str, Connection] = {}
        self._stores: list[tuple[str, dist.TCPStore]] = []
        self._own_store: tuple[dist.TCPStore, str] | None = None
        self._num_addresses = 0
        self._opening = threading.Lock()
        """Addresses are asked for by several threads."""

    def new_address(self) -> Address:
        """A part of this process's one store that nobody else was given, with its own secret."""
        with self._opening:
            self._own_store = self._own_store or open_weight_store(self._toward)
            self._num_addresses += 1
            return Address(self._own_store[1], self._num_addresses, new_secret())

    def give_up(self, address: Address, num_receivers: int) -> None:
        """Nobody waits any longer at this address, if it is one of this process's."""
        if self._own_store is not None and self._own_store[1] == address.place:
            # a connection of its own: the other one may be the one that waits
            give_up(address.part_of(join_weight_store(address.place)), num_receivers)

    @contextmanager
    def store(self, address: Address) -> Iterator[SignedStore]:
        """The sync's part of the sender's store.

        Torch asks for the name of every peer, which a slow resolver makes long: so it is joined as
        rarely as can be.
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
    def sending(
        self, address: Address, store: SignedStore, num_receivers: int, device: torch.device
    ) -> Iterator[Connection]:
        """The sender's end of the groups, once all receivers have come."""
        with explained("who has come is not known"):
            others = wait_for_receivers(store, num_receivers)
        receivers = str(others[0]["name"])
        held = self._by_receivers.pop(receivers, None)
        numbers = {other["connection"] for other in others}
        if held is not None and (numbers, held.size) != ({held.number}, num_receivers + 1):
            held.close()
            held = None
        gpus = [gpu_of(device), *(other["gpu"] for other in others)]
        has_own_gpus = all(gpus) and len(set(gpus)) == len(gpus)
        store.set("complete", json.dumps({"is_formed": held is not None, "gpus": has_own_gpus}))
        form = partial(form_groups, address, store, 0, num_receivers + 1, has_own_gpus)
        with self._lent(receivers, held or form()) as connection:
            yield connection

    @contextmanager
    def receiving(
        self,
        address: Address,
        store: SignedStore,
        rank: int,
        num_receivers: int,
        device: torch.device,
        name: str,
    ) -> Iterator[Connection]:
        """A receiver's end: `rank` counts from 1, `name` is that of all receivers."""
        held = self._by_receivers.pop(name, None)
        if held is not None and held.place != address.place:
            held.close()
            held = None
        own = {"connection": held and held.number, "gpu": gpu_of(device), "name": name}
        answer = wait_for_sender(store, rank, num_receivers, own)
        if held is not None and not answer["is_formed"]:
            held.close()
            held = None
        form = partial(form_groups, address, store, rank, num_receivers + 1, answer["gpus"])
        with self._lent(name, held or form()) as connection:
            yield connection

    @contextmanager
    def _lent(self, name: str, connection: Connection) -> Iterator[Connection]:
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        self._by_receivers[name] = connection


def gpu_of(device: torch.device) -> str:
    """A name that no other GPU has; none on a CPU, or without nccl."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return ""
    return f"{socket.gethostname()}/{torch.cuda.get_device_properties(device).uuid}"


def wait_for_sender(
    store: SignedStore, rank: int, num_receivers: int, own: dict[str, Any]
) -> dict[str, Any]:
    """Say that this receiver has come; what the sender answers once all have."""
    with explained("cannot reach the sender's store"):
        store.set(f"joined/{rank}", json.dumps(own))
    with explained("the sender is gone"), _naming_absent(store, num_receivers):
        store.wait(["complete"], JOIN_TIMEOUT)
        return _read(store, "complete")


def wait_for_receivers(store: SignedStore, num_receivers: int) -> list[dict[str, Any]]:
    """What every receiver says of itself; an error that names those that did not come."""
    with explained("cannot reach the sender's store"):
        store.set("joined/0", "{}")
    keys = [f"joined/{rank}" for rank in range(1, num_receivers + 1)]
    with _naming_absent(store, num_receivers):
        store.wait(keys, JOIN_TIMEOUT)
        return [_read(store, key) for key in keys]


def give_up(store: SignedStore, num_receivers: int) -> None:
    """Have whoever waits for the others go: a rank has failed, and will not come."""
    for rank in range(1, num_receivers + 1):
        if not store.check([f"joined/{rank}"]):
            store.set(f"joined/{rank}", GIVEN_UP)
    store.set("complete", GIVEN_UP)


def _read(store: SignedStore, key: str) -> dict[str, Any]:
    text = store.get(key).decode()
    if text == GIVEN_UP:
        raise WeightSyncError("weight sync: it is given up, since another rank has failed.")
    found: dict[str, Any] = json.loads(text)
    return found


def form_groups(
    address: Address, store: SignedStore, rank: int, size: int, has_own_gpus: bool
) -> Connection:
    """The groups of ranks that have all come."""
    with explained("the group of sender and receivers did not form"):
        options = dist.ProcessGroupGloo._Options()
        options._timeout = JOIN_TIMEOUT
        options._devices = _gloo_devices(store.host)
        own_store = dist.PrefixStore("weights", store)
        group = unless_given_up(
            partial(dist.ProcessGroupGloo, own_store, rank, size, options), store
        )
        connection = Connection(address.place, address.number, size, group)
        if has_own_gpus:
            # NCCL looks into its store as long as it lives, from threads of its own
            other = SignedStore(join_weight_store(address.place), address.secret, "gpus")
            connection.gpus = group_of_gpus(other.unsigned(str(address.number)), rank, size)
        return connection


def _gloo_devices(host: str) -> list[Any]:
    """The interfaces of GLOO_SOCKET_IFNAME, else the one by which the store's host is reached.

    That a run is on one machine does not say so of the server that gets its weights. Torch's
    default device is what the host's name resolves to, often loopback, and no variable counts.
    """
    gloo = dist.ProcessGroupGloo
    names = os.environ.get("GLOO_SOCKET_IFNAME") or "lo"
    if host == LOOPBACK or names == "lo":
        return [gloo.create_device(hostname=_own_host(host))]
    return [gloo.create_device(interface=name) for name in names.split(",")]


def group_of_gpus(store: dist.Store, rank: int, size: int) -> Any:
    """NCCL's group, which demands that every rank has a GPU of its own."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = TRANSFER_TIMEOUT
    return dist.ProcessGroupNCCL(store, rank, size, options)


def unless_given_up(form: Callable[[], Any], store: SignedStore) -> Any:
    """The group that `form` makes of ranks that have come, and may have died since.

    Gloo waits for them for 20 s, on one connection five times as long, and cannot be told to stop.
    It is left alone once the sync is given up.
    """
    forming = call_in_thread("forming its group", form)
    while not wait([forming], LOOK_S).done:
        with explained("the sender is gone"):
            _read(store.over(join_weight_store(f"{store.host}:{store.port}")), "complete")
    return forming.result()


def call_in_thread(name: str, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """The future of a blocking call, in a thread that nobody has to wait for."""
    future = Future[Any]()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name=f"weight sync: {name}", daemon=True).start()
    return future


@contextmanager
def _naming_absent(store: SignedStore, num_receivers: int) -> Iterator[None]:
    """A wait in the store that ends in vain is an error about the ranks that did not come."""
    try:
        yield
    except dist.DistStoreError as error:
        ranks = range(num_receivers + 1)
        absent = ", ".join(_who(rank) for rank in ranks if not _has_come(store, rank))
        raise WeightSyncError(
            f"weight sync: waited {JOIN_TIMEOUT.total_seconds():.0f} s for {absent or _who(0)}: "
            "not there. Is that worker alive, and not busy with another call?"
        ) from error


def _has_come(store: SignedStore, rank: int) -> bool:
    key = f"joined/{rank}"
    return store.check([key]) and store.get(key) != GIVEN_UP.encode()


def _who(rank: int) -> str:
    return f"rollout rank {rank - 1}" if rank else "the sender (actor rank 0)"


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Errors of torch's transport as `WeightSyncError`s that say what we were doing."""
    try:
        yield
    except WeightSyncError:
        raise
    except (RuntimeError, OSError, dist.DistError) as error:
        raise WeightSyncError(f"weight sync: {what}: {str(error).splitlines()[0]}") from error
