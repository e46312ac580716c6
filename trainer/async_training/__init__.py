"""Asynchronous PPO: generators fill a bounded queue while trainers train on its samples.

    verl-like async async_training.generators=2 async_training.max_staleness=1 ...

`step.AsyncTrainer` is the loop around PPO's stages.
"""
