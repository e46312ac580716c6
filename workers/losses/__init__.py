"""Losses of actor and critic: pure functions of tensors and a mask.

A policy loss is one file (`vanilla.py`, `gspo.py`, …), found by its name in
`workers.losses.registry.POLICY_LOSSES`: a file that is put here is imported here, so adding a loss
is adding a file. What they share stands beside them: `token_loss` (what makes a policy loss of a
function of tokens), `aggregate` (token losses to one number), `importance_ratio`, `covariance`; so
do `value`, `kl`, `correction` and `rejection` (weights and rejection of tokens that another policy
drew) and `mismatch` (how far that policy is off).

Tensors are [rows, response tokens]. **Sums over parts are exact.** A worker sees a micro-batch, a
part of a global mini-batch: it passes the mini-batch's denominators, and then losses, gradients and
metrics of all micro-batches on all ranks *add up* to those of the whole mini-batch. Without them a
call stands for a whole mini-batch. (`clip_cov` and `kl_cov` compare a mini-batch's tokens with each
other: the driver has chosen among them before.) Nothing outside the mask reaches a loss or a
gradient, and an empty mask gives zero for both.
"""

import importlib
import pkgutil

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
