"""Runs from Python: `GRPO("gpt2", prompts, reward, lr=1e-6, n=8).fit(steps=20)`.

A setting of such a call is a flat name (`trainer.api.flat_names`) or a key of the recipe's
configuration, so the command line can start the same run (`.command()`), but without callbacks.
`trainer.api.recipes` has the classes.
"""
