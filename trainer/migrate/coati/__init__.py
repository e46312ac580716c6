"""ColossalChat's PPO scripts, translated: `train_prompts.py`, and makers and trainers on Ray."""
