"""OpenRLHF's `train_ppo_ray`, translated into `verl-like ppo`."""
