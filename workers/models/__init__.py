"""Hugging Face models: locate, build, load and adapt them."""
