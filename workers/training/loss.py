"""A named loss, whose gradients a training engine computes.

    loss = Loss("lm", compute, columns=("weights",))
    engine.forward_backward(batch, budget, loss)

`compute(outputs, columns, batch)` gets the model's outputs of a micro-batch, the columns of the
micro-batch, and the counts of the whole mini-batch. It returns the micro-batch's contribution to
the loss and to every metric: sums divided by counts of the whole mini-batch. Contributions are
added up over micro-batches and ranks, so neither the split nor the number of ranks changes a result
beyond float rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from workers.losses.aggregate import LossAndMetrics, compute_lm_loss
from workers.training.microbatch import Columns, MiniBatch, RowColumns
from workers.training.passes.lm_head import DEFAULT, TokenOutputs

LossFn = Callable[[Columns, Columns, MiniBatch], LossAndMetrics]


@dataclass(frozen=True)
class Loss:
    """A named loss and its inputs.

    Example:

        def compute(outputs, columns, batch):
            loss = (outputs["scores"] * columns["weights"]).sum() / batch.num_rows
            return loss, {"loss": loss}

        loss = Loss("weighted", compute, columns=("weights",))

    Args:
        name: the loss in messages.
        compute: `compute(outputs, columns, batch)` -> (loss, metrics) of a micro-batch.
        columns: columns that it reads in addition to `responses` and `response_mask`.
        token_outputs: outputs of the model that it reads in addition to log-probs.
        extra_metrics: returns metrics measured during the passes, combined over the ranks of a
            group.
        stage_terms: returns the terms that layers before the last pipeline stage add to the loss
            of a micro-batch.
        is_balanced: whether the load-balancing loss of a mixture of experts is added.
    """

    name: str
    compute: LossFn
    columns: Sequence[str] = ()
    token_outputs: TokenOutputs = DEFAULT
    extra_metrics: Callable[[dist.ProcessGroup | None], dict[str, float]] | None = None
    stage_terms: Callable[[RowColumns], list[Tensor]] | None = None
    is_balanced: bool = True


def lm_loss(coef: float = 1.0, metric: str = "loss", **settings: Any) -> Loss:
    """Return the language-model loss times `coef`; the metric is the unscaled loss."""

    def compute(outputs: Columns, columns: Columns, batch: MiniBatch) -> LossAndMetrics:
        mask = columns["response_mask"]
        loss = compute_lm_loss(outputs["log_probs"], mask, **batch.denominators)
        return coef * loss, {metric: loss}

    return Loss("lm", compute, **settings)
