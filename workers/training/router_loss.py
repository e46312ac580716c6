"""The load-balancing loss of a mixture of experts: `actor.router_aux_loss_coef`.

For one layer with E experts it is E x the sum over experts of f x p: f is the share of tokens that
chose the expert (no gradient), p the mean over tokens of the router's softmax. Layers are averaged.
Both are means over the tokens of the whole mini-batch, of all ranks, so f is counted first, in a
forward pass of its own without gradients; then every micro-batch adds its tokens' share of p, and
neither the cut nor the number of ranks changes the loss.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from verl_like.batch.ragged import Column
from verl_like.errors import ConfigError
from workers.models.causal_lm import body_of
from workers.models.folder import model_folder
from workers.models.hf_config import read_hf_config
from workers.models.precision import computing_in
from workers.training.engine import TrainEngine
from workers.training.loss import Loss, LossFn
from workers.training.microbatch import Budget, Columns, MiniBatch, RowColumns, all_reduce, passes
from workers.training.packing import Feed

if TYPE_CHECKING:
    from verl_like.process.worker import Worker
    from workers.config import ParallelConfig


class BalancedEngine(TrainEngine):
    """A training engine whose loss has the routers' load-balancing loss in it."""

    def __init__(self, *args: Any, router_aux_loss_coef: float, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.router_aux_loss_coef = router_aux_loss_coef
        self.router_logits: list[Tensor] = []
        """[real tokens, experts] of every layer, of the pass that was run last."""
        self.fed: Feed | None = None
        """What went into that pass."""

    def build(self, worker: Worker, total_steps: int = 0) -> None:
        """Load the model, and listen to its routers."""
        _refuse_interleaved(self.sharding.pp, self.sharding.pp_schedule)
        super().build(worker, total_steps)
        if not hasattr(self.module, "router_aux_loss_coef"):
            raise ConfigError(no_routers(self.module.config.model_type))
        self.num_chosen: int = self.module.num_experts_per_tok
        body = body_of(self.module)
        body.register_forward_pre_hook(_ask_routers, with_kwargs=True)
        body.register_forward_hook(self._note_routers)

    def _note_routers(self, _: nn.Module, __: Any, output: Any) -> None:
        if output.router_logits is None:  # the head in chunks runs without the body
            return
        self.router_logits = [logits.flatten(0, -2).float() for logits in output.router_logits]
        if self.fed is not None and self.fed.is_real is not None:
            self.router_logits = [logits[self.fed.is_real] for logits in self.router_logits]

    def feed(self, columns: RowColumns) -> Feed:
        """The arguments of one pass, which are noted."""
        self.fed, self.router_logits = super().feed(columns), []
        return self.fed

    def forward_backward(
        self,
        batch: MiniBatch,
        budget: Budget,
        loss: Loss,
        pieces: dict[str, list[Column]] | None = None,
    ) -> dict[str, float]:
        """Add the gradients of the load-balancing loss, too; it is the metric `router_aux_loss`.

        A loss of the kind that trains no policy (PTX) stays as it is.
        """
        if not loss.is_balanced:
            return super().forward_backward(batch, budget, loss, pieces)
        balanced = _Balanced(self, loss.compute, self.count_choices(batch, budget))
        loss = replace(loss, compute=balanced)
        metrics = super().forward_backward(batch, budget, loss, pieces)
        auxiliary = all_reduce(balanced.total, self.groups.batch)
        return {**metrics, "router_aux_loss": float(auxiliary)}

    @torch.no_grad()
    def count_choices(self, batch: MiniBatch, budget: Budget) -> Choices:
        """What all ranks' tokens of the mini-batch chose.

        A token counts once for every expert that it chose.
        """
        cuts = self._cut(batch.columns, budget)
        found = [*passes(batch.columns, cuts, self.groups.data, self.device)]
        totals: dict[int, Tensor] = {}
        with computing_in(self.module, self.cast):
            for action in self.pipeline.actions(len(found), trains=False):
                columns, num_real, _ = found[action.number]
                self._forward(action, columns, partial(self._nothing, columns))
                if self.router_logits:
                    counted = torch.stack([self._counts(logits) for logits in self.router_logits])
                    counted = counted if num_real else torch.zeros_like(counted)
                    known = totals.get(action.chunk)
                    totals[action.chunk] = counted if known is None else known + counted

        num_layers, num_tokens = 0, 0
        for counted in totals.values():
            all_reduce(counted, self.groups.loss)
            num_layers, num_tokens = num_layers + len(counted), int(counted[0, -1])
        shares = {chunk: counted[:, :-1] / max(num_tokens, 1) for chunk, counted in totals.items()}
        of_all = all_reduce(torch.tensor([num_layers], device=self.device), self.groups.pp)
        return Choices(shares, num_tokens, int(of_all))

    def _nothing(self, columns: RowColumns) -> list[Tensor]:
        """A pass of which the routers are all that is asked."""
        self.outputs(columns)
        return []

    def _counts(self, logits: Tensor) -> Tensor:
        """Tokens that chose each expert of a layer, then all of its tokens."""
        num_experts = logits.shape[-1]
        chosen = logits.topk(self.num_chosen, dim=-1).indices.flatten()
        counts = torch.bincount(chosen, minlength=num_experts + 1).double()
        counts[-1] = len(logits)
        return counts


class Choices(NamedTuple):
    """What the tokens of a mini-batch chose, in the layers of this rank."""

    shares: dict[int, Tensor]
    """By stage of the rank, [layers, experts]: the part of the tokens that chose each expert."""
    num_tokens: int
    num_layers: int
    """Of all ranks."""


class _Balanced:
    """A loss, and the load-balancing loss of each pass that was just run beside it."""

    def __init__(self, engine: BalancedEngine, loss_fn: LossFn, choices: Choices) -> None:
        self.engine, self.loss_fn, self.choices = engine, loss_fn, choices
        self.total = torch.zeros((), device=engine.device)

    def __call__(
        self, outputs: Columns, columns: Columns, batch: MiniBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = self.loss_fn(outputs, columns, batch)
        for auxiliary in self._of_pass(bool(columns["response_mask"].any())):
            loss = loss + auxiliary
        return loss, metrics

    def of_stage(self, columns: RowColumns) -> list[Tensor]:
        """What a stage before the last adds to the loss."""
        return self._of_pass(bool((columns["response_mask"].values != 0).any()))

    def _of_pass(self, is_real: bool) -> list[Tensor]:
        """That of this rank's layers, none of a dummy's: its token is nobody's."""
        engine, choices = self.engine, self.choices
        shares = choices.shares.get(engine.pipeline.running.chunk)
        if shares is None or not is_real:
            return []
        auxiliary = load_balancing_loss(
            engine.router_logits, shares, choices.num_tokens, choices.num_layers
        )
        if engine.fed is not None and engine.fed.split is not None:
            auxiliary = engine.fed.split.add_up(auxiliary)
        self.total += auxiliary.detach()
        return [engine.router_aux_loss_coef * auxiliary]


def _ask_routers(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Asked of the whole model, it would also compute a loss of its own, in gigabytes."""
    return args, {**kwargs, "output_router_logits": True}


def load_balancing_loss(
    logits: list[Tensor], shares: Tensor, num_tokens: int, num_layers: int
) -> Tensor:
    """The share of these tokens in the loss of a mini-batch of `num_tokens`.

    `logits` are [tokens, experts] of some layers of the `num_layers`, `shares` [layers, experts]
    the part of the mini-batch's tokens that chose each expert.

    Source: Switch Transformer, arXiv 2101.03961, section 2.2, with every choice of a token counted
    """
    total = logits[0].new_zeros(())
    for layer, share in zip(logits, shares.to(logits[0].dtype), strict=True):
        mass = layer.softmax(dim=-1).sum(dim=0) / num_tokens
        total = total + len(share) * (share * mass).sum()
    return total / num_layers


def _refuse_interleaved(pp: int, schedule: str) -> None:
    """transformers listens to the routers that are there in the first pass: to one stage's."""
    if pp > 1 and schedule == "interleaved":
        raise ConfigError(
            "actor.router_aux_loss_coef is set, and the routers of two stages on a rank are not "
            "heard; set actor.parallel.pp_schedule=1f1b or gpipe, or leave it at 0."
        )


def check_routers(path: str, parallel: ParallelConfig | None = None) -> None:
    """Refuse a model whose class knows no load-balancing loss, or whose routers are not heard."""
    if parallel is not None:
        _refuse_interleaved(parallel.pp, parallel.pp_schedule)
    config = read_hf_config(model_folder(path, weights=False))
    if not hasattr(config.get_text_config(), "router_aux_loss_coef"):
        raise ConfigError(no_routers(config.model_type))


def no_routers(model_type: str) -> str:
    """Why a model has no such loss."""
    return (
        "actor.router_aux_loss_coef is set, and transformers has no load-balancing loss for model "
        f"type {model_type!r}: it has no experts, or balances them otherwise. Leave it at 0."
    )
