"""The common part of recipes that train one role on rows of files: SFT, reward models, DPO."""
