"""Command lines of other frameworks, translated into ours: `verl-like migrate`."""
