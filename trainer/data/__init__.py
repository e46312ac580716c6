"""Prompts from files to batches, and how many of them each part of a step takes."""
