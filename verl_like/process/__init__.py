"""What runs in a worker process: the host of its roles, the `Worker` base class, its facts."""
