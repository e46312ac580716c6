"""Asynchronous PPO: generators generate, a bounded queue, trainers.

    verl-like async async_training.generators=2 async_training.trainers=1
    async_training.max_staleness=1 ...

`step.AsyncTrainer` is the loop around PPO's stages.
"""
