"""The stores in which processes meet: each listens at one address, and strangers say nothing there.

    server = open_store("127.0.0.1")                          # in one process
    store = SignedStore(server, secret, "sync 3")             # in each that has the secret
    store.set("joined/1", "here")

Torch's `TCPStore` takes what anyone sends who can reach its port. In a `SignedStore` names are
hashed and values are signed with a secret that the driver gives out: what was written without it is
never looked for, or is refused. It hides nothing: a value can be read by whoever finds its name.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from verl_like.errors import WorkerError

SIGNATURE_BYTES = 16


def open_store(address: str, port: int = 0) -> TCPStore:
    """A store's server at this address; by itself it would listen on every interface.

    OSError: the port cannot be bound there.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, port), family=family)
    port = listening.getsockname()[1]
    fd = listening.detach()
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)


class SignedStore(Store):
    """A part of another store for those who have the secret; torch's groups form in it, too."""

    def __init__(self, store: TCPStore, secret: str, part: str) -> None:
        """`part` is a name that nothing else in `store` has; it is not hidden."""
        super().__init__()
        self._store, self._secret, self._prefix = store, secret, f"{part}/"

    @property
    def host(self) -> str:
        """Of the `TCPStore` that this is a part of."""
        return self._store.host

    @property
    def port(self) -> int:
        """Of the `TCPStore` that this is a part of."""
        return self._store.port

    def over(self, store: TCPStore) -> SignedStore:
        """This part over another connection to the store.

        A request that waits holds up all other requests on its connection.
        """
        other = SignedStore(store, self._secret, "")
        other._prefix = self._prefix
        return other

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value, signed for its name."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        signed = self.sign(b"value", key.encode(), content) + content
        self._store.set(self._name(key), signed)  # type: ignore[arg-type]  # bytes it takes, too

    def get(self, key: str) -> bytes:
        """The value, waited for. WorkerError: whoever wrote it does not have the secret."""
        signed: bytes = self._store.get(self._name(key))
        given, content = signed[:SIGNATURE_BYTES], signed[SIGNATURE_BYTES:]
        if not hmac.compare_digest(given, self.sign(b"value", key.encode(), content)):
            raise WorkerError(
                f"what the store holds as {key!r} was not written by a process of this run: its "
                "signature is wrong. Who else can reach the store's port?"
            )
        return content

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all of these are there; a `DistStoreError` after the timeout."""
        names = [self._name(key) for key in keys]
        limit = () if timeout is None else (timeout,)
        self._store.wait(names, *limit)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of these are there."""
        there: bool = self._store.check([self._name(key) for key in keys])
        return there

    def unsigned(self, name: str) -> PrefixStore:
        """A part for threads that must not call into Python, as NCCL's: values are not signed."""
        return PrefixStore(self._name(name), self._store)

    def delete_all(self) -> None:
        """Take everything of this part out of the store."""
        for name in self._store.list_keys():
            if name.startswith(self._prefix):
                self._store.delete_key(name)

    def sign(self, *parts: bytes) -> bytes:
        """Hash of these bytes that only who has the secret can make, for this part alone."""
        signed = hashlib.blake2b(key=self._secret.encode(), digest_size=SIGNATURE_BYTES)
        for part in (self._prefix.encode(), *parts):
            signed.update(len(part).to_bytes(8, "little") + part)
        return signed.digest()

    def _name(self, key: str) -> str:
        return self._prefix + self.sign(b"name", key.encode()).hex()
