"""Losses: pure functions of tensors and a mask.

Policy losses are in `policy` (PPO's clip, CISPO, GSPO, Clip-Cov, …), registered by name in
`workers.losses.registry.POLICY_LOSSES`. Each is the formula of its paper, and autograd gives the
gradient. To add one, write a file and import it below. The policy losses use `registry.token_loss`
(turns a function of tokens into a policy loss), `aggregate` (reduces token losses to one number).

`correction` weights or rejects tokens that another policy sampled, and `kl` measures the difference
from that policy, and the KL to the reference. The critic's loss is in `value`, the losses of other
recipes in `aggregate` (language models) and `preference`, and those of a server's clients in
`token_sums`.

Tensors of a policy loss are [rows, response tokens]. **Sums over micro-batches are exact.** A
worker sees one micro-batch of a global mini-batch. It passes the denominators of the mini-batch to
the loss, so the losses, gradients and metrics of all micro-batches on all ranks *add up* to the
values of the whole mini-batch. Without denominators, a call treats its rows as a whole mini-batch.
(`clip_cov` and `kl_cov` compare the tokens of a mini-batch with each other, so the driver chooses
their tokens beforehand.) Values outside the mask never affect a policy loss or its gradient, and
with an empty mask both are zero.
"""

from workers.losses import policy  # noqa: F401  # registers them
