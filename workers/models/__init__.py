"""Hugging Face models: where they are, how they are built, filled with weights and adapted."""
