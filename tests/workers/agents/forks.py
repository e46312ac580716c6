"""An environment whose process gets no second fork."""

# mypy: ignore-errors

import errno
import os

from tests.workers.agents.games import Count  # noqa: F401

NUMBERS, fork = [], os.fork


def failing():
    NUMBERS.append(len(NUMBERS))
    if len(NUMBERS) == 2:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()


os.fork = failing
