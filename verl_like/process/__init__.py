"""The host of roles in a worker process, the `Worker` base class, its info and its sandbox."""
