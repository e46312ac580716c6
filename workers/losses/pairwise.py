"""Losses of a reward model: a pair's chosen response is to score above its rejected one.

    @PAIRWISE_LOSSES.register("mine")
    def compute_pairwise_loss_mine(gap): ...        # [pairs] -> [pairs]

The gap is the chosen score less the rejected one, less the pair's margin.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from verl_like.registry import Registry
from verl_like.signatures import Call, check_call

PairwiseLoss = Callable[[Tensor], Tensor]

PAIRWISE_LOSSES: Registry[PairwiseLoss] = Registry(
    "pairwise loss", partial(check_call, call=Call("gap"))
)


@PAIRWISE_LOSSES.register("log_sigmoid")
def compute_pairwise_loss_log_sigmoid(gap: Tensor) -> Tensor:
    """-log sigmoid(gap), of the Bradley-Terry model.

    Source: InstructGPT, arXiv 2203.02155, equation 1
    """
    return -logsigmoid(gap)


@PAIRWISE_LOSSES.register("log_exp")
def compute_pairwise_loss_log_exp(gap: Tensor) -> Tensor:
    """log(1 + exp(-gap)): the same in other words.

    Source: the LogExpLoss of ColossalAI's chat application
    """
    return softplus(-gap)


def get_pairwise_loss(name: str) -> PairwiseLoss:
    """The loss of that name, or the user's own by its dotted path."""
    return PAIRWISE_LOSSES.look_up(name)


def compute_reward_loss(
    loss: PairwiseLoss, scores: Tensor, margins: Tensor, center_coef: float
) -> Tensor:
    """[pairs]: the loss of [pairs, 2] scores, and each pair's squared sum, which centres them.

    Source: the margin is Llama 2's, arXiv 2307.09288, equation 2; the centring that of arXiv
    2312.09244, equation 2
    """
    chosen, rejected = scores.unbind(dim=1)
    losses = loss(chosen - rejected - margins)
    return losses + center_coef * (chosen + rejected) ** 2 if center_coef else losses


def rank_accuracy(scores: Tensor) -> Tensor:
    """[pairs]: 1 where the chosen response has the higher score, a half where both are equal."""
    gap = scores[:, 0] - scores[:, 1]
    return (gap > 0).to(scores.dtype) + 0.5 * (gap == 0)
