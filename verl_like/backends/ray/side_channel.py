"""A process's door: a port at which its driver reaches it past the queue of its calls.

`answer` opens it in the worker and a thread lets in everybody who has the key; `knock` goes there
and says what for: the process's stacks (`ask_stacks`), a line for small calls, or a call past the
queue (`verl_like.backends.ray.line`).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

logger = logging.getLogger(__name__)
STACKS, LINE, PAST_QUEUE = b"S", b"L", b"P"
_KNOCK_S = 5.0


@dataclass(frozen=True)
class Door:
    """Where to knock, and the key."""

    address: str
    port: int
    key: bytes


def answer(address: str, visits: Mapping[bytes, Callable[[socket.socket], None]]) -> Door:
    """Open a door at this address: a visitor's word says which of the functions gets the socket."""
    listening = socket.create_server((address, 0))
    door = Door(address, listening.getsockname()[1], secrets.token_bytes(16))

    def serve() -> None:
        while True:
            caller, _ = listening.accept()
            try:
                caller.settimeout(_KNOCK_S)
                said = caller.recv(len(door.key) + 1, socket.MSG_WAITALL)
                if secrets.compare_digest(said[:-1], door.key):
                    visits[said[-1:]](caller)
                    continue
            except Exception as error:  # noqa: BLE001 - one visit must not close the door to others
                logger.warning("a visit failed: %s: %s", type(error).__name__, error)
            caller.close()

    threading.Thread(target=serve, name="door", daemon=True).start()
    return door


def knock(door: Door, word: bytes, seconds: float) -> socket.socket:
    """A socket to whoever answers to that word. OSError: nobody does."""
    caller = socket.create_connection((door.address, door.port), seconds)
    caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    caller.sendall(door.key + word)
    return caller


def tell(text: Callable[[], str]) -> Callable[[socket.socket], None]:
    """A visit at which a text is told."""

    def visit(caller: socket.socket) -> None:
        with caller:
            caller.sendall(text().encode())

    return visit


def ask_stacks(door: Door, seconds: float) -> str | None:
    """What a process tells at its door; None if it does not in that time."""
    told = b""
    with contextlib.suppress(OSError), knock(door, STACKS, seconds) as caller:
        while chunk := caller.recv(65536):
            told += chunk
    return told.decode() or None
