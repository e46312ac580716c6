"""PPO whose samples are made beside the training: makers, a bounded buffer between, trainers.

    verl-like detached detached.makers=2 detached.trainers=1 detached.max_staleness=1 ...

`step.DetachedTrainer` is the trainer: PPO's step, whose samples come from `source.DetachedSource`.
"""
