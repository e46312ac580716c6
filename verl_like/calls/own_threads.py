"""The names of a worker process's threads that serve its driver beside its calls.

They sleep whatever a call does. So a look for deadlocks (`verl_like.calls.progress`) leaves out the
threads of these names: one with another name would count as a thread that still works.
"""

from __future__ import annotations

SIDE_CHANNEL = "side channel"
"""Waits for connections of a process on Ray."""
PIPE = "pipe"
"""Reads the messages to a child process."""
REQUEST = "request"
"""Answers one request, or those of one connection, past the queue of calls."""
COROUTINES = "coroutines"
"""Runs the loop of the methods that are coroutines."""
OWN_THREADS = (SIDE_CHANNEL, PIPE, REQUEST, COROUTINES)
