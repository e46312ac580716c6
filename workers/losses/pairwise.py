"""Losses of a reward model: the chosen response of a pair should score above the rejected one.

    @REWARD_MODEL_LOSSES.register("mine")
    def compute_pairwise_loss_mine(gap): ...        # [pairs] -> [pairs]

The gap is chosen score - rejected score - margin.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from verl_like.registry import CallSignature, Registry, check_call

PairwiseLoss = Callable[[Tensor], Tensor]

REWARD_MODEL_LOSSES: Registry[PairwiseLoss] = Registry(
    "reward-model loss", partial(check_call, call=CallSignature("gap"))
)
"""Names for `loss` of a reward model's training: functions from score gaps [pairs] to losses.

    @REWARD_MODEL_LOSSES.register("squared")
    def compute_squared_loss(gap):
        return (1 - gap).square()

The gap is chosen score - rejected score - margin, [pairs]. A loss is [pairs], too.
"""


@REWARD_MODEL_LOSSES.register("log_sigmoid")
def compute_pairwise_loss_log_sigmoid(gap: Tensor) -> Tensor:
    """-log sigmoid(gap), the negative log-likelihood of the Bradley-Terry model.

    Source: InstructGPT, arXiv 2203.02155, equation 1
    """
    return -logsigmoid(gap)


@REWARD_MODEL_LOSSES.register("log_exp")
def compute_pairwise_loss_log_exp(gap: Tensor) -> Tensor:
    """log(1 + exp(-gap)): the same function as `log_sigmoid`, written differently.

    Source: the LogExpLoss of ColossalAI's chat application
    """
    return softplus(-gap)


def get_pairwise_loss(name: str) -> PairwiseLoss:
    """Return the loss registered under this name, or your function by its dotted path."""
    return REWARD_MODEL_LOSSES.look_up(name)


def compute_reward_loss(
    loss: PairwiseLoss, scores: Tensor, margins: Tensor, center_coef: float
) -> Tensor:
    """Return the loss [pairs] of `scores` [pairs, 2] and `margins` [pairs].

    `center_coef` times the square of the sum of a pair's scores is added, to pull scores toward
    zero.

    Source: the margin is from Llama 2, arXiv 2307.09288, equation 2; the centering is from arXiv
    2312.09244, equation 2
    """
    chosen, rejected = scores.unbind(dim=1)
    losses = loss(chosen - rejected - margins)
    return losses + center_coef * (chosen + rejected) ** 2 if center_coef else losses


def rank_accuracy(scores: Tensor) -> Tensor:
    """Return 1 for each pair whose chosen score is higher, 0.5 for a tie, otherwise 0."""
    gap = scores[:, 0] - scores[:, 1]
    return (gap > 0).to(scores.dtype) + 0.5 * (gap == 0)
