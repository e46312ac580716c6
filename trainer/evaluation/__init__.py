"""Validate a model by itself: sample every prompt, score the samples, and train nothing."""
