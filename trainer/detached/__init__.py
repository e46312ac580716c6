"""Asynchronous PPO: makers generate, a bounded queue, trainers.

    verl-like detached detached.makers=2 detached.trainers=1 detached.max_staleness=1 ...

`step.DetachedTrainer` is the loop around PPO's stages.
"""
