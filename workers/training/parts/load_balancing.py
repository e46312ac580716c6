"""The load-balancing loss of a mixture of experts: `actor.router_aux_loss_coef`.

For one layer with E experts it is E x the sum over experts of f x p: f is the share of tokens that
chose the expert (no gradient), p the mean over tokens of the router's softmax. Layers are averaged.
Both are means over the tokens of the whole mini-batch, of all ranks, so f is counted first, in a
forward pass of its own without gradients; then every micro-batch adds its tokens' share of p, and
neither the cut nor the number of ranks changes the loss.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from verl_like.errors import ConfigError
from workers.models.causal_lm import body_of
from workers.models.folder import model_folder
from workers.models.hf_config import read_hf_config
from workers.training.loss import Loss
from workers.training.microbatch import Budget, Columns, MiniBatch, RowColumns, all_reduce
from workers.training.model import Model, Part
from workers.training.packing import Feed

if TYPE_CHECKING:
    from workers.config import ParallelConfig
    from workers.parallel.groups import Groups
    from workers.training.passes import Passes


class LoadBalancing(Part):
    """Adds the routers' load-balancing loss to the loss of a mini-batch."""

    def __init__(self, coef: float) -> None:
        self.coef = coef
        self.router_logits: list[Tensor] = []
        """[real tokens, experts] of every layer, of the pass that was run last."""
        self.feed: Feed | None = None
        """What went into that pass."""

    def check(self, model: Model) -> None:
        """Reject stages whose routers are not heard."""
        _refuse_interleaved(model.sharding.pp, model.sharding.pp_schedule)

    def finish(self, model: Model) -> None:
        """Listen to the routers."""
        if not hasattr(model.module, "router_aux_loss_coef"):
            raise ConfigError(no_routers(model.module.config.model_type))
        self.num_chosen: int = model.module.num_experts_per_tok
        body = body_of(model.module)
        body.register_forward_pre_hook(_ask_routers, with_kwargs=True)
        body.register_forward_hook(self._note_routers)

    def _note_routers(self, _: nn.Module, __: Any, output: Any) -> None:
        if output.router_logits is None:  # the head in chunks runs without the body
            return
        self.router_logits = [logits.flatten(0, -2).float() for logits in output.router_logits]
        if self.feed is not None and self.feed.is_real is not None:
            self.router_logits = [logits[self.feed.is_real] for logits in self.router_logits]

    def fed(self, feed: Feed) -> None:
        """Note the arguments of a pass."""
        self.feed, self.router_logits = feed, []

    def added_to(self, loss: Loss, passes: Passes, batch: MiniBatch, budget: Budget) -> Balanced:
        """Count the choices of a mini-batch, and return its loss with this one added."""
        return Balanced(self, loss, self.count_choices(passes, batch, budget))

    def count_choices(self, passes: Passes, batch: MiniBatch, budget: Budget) -> Choices:
        """Count what all ranks' tokens of the mini-batch chose.

        A token counts once for every expert that it chose.
        """
        model = passes.model
        counts: list[Tensor] = []

        def count(num_real: int) -> None:
            if self.router_logits:
                counted = torch.stack([self._counts(logits) for logits in self.router_logits])
                counts.append(counted if num_real else torch.zeros_like(counted))

        def run(columns: RowColumns, _: int) -> None:
            passes.outputs(columns)

        passes.run(batch.columns, passes.cut(batch.columns, budget), run, count)
        num_layers, num_tokens, shares = 0, 0, None
        if counts:
            total = all_reduce(torch.stack(counts).sum(dim=0), model.groups.loss)
            num_layers, num_tokens = len(total), int(total[0, -1])
            shares = total[:, :-1] / max(num_tokens, 1)
        of_all = all_reduce(torch.tensor([num_layers], device=model.device), model.groups.pp)
        return Choices(shares, num_tokens, int(of_all))

    def _counts(self, logits: Tensor) -> Tensor:
        """Tokens that chose each expert of a layer, then all of its tokens."""
        num_experts = logits.shape[-1]
        chosen = logits.topk(self.num_chosen, dim=-1).indices.flatten()
        counts = torch.bincount(chosen, minlength=num_experts + 1).double()
        counts[-1] = len(logits)
        return counts


class Choices(NamedTuple):
    """What the tokens of a mini-batch chose, in the layers of this rank."""

    shares: Tensor | None
    """[layers, experts]: the part of the tokens that chose each expert; None without layers."""
    num_tokens: int
    num_layers: int
    """Of all ranks."""


class Balanced:
    """A loss, and the load-balancing loss of each pass that was just run."""

    def __init__(self, part: LoadBalancing, loss: Loss, choices: Choices) -> None:
        self.part, self.plain, self.choices = part, loss, choices
        self.loss = replace(loss, compute=self.compute, of_stage=self.of_stage)
        self.total: Tensor | float = 0.0

    def compute(
        self, outputs: Columns, columns: Columns, batch: MiniBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the micro-batch's share of both losses."""
        loss, metrics = self.plain.compute(outputs, columns, batch)
        for auxiliary in self._of_pass(bool(columns["response_mask"].any())):
            loss = loss + auxiliary
        return loss, metrics

    def of_stage(self, columns: RowColumns) -> list[Tensor]:
        """Return what a stage before the last adds to the loss."""
        return self._of_pass(bool((columns["response_mask"].values != 0).any()))

    def _of_pass(self, is_real: bool) -> list[Tensor]:
        """That of this rank's layers, none of a dummy's: its token is nobody's."""
        part, choices = self.part, self.choices
        if choices.shares is None or not is_real:
            return []
        auxiliary = load_balancing_loss(
            part.router_logits, choices.shares, choices.num_tokens, choices.num_layers
        )
        if part.feed is not None and part.feed.split is not None:
            auxiliary = part.feed.split.add_up(auxiliary)
        self.total = self.total + auxiliary.detach()
        return [part.coef * auxiliary]

    def metrics(self, groups: Groups, device: torch.device) -> dict[str, float]:
        """Return `router_aux_loss` of the mini-batch; collective."""
        total = torch.as_tensor(self.total, dtype=torch.float32, device=device)
        return {"router_aux_loss": float(all_reduce(total, groups.batch))}


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
