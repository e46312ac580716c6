"""Stores through which processes coordinate: one address each, writable only with a secret.

    server = open_store("127.0.0.1")                          # in one process
    store = SignedStore(server, secret, "sync 3")             # in each that has the secret
    store.set("joined/1", "here")

Torch's `TCPStore` accepts values from everyone who can reach its port. A `SignedStore` hashes names
and signs values with a secret from the driver, so a value that was written without the secret is
never read, or is rejected. Values are not encrypted: everyone who knows a name can read its value.
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
    """Return a store's server that listens only at this address, and not on every interface.

    Raise OSError if the port cannot be bound.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, port), family=family)
    port = listening.getsockname()[1]
    fd = listening.detach()
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)


class SignedStore(Store):
    """A part of a store for processes with the secret; torch's process groups can use it."""

    def __init__(self, store: TCPStore, secret: str, part: str) -> None:
        """`part` is a unique name in `store`; it is not secret."""
        super().__init__()
        self._store, self._secret, self._prefix = store, secret, f"{part}/"

    @property
    def host(self) -> str:
        """The host of the underlying `TCPStore`."""
        return self._store.host

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value with a signature over its name and content."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        signed = self.sign(b"value", key.encode(), content) + content
        self._store.set(self._name(key), signed)  # type: ignore[arg-type]  # bytes it takes, too

    def get(self, key: str) -> bytes:
        """Wait for a value and return it; raise `WorkerError` if its writer lacks the secret."""
        signed: bytes = self._store.get(self._name(key))
        signature, content = signed[:SIGNATURE_BYTES], signed[SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self.sign(b"value", key.encode(), content)):
            raise WorkerError(
                f"the value of {key!r} in the store was not written by a process of this "
                "run: its signature is wrong. Check who else can reach the store's port."
            )
        return content

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for all of these keys, or raise a `DistStoreError` after the timeout."""
        names = [self._name(key) for key in keys]
        limit = () if timeout is None else (timeout,)
        self._store.wait(names, *limit)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of these keys exist."""
        exist: bool = self._store.check([self._name(key) for key in keys])
        return exist

    def unsigned(self, name: str) -> PrefixStore:
        """Return a namespace without signatures, for threads that must not call Python (NCCL's)."""
        return PrefixStore(self._name(name), self._store)

    def delete_all(self) -> None:
        """Delete all keys of this namespace from the store."""
        for name in self._store.list_keys():
            if name.startswith(self._prefix):
                self._store.delete_key(name)

    def sign(self, *parts: bytes) -> bytes:
        """Return a hash of these bytes that only processes with the secret can make."""
        signed = hashlib.blake2b(key=self._secret.encode(), digest_size=SIGNATURE_BYTES)
        for part in (self._prefix.encode(), *parts):
            signed.update(len(part).to_bytes(8, "little") + part)
        return signed.digest()

    def _name(self, key: str) -> str:
        return self._prefix + self.sign(b"name", key.encode()).hex()
