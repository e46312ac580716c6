"""Transfer weights from the trainer to the rollout: versioned, verified, two-phase."""
