"""What a Ray daemon of the tests runs for a worker: it asks for a forked process, and ends.

Who forks is in `tests/forked_ray.py`. Nothing is imported here that takes long.
"""

import os
import pickle
import socket
import sys

ADDRESS = "TESTS_FORKED_RAY"
"""The environment variable with the path of the socket at which a fork is asked for."""

if __name__ == "__main__":
    request = pickle.dumps((sys.argv[1:], dict(os.environ), os.getcwd()))
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[ADDRESS])
        socket.send_fds(connection, [len(request).to_bytes(8, "little")], [0, 1, 2])
        connection.sendall(request)
        connection.recv(1)  # until the process is there
