"""Plan GPUs: choose their number per role, and predict the seconds per step, before renting any."""
