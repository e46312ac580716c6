"""Runs from Python: `PPO(model=..., prompts=[...], reward=function).fit(steps=20)`.

A keyword of such a call is a key of the recipe's configuration, so that the same run starts from
the command line (`.command()`). `trainer.api.recipes` has a class for each recipe.
"""
