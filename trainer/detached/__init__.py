"""Detached makers and trainers: PPO whose generation does not wait for training."""
