"""Prompts rolled out and scored: what PPO shares with the recipes that train nothing."""
