"""What the roles stand on: the training engine, the rollout engines, and their parts."""
