"""Advantage estimators: they turn rewards into the weight of every token's gradient.

An estimator is a function that registers itself by name in
`trainer.ppo.advantages.registry.ADVANTAGE_ESTIMATORS`. All files of the folder are imported, so you
add an estimator by adding a file. `estimators` has ours, and what they share: `Groups` of the
samples of a prompt, discounted sums over a row, whitening. The names of an estimator's parameters
say which columns of the batch it gets (`trainer.ppo.advantage_inputs`).

Tensors have the shape [rows, response tokens], unless an estimator's docstring names another shape.
They are finite outside the mask as well. Rows with equal values of `index` are samples of one
prompt. Every estimator returns (advantages, returns), zero outside the mask. A masked-out token in
the middle of a row, such as a tool's output, is skipped: its neighbors count as consecutive.
"""

import importlib
import pkgutil

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
