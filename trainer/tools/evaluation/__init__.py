"""Evaluate a model without training: sample every prompt, and score the samples."""
