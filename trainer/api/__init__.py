"""Runs from Python: `GRPO("gpt2", prompts, reward, lr=1e-6, n=8).fit(steps=20)`.

A keyword of such a call is a flat name (`trainer.api.flat_names`) or a key of the recipe's
configuration, so the same run can be started from the command line (`.command()`).
`trainer.api.recipes` has a class for each recipe.
"""
