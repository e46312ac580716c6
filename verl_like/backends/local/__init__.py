"""The backend without a cluster: the caller's own thread, or child processes."""
