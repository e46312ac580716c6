"""Where a sync of weights meets: a store of the sender's, and in it a part for this sync alone.

The driver asks the sender for an address and hands it to both sides (`workers.weights.sync`,
`workers.weights.delivery`). With it goes the secret by which they know each other.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from verl_like.errors import WeightSyncError
from verl_like.process.store import SignedStore, open_store

LOOPBACK = "127.0.0.1"
FORM_TIMEOUT = timedelta(seconds=20)
"""How long a rank waits for the others to join."""


@dataclass(frozen=True)
class Address:
    """Its text is what travels; the secret is not shown in errors."""

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


class StoreParts:
    """Of one sender's store: the parts of syncs that have ended, deleted.

    Of a sync that failed, the part stays until a later one has ended: ranks that still wait look in
    it for who has come. A rank that is late may write there after that, so each later one looks.
    """

    def __init__(self) -> None:
        """No sync has failed."""
        self._failed: list[Address] = []

    def failed(self, address: Address | None) -> None:
        """This sync has failed, if it had begun."""
        if address is not None:
            self._failed.append(address)

    def delete(self, address: Address, store: dist.TCPStore) -> None:
        """This sync has ended well."""
        for ended in (address, *self._failed):
            ended.part_of(store).delete_all()


def open_weight_store(timeout: timedelta = FORM_TIMEOUT) -> tuple[dist.TCPStore, str]:
    """A store on a free port, and its place `host:port`; on one machine that is loopback."""
    host = LOOPBACK if os.environ.get("GLOO_SOCKET_IFNAME") == "lo" else _own_address()
    store = open_store(host)
    store.set_timeout(timeout)
    return store, f"{host}:{store.port}"


def _own_address() -> str:
    """The one from which this node reaches rank 0's: a sender may be on another."""
    with suppress(OSError):  # no name of that kind, or no way there
        master = os.environ.get("MASTER_ADDR", "")
        family, kind, _, _, place = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as toward:
            toward.connect(place)  # nothing is sent: the system only chooses the way
            return str(toward.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())


def join_weight_store(place: str, timeout: timedelta = FORM_TIMEOUT) -> dist.TCPStore:
    """The sender's store, from another process."""
    host, _, port = place.rpartition(":")
    try:
        return dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
    except (RuntimeError, dist.DistError) as error:
        raise WeightSyncError(
            f"weight sync: cannot reach the sender's store at {place}: {str(error).splitlines()[0]}"
        ) from error
