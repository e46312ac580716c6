"""A run's folder and what is written there: checkpoints, metrics, timeline, progress."""
