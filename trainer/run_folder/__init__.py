"""A run's folder and its files: checkpoints, metrics, timeline, progress."""
