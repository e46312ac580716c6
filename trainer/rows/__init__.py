"""What recipes that train one role on rows of files have in common: SFT, reward models, DPO."""
