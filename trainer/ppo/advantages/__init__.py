"""Advantage estimators: from rewards to the weight of every token's gradient.

An estimator is one file (`gae.py`, `grpo.py`, …) that registers its function by name in
`trainer.ppo.advantages.registry.ADVANTAGE_ESTIMATORS`. All files of the folder are imported, so you
add an estimator by adding a file. Shared code is in `groups` (samples of one prompt), `returns`
(discounted sums over a row) and `whiten`. An estimator gets a batch's columns by the names of its
parameters (`trainer.ppo.compute_advantage`).

Tensors are [rows, response tokens], and finite outside the mask, too. Rows with equal values of
`index` are samples of one prompt. Every estimator returns (advantages, returns), zero outside the
mask. A token outside the mask inside a row (a tool's answer) is skipped: its neighbours count as
consecutive.
"""

import importlib
import pkgutil

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
