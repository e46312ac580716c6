"""Generation and scoring of prompts, which PPO shares with recipes without training."""
