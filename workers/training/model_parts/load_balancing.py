"""The load-balancing loss of a mixture of experts: `actor.router_aux_loss_coef`.

For one layer with E experts, it is E times the sum over experts of f times p. Here f is the
fraction of the tokens that chose the expert (without gradient), and p is the mean over tokens of
the router's probability for it. The loss is averaged over layers. Both f and p are means over the
tokens of the whole mini-batch on all ranks, so a separate forward pass without gradients counts f
first. Then every micro-batch adds the contribution of its tokens to p, and neither the split nor
the number of ranks changes the loss.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from verl_like.errors import ConfigError
from workers.models.causal_lm import body_of
from workers.models.folder import model_folder, read_hf_config
from workers.models.precision import computing_in
from workers.training.loss import Loss
from workers.training.microbatch import Columns, MicroBatches, MiniBatch, RowColumns, all_reduce
from workers.training.passes.forward_backward import Reading
from workers.training.passes.packing import Feed
from workers.training.sharded_model import Model, ModelPart

if TYPE_CHECKING:
    from workers.config import ParallelConfig

COEF = "actor_rollout_ref.actor.router_aux_loss_coef"


class LoadBalancing(ModelPart):
    """Adds the routers' load-balancing loss to the loss of a mini-batch."""

    coef: float

    def __init__(self) -> None:
        self.router_logits: list[Tensor] = []
        """Router logits of the last pass, [real tokens, experts] per layer."""
        self.feed: Feed | None = None
        """The arguments of the last pass."""
        self.plain: Loss | None = None
        """The loss of the mini-batch without the routers' loss; None if it is not balanced."""
        self.choices = ExpertLoad(None, 0, 0)
        self.total: Tensor | float = 0.0

    def check(self, model: Model) -> None:
        """Reject pipeline schedules with which transformers does not report all routers."""
        _reject_interleaved(model.sharding.pp, model.sharding.pp_schedule)

    def finish(self, model: Model) -> None:
        """Hook the routers."""
        if not hasattr(model.module, "router_aux_loss_coef"):
            raise ConfigError(missing_routers(model.module.config.model_type))
        self.num_chosen: int = model.module.num_experts_per_tok
        self.coef = model.spec.router_aux_loss_coef
        body = body_of(model.module)
        body.register_forward_pre_hook(_ask_routers, with_kwargs=True)
        body.register_forward_hook(self._note_routers)

    def _note_routers(self, _: nn.Module, __: Any, output: Any) -> None:
        if output.router_logits is None:  # the chunked head runs without the body
            return
        self.router_logits = [logits.flatten(0, -2).float() for logits in output.router_logits]
        if self.feed is not None and self.feed.is_real is not None:
            self.router_logits = [logits[self.feed.is_real] for logits in self.router_logits]

    def fed(self, feed: Feed) -> None:
        """Record the arguments of a pass."""
        self.feed, self.router_logits = feed, []

    def extend_loss(
        self, model: Model, reading: Reading, micro_batches: MicroBatches, loss: Loss
    ) -> Loss:
        """Return the loss with the routers' loss, unless it is not to be balanced.

        The expert choices for the tokens of the mini-batch on all ranks are counted first. A token
        counts once for every expert that it chose.
        """
        self.plain = None
        if not loss.is_balanced:
            return loss
        counts: list[Tensor] = []
        with torch.no_grad(), computing_in(model.module, model.cast):
            for _, num_real in model.layers.forward(reading, micro_batches):
                if not self.router_logits:
                    continue
                rows = []
                for logits in self.router_logits:
                    num_experts = logits.shape[-1]
                    chosen = logits.topk(self.num_chosen, dim=-1).indices.flatten()
                    rows.append(torch.bincount(chosen, minlength=num_experts + 1).double())
                    rows[-1][-1] = len(logits)  # the last number counts all tokens
                counted = torch.stack(rows)
                counts.append(counted if num_real else torch.zeros_like(counted))
        num_layers, num_tokens, shares = 0, 0, None
        if counts:
            total = all_reduce(torch.stack(counts).sum(dim=0), model.groups.loss)
            num_layers, num_tokens = len(total), int(total[0, -1])
            shares = total[:, :-1] / max(num_tokens, 1)
        of_all = all_reduce(torch.tensor([num_layers], device=model.device), model.groups.pp)
        self.choices = ExpertLoad(shares, num_tokens, int(of_all))
        self.plain, self.total = loss, 0.0
        return replace(loss, compute=self.compute, stage_terms=self.stage_terms)

    def compute(
        self, outputs: Columns, columns: Columns, batch: MiniBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the micro-batch's contribution to the sum of both losses."""
        assert self.plain is not None, "extend_loss comes first"
        loss, metrics = self.plain.compute(outputs, columns, batch)
        for auxiliary in self._pass_terms(bool(columns["response_mask"].any())):
            loss = loss + auxiliary
        return loss, metrics

    def stage_terms(self, columns: RowColumns) -> list[Tensor]:
        """Return the term that a stage before the last adds to the loss."""
        return self._pass_terms(bool((columns["response_mask"].values != 0).any()))

    def _pass_terms(self, is_real: bool) -> list[Tensor]:
        """Return the loss of this rank's layers; an empty list for a dummy pass."""
        choices = self.choices
        if choices.shares is None or not is_real:
            return []
        auxiliary = load_balancing_loss(
            self.router_logits, choices.shares, choices.num_tokens, choices.num_layers
        )
        if self.feed is not None and self.feed.split is not None:
            auxiliary = self.feed.split.add_up(auxiliary)
        self.total = self.total + auxiliary.detach()
        return [self.coef * auxiliary]

    def metrics(self, model: Model) -> dict[str, Tensor]:
        """Return `router_aux_loss` of the mini-batch, if its loss was balanced."""
        if self.plain is None:
            return {}
        total = torch.as_tensor(self.total, dtype=torch.float32, device=model.device)
        return {"router_aux_loss": all_reduce(total, model.groups.batch)}


class ExpertLoad(NamedTuple):
    """Expert choices for the tokens of a mini-batch, in the layers of this rank."""

    shares: Tensor | None
    """[layers, experts]: fraction of the tokens that chose each expert; None without layers."""
    num_tokens: int
    num_layers: int
    """Number of layers with experts, over all ranks."""


def _ask_routers(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Request router logits from the body: the whole model would also compute its own auxiliary
    loss.
    """
    return args, {**kwargs, "output_router_logits": True}


def load_balancing_loss(
    logits: list[Tensor], shares: Tensor, num_tokens: int, num_layers: int
) -> Tensor:
    """Return the contribution of these tokens to the loss of a mini-batch of `num_tokens` tokens.

    `logits` are [tokens, experts] for some of the `num_layers` layers. `shares` [layers, experts]
    is the fraction of the tokens of the mini-batch that chose each expert.

    Source: Switch Transformer, arXiv 2101.03961, section 2.2, where every choice of a token counts
    """
    total = logits[0].new_zeros(())
    for layer, share in zip(logits, shares.to(logits[0].dtype), strict=True):
        mass = layer.softmax(dim=-1).sum(dim=0) / num_tokens
        total = total + len(share) * (share * mass).sum()
    return total / num_layers


def _reject_interleaved(pp: int, schedule: str) -> None:
    """Reject two stages per rank: transformers hooks only the routers of the first pass."""
    if pp > 1 and schedule == "interleaved":
        raise ConfigError(
            f"{COEF} does not work with two pipeline stages per rank. Set "
            "actor_rollout_ref.actor.parallel.pp_schedule=1f1b or gpipe, or leave the coefficient "
            "at 0."
        )


def check_routers(path: str, parallel: ParallelConfig | None = None) -> None:
    """Reject a model class without a load-balancing loss, or a schedule that hides routers."""
    if parallel is not None:
        _reject_interleaved(parallel.pp, parallel.pp_schedule)
    config = read_hf_config(model_folder(path, weights=False))
    if not hasattr(config.get_text_config(), "router_aux_loss_coef"):
        raise ConfigError(missing_routers(config.model_type))


def missing_routers(model_type: str) -> str:
    """Return the error message for a model type without a load-balancing loss."""
    return (
        f"{COEF} is set, but transformers has no load-balancing loss for model type "
        f"{model_type!r}: it has no experts, or balances them differently. Leave the coefficient "
        "at 0."
    )
