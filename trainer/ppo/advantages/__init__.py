"""Advantage estimators: from rewards to what every token's gradient is weighed with.

An estimator is one file (`gae.py`, `grpo.py`, …), found by its name in
`trainer.ppo.advantages.registry.ADVANTAGE_ESTIMATORS`: a file that is put here is imported here, so
adding an estimator is adding a file. What they share stands beside them: `groups` (samples of one
prompt), `returns` (discounted sums over a row) and `whiten`. An estimator gets a batch's columns by
the names of its parameters (`trainer.ppo.compute_advantage`).

Tensors are [rows, response tokens], finite outside the mask too; `index` says by equal values which
rows are samples of one prompt. Every estimator returns (advantages, returns), zero outside the
mask. A token outside the mask inside a row (a tool's answer) is skipped: its neighbours follow each
other.
"""

import importlib
import pkgutil

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
