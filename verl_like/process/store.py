"""The store in which the ranks of a group meet. It listens at one address, not on all."""

from __future__ import annotations

import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined]


def open_store(address: str, port: int = 0) -> TCPStore:
    """A store's server at this address; by itself it would listen on every interface.

    OSError: the port cannot be bound there.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, port), family=family)
    port = listening.getsockname()[1]
    fd = listening.detach()
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
