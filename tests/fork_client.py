"""Request a forked process from the server of `tests/fork_server.py`, instead of starting one.

    python fork_client.py ARGUMENTS             a Ray daemon's worker: this process ends at once
    python fork_client.py --python ARGUMENTS    what `python ARGUMENTS` does: same exit status;
                                                signals are passed to the fork
    python fork_client.py --tests ARGUMENTS     the same for a process that runs tests itself

This file imports nothing that takes long to load.
"""

import os
import pickle
import signal
import socket
import sys

ADDRESS = "TESTS_FORK_SERVER"
"""The environment variable with the path of the server's socket."""
AS_PYTHON, AS_TESTS = "--python", "--tests"
NUMBER = 8
"""Bytes of a number in a message."""
Request = tuple[list[str], dict[str, str], str]
"""Arguments, environment and folder of a process."""


def packed(number: int) -> bytes:
    """Return the message in its wire format."""
    return number.to_bytes(NUMBER, "little", signed=True)


def read_number(connection: socket.socket) -> int:
    """Return the other side's number; raise EOFError if nobody is there."""
    number = connection.recv(NUMBER, socket.MSG_WAITALL)
    if not number:
        raise EOFError("the other side has ended")
    return int.from_bytes(number, "little", signed=True)


def send(to: socket.socket, request: Request, descriptors: list[int]) -> None:
    """Send a request with open files; `receive` reads it."""
    message = pickle.dumps(request)
    socket.send_fds(to, [packed(len(message))], descriptors)
    to.sendall(message)


def receive(connection: socket.socket, num_descriptors: int) -> tuple[list[int], Request]:
    """Read a request; raise EOFError if nobody is there."""
    size, descriptors, _, _ = socket.recv_fds(connection, NUMBER, num_descriptors)
    left, message = int.from_bytes(size, "little"), b""
    while left and (part := connection.recv(left)):  # and no byte of the next request
        message += part
        left -= len(part)
    return descriptors, pickle.loads(message)


def main(arguments: list[str]) -> int:
    """Return the exit status."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[ADDRESS])
        send(connection, (arguments, dict(os.environ), os.getcwd()), [0, 1, 2])
        process = read_number(connection)
        if arguments[0] not in (AS_PYTHON, AS_TESTS):
            return 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: os.kill(process, number))
        return read_number(connection)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except EOFError:
        sys.exit(1)  # the tests are over, and nobody reads the status
