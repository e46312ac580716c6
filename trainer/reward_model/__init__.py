"""Train a reward model on pairs of a chosen and a rejected response."""
