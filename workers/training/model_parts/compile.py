"""Layers, and the log-probs of the head, compiled by torch.compile: `model.compile`.

The compiled code is used only if a short pass runs through it on every rank.

Each layer is a separate graph, split at attention. Collectives therefore stay outside: FSDP's
collectives are in hooks around a layer, and those of sequence parallelism in attention.
Checkpointing runs a compiled layer again. Layers of one class share the compiled code; other row
lengths do not cause new graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from verl_like.batch.ragged import RaggedTensor
from verl_like.errors import ConfigError
from workers.models.attention import warn_once
from workers.models.causal_lm import body_of, language_half, replaced_forward
from workers.models.precision import computing_in
from workers.parallel.sharding import ParallelDims
from workers.training.microbatch import all_reduce
from workers.training.passes.lm_head import (
    ROWS_ON_GPU,
    TokenOutputs,
    columns_of_logits,
    rows_per_chunk,
)
from workers.training.passes.packing import read
from workers.training.sharded_model import Model, ModelPart

MAX_GRAPHS = 64
"""Maximum number of graphs per layer class, for all roles of a process together."""


class Compile(ModelPart):
    """Runs passes through compiled layers, if these work on every rank."""

    layers: list[Any]
    compiled: list[Callable[..., Any]]
    """The forward passes of the layers, which are compiled when they are first called."""
    is_on = False

    def change(self, model: Model) -> None:
        """Find the layers, before FSDP replaces their classes."""
        names = set(model.module._no_split_modules or ())
        self.layers = [
            layer
            for layer in language_half(model.module).modules()
            if type(layer).__name__ in names
        ]

    def finish(self, model: Model) -> None:
        """Use the compiled layers if a short pass works on all ranks; every rank must call this."""
        reason = blocking_axis(model.dims) or self._failure(model)
        failed = torch.tensor(float(bool(reason)), device=model.device)
        if all_reduce(failed, model.groups.world, torch.distributed.ReduceOp.MAX):
            reason = reason or "they do not run on another rank"
            if model.model_config.compile == "on":
                key = f"{model.model_config.SECTION}.compile"
                raise ConfigError(f"{key}=on: {reason}. Set {key}=off.")
            warn_once(f"layers of {model.module.config.model_type} are not compiled: {reason}.")
        else:
            self.is_on = model.is_compiled = True

    def _failure(self, model: Model) -> str:
        """Return why a short pass through the compiled layers fails; "" if it runs."""
        if model.spec.replays_routing:
            return "replayed routing changes layers from pass to pass"
        try:
            import torch._dynamo.config

            torch._dynamo.config.recompile_limit = MAX_GRAPHS
            torch.compile(_doubled)(torch.ones(8, device=model.device))  # first, as a test
            self.compiled = [torch.compile(layer.forward) for layer in self.layers]
            self.is_on = model.is_compiled = True
            run_short_pass(model)
        except Exception as error:  # noqa: BLE001 - compilers raise various types
            return " ".join(str(error).split())[:200]
        finally:
            self.is_on = model.is_compiled = False
        return ""

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context in which passes use the compiled layers, if compilation works on all ranks."""
        with ExitStack() as stack:
            if self.is_on:
                for layer, compiled in zip(self.layers, self.compiled, strict=True):
                    stack.enter_context(replaced_forward(layer, compiled))
            yield


@torch.no_grad()
def run_short_pass(model: Model) -> None:
    """Run two short rows through the model, and a chunk of logits through the compiled head."""
    vocabulary = body_of(model.module).get_input_embeddings().num_embeddings
    positions = RaggedTensor.from_rows([torch.arange(7), torch.arange(5)], 7)
    tokens = torch.cat([torch.arange(7), torch.arange(9, 14)]) * 7 % max(vocabulary, 1)
    columns = {"input_ids": positions.with_values(tokens), "position_ids": positions}
    reads = positions.with_values(torch.ones(len(tokens), dtype=torch.bool))
    feed = model.row_passes.feed(columns, reads, model.device)
    with model.running(), computing_in(model.module, model.cast):
        outputs = read(model.module, feed)
    if model.head == "token":
        num_rows = min(ROWS_ON_GPU, rows_per_chunk(model.module.config))
        logits = outputs.new_zeros(num_rows, outputs.shape[1]).requires_grad_()
        labels = torch.zeros(num_rows, dtype=torch.long, device=model.device)
        with torch.enable_grad():
            numbers = columns_of_logits(logits, labels, TokenOutputs(entropy=True), fused=True)
            numbers["log_probs"].sum().backward()


def blocking_axis(dims: ParallelDims) -> str:
    """Return the axis that prevents compiled layers; "" if none does."""
    axes = {"tp": "inside layers", "ep": "inside layers", "pp": "between stages of layers"}
    for axis, where in axes.items():
        size = getattr(dims, axis)
        if size > 1:
            return f"{axis}={size} has collectives {where}"
    return ""


def _doubled(numbers: torch.Tensor) -> torch.Tensor:
    return numbers * 2
