"""The validation of a model by itself: samples of every prompt, scored, and nothing trained."""
