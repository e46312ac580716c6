"""`verl-like bisect`: the first number that differs between two runs, and why."""
