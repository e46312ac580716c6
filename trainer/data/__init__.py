"""Prompts, texts and pairs: from files to batches."""
