"""The backend without a cluster: one process is the caller's own thread, several are child processes."""
