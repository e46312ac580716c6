"""Two small steps of a user's own job on this machine's CPU, before it gets any GPU."""
