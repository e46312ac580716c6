"""Run blocking calls in daemon threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def in_daemon(name: str, call: Callable[..., T], *arguments: Any) -> Future[T]:
    """Run a call in a daemon thread of this name, and return its future.

    Unlike the threads of an executor, it does not keep the process from ending.
    """
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:  # noqa: BLE001 - raised by result()
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
