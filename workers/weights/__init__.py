"""Weights on their way from the trainer to the rollout: versioned, verified, two-phase."""
