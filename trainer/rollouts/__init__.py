"""Generation and scoring of samples, shared by PPO and recipes that do not train."""
