"""The load-balancing loss of a mixture of experts: `actor.router_aux_loss_coef`.

For one layer with E experts it is E x the sum over experts of f x p: f is the share of tokens that
chose the expert (no gradient), p the mean over tokens of the router's softmax. Layers are averaged.
Both are means over the tokens of the whole mini-batch, of all ranks, so f is counted first, in a
forward pass of its own without gradients; then every micro-batch adds its tokens' share of p, and
neither the cut nor the number of ranks changes the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from verl_like.errors import ConfigError
from workers.models.causal_lm import body_of
from workers.models.folder import model_folder
from workers.models.hf_config import read_hf_config
from workers.models.precision import computing_in
from workers.training.engine import LossFn, TrainEngine
from workers.training.lm_head import DEFAULT, Wanted
from workers.training.microbatch import Budget, Columns, MiniBatch, RowColumns, all_reduce, passes
from workers.training.packing import Feed

if TYPE_CHECKING:
    from verl_like.process.worker import Worker


class BalancedEngine(TrainEngine):
    """A training engine whose loss has the routers' load-balancing loss in it."""

    def __init__(self, *args: Any, router_aux_loss_coef: float, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.router_aux_loss_coef = router_aux_loss_coef
        self.router_logits: list[Tensor] = []
        """[tokens, experts] of every layer, of the pass that was run last."""
        self.fed: Feed | None = None
        """What went into that pass."""

    def build(self, worker: Worker, total_steps: int = 0) -> None:
        """Load the model, and listen to its routers."""
        refuse_stages(self.sharding.pp)
        super().build(worker, total_steps)
        if not hasattr(self.module, "router_aux_loss_coef"):
            raise ConfigError(no_routers(self.module.config.model_type))
        self.num_chosen: int = self.module.num_experts_per_tok
        body = body_of(self.module)
        body.register_forward_pre_hook(_ask_routers, with_kwargs=True)
        body.register_forward_hook(self._note_routers)

    def _note_routers(self, _: nn.Module, __: Any, output: Any) -> None:
        if output.router_logits is not None:  # the head in chunks runs without the body
            self.router_logits = [logits.flatten(0, -2).float() for logits in output.router_logits]

    def outputs(self, columns: RowColumns, *args: Any, **wanted: Any) -> RowColumns:
        """One forward pass, whose router logits are kept, those of real tokens alone."""
        found = super().outputs(columns, *args, **wanted)
        if self.fed is not None and self.fed.is_real is not None:
            self.router_logits = [logits[self.fed.is_real] for logits in self.router_logits]
        return found

    def feed(self, columns: RowColumns) -> Feed:
        """The arguments of one pass, which are noted."""
        self.fed = super().feed(columns)
        return self.fed

    def accumulate(
        self,
        batch: MiniBatch,
        budget: Budget,
        loss_fn: LossFn,
        wanted: Wanted = DEFAULT,
        beside: Sequence[tuple[MiniBatch, LossFn]] = (),
    ) -> dict[str, float]:
        """Add the gradients of the load-balancing loss, too; it is the metric `router_aux_loss`."""
        counts, num_tokens = self.count_choices(batch, budget)
        shares = counts / max(num_tokens, 1)

        balanced = partial(self._balanced, loss_fn, shares, num_tokens)
        return super().accumulate(batch, budget, balanced, wanted, beside)

    def _balanced(
        self,
        loss_fn: LossFn,
        shares: Tensor,
        num_tokens: int,
        outputs: Columns,
        columns: Columns,
        batch: MiniBatch,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch, and the load-balancing loss of the pass that was just run."""
        loss, metrics = loss_fn(outputs, columns, batch)
        if not columns["response_mask"].any():  # a dummy's token is nobody's
            return loss, {**metrics, "router_aux_loss": loss.new_zeros(())}

        auxiliary = load_balancing_loss(self.router_logits, shares, num_tokens)
        if self.fed is not None and self.fed.split is not None:
            auxiliary = self.fed.split.add_up(auxiliary)
        total = loss + self.router_aux_loss_coef * auxiliary
        return total, {**metrics, "router_aux_loss": auxiliary}

    @torch.no_grad()
    def count_choices(self, batch: MiniBatch, budget: Budget) -> tuple[Tensor, int]:
        """([layers, experts] tokens that chose each expert, tokens) of the mini-batch, all ranks.

        A token counts once for every expert that it chose.
        """
        total: Tensor | None = None
        cuts = self._cut(batch.columns, budget)
        data_ranks = self.groups.data
        for columns, num_real, _ in passes(batch.columns, cuts, data_ranks, self.device):
            with computing_in(self.module, self.cast):
                self.outputs(columns)
            counted = torch.stack([self._counts(logits) for logits in self.router_logits])
            counted = counted if num_real else torch.zeros_like(counted)
            total = counted if total is None else total + counted

        assert total is not None, "there is one pass at least"
        all_reduce(total, self.groups.loss)
        return total[:, :-1], int(total[0, -1])

    def _counts(self, logits: Tensor) -> Tensor:
        """Tokens that chose each expert of a layer, then all of its tokens."""
        num_experts = logits.shape[-1]
        chosen = logits.topk(self.num_chosen, dim=-1).indices.flatten()
        counts = torch.bincount(chosen, minlength=num_experts + 1).double()
        counts[-1] = len(logits)
        return counts


def _ask_routers(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Asked of the whole model, it would also compute a loss of its own, in gigabytes."""
    return args, {**kwargs, "output_router_logits": True}


def load_balancing_loss(logits: list[Tensor], shares: Tensor, num_tokens: int) -> Tensor:
    """The share of these tokens in the loss of a mini-batch of `num_tokens`.

    `logits` are [tokens, experts] of every layer, `shares` [layers, experts] the part of the
    mini-batch's tokens that chose each expert.

    Source: Switch Transformer, arXiv 2101.03961, section 2.2, with every choice of a token counted
    """
    total = logits[0].new_zeros(())
    for layer, share in zip(logits, shares.to(logits[0].dtype), strict=True):
        mass = layer.softmax(dim=-1).sum(dim=0) / num_tokens
        total = total + len(share) * (share * mass).sum()
    return total / len(logits)


def refuse_stages(pp: int) -> None:
    """Refuse layers on several ranks: the loss is computed from the routers of all."""
    if pp > 1:
        raise ConfigError(
            "actor.router_aux_loss_coef is of the routers of all layers, and "
            f"actor.parallel.pp={pp} puts layers on several ranks. Leave it at 0, or share the "
            "weights by actor.parallel.shard, sp, tp or ep."
        )


def check_routers(path: str, pp: int = 1) -> None:
    """Refuse a model whose class knows no load-balancing loss, or whose layers are apart."""
    refuse_stages(pp)
    config = read_hf_config(model_folder(path, weights=False))
    if not hasattr(config.get_text_config(), "router_aux_loss_coef"):
        raise ConfigError(no_routers(config.model_type))


def no_routers(model_type: str) -> str:
    """Why a model has no such loss."""
    return (
        "actor.router_aux_loss_coef is set, and transformers has no load-balancing loss for model "
        f"type {model_type!r}: it has no experts, or balances them otherwise. Leave it at 0."
    )
