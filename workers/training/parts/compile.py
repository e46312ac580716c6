"""Layers compiled by torch.compile: `model.compile`.

    layers = CompiledLayers(module, device)     # before FSDP gives layers classes of its own
    with layers.computing():                    # passes go through them; a backward pass, too

They are used if two short rows have the same outputs through them as without them.

Each layer is a graph by itself, cut at attention. So collectives stay outside: FSDP's are hooks
around a layer, those of sequence parallelism are in attention. Checkpointing runs a compiled layer
again. Layers of one class share what was compiled; lengths of rows make no new graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from verl_like.batch.ragged import Ragged
from verl_like.errors import ConfigError
from workers.models.attention import warn_once
from workers.models.causal_lm import ScalarHeadModel, body_of
from workers.models.precision import computing_in
from workers.models.quantize import is_quantized
from workers.models.support.proof import relative_error
from workers.parallel.dims import ParallelDims
from workers.training.microbatch import all_reduce
from workers.training.model import Model, Part
from workers.training.packing import read

MOST_GRAPHS = 64
"""Of one layer's code: roles of a process share it, with and without gradients."""


class CompiledLayers:
    """The layers of a module, compiled when they are first called."""

    def __init__(self, module: Any, device: torch.device) -> None:
        names = set(module._no_split_modules or ())
        self.layers = [one for one in module.modules() if type(one).__name__ in names]
        self.device = device
        self._compiled: list[Callable[..., Any]] = []

    def why_not(self) -> str:
        """Why nothing can be compiled here: there is no compiler, or it fails."""
        import torch._dynamo.config

        torch._dynamo.config.recompile_limit = MOST_GRAPHS
        twice = torch.compile(_doubled)
        try:
            twice(torch.ones(8, device=self.device))
        except Exception as error:  # noqa: BLE001 - compilers raise types of their own
            return " ".join(str(error).split())[:200]
        self._compiled = [torch.compile(layer.forward) for layer in self.layers]
        return ""

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Within, layers compute by what is compiled; others do not see it."""
        with ExitStack() as stack:
            for layer, compiled in zip(self.layers, self._compiled, strict=False):
                layer.forward = compiled
                stack.callback(delattr, layer, "forward")
            yield


class Compile(Part):
    """Has passes go through compiled layers, if they are right on every rank."""

    layers: CompiledLayers
    is_on = False

    def change(self, model: Model) -> None:
        """Note the layers."""
        self.layers = CompiledLayers(model.module, model.device)

    def finish(self, model: Model) -> None:
        """Use what is compiled, if it is right; collective over all ranks."""
        reason = why_not_over(model.dims) or self._why_not(model)
        failed = torch.tensor(float(bool(reason)), device=model.device)
        if all_reduce(failed, model.groups.world, torch.distributed.ReduceOp.MAX):
            reason = reason or "they do not run so on another rank"
            if model.model_config.compile == "on":
                raise ConfigError(f"model.compile=on: {reason}; set model.compile=off.")
            warn_once(f"layers of {model.module.config.model_type} are not compiled: {reason}.")
        else:
            self._switch(model, is_on=True)

    def _why_not(self, model: Model) -> str:
        if model.settings.replays_routing:
            return "replayed routing changes layers from pass to pass"
        if reason := self.layers.why_not():
            return reason
        try:
            expected = short_pass(model)
            self._switch(model, is_on=True)
            found = short_pass(model)
        except Exception as error:  # noqa: BLE001 - compilers raise types of their own
            return " ".join(str(error).split())[:200]
        finally:
            self._switch(model, is_on=False)
        off, limit = relative_error(found, expected), rounding(model.module, expected.dtype)
        return "" if off <= limit else f"a pass is off by {off:.0e}, over {limit:.0e}"

    def _switch(self, model: Model, is_on: bool) -> None:
        self.is_on = model.is_compiled = is_on

    def computing(self) -> AbstractContextManager[None]:
        """Within, passes go through the compiled layers."""
        return self.layers.computing() if self.is_on else nullcontext()


def rounding(module: Any, dtype: torch.dtype) -> float:
    """Relative error up to which two right passes of this type agree on the model's own weights.

    In 16 bits it grows as a walk of as many steps as there are layers: random Llamas of 2, 32 and
    128 layers are off by 0.8, 4 and 7 %, those whose rows see each other by 50 % and more.
    """
    if dtype == torch.float32 and not is_quantized(module):
        return 1e-4
    num_layers = getattr(module.config.get_text_config(), "num_hidden_layers", 1)
    return min(3 * torch.finfo(torch.bfloat16).eps * math.sqrt(num_layers), 0.3)


@torch.no_grad()
def short_pass(model: Model) -> Tensor:
    """Logits of two short rows; under a scalar head, which may be zeros, the hidden states."""
    module = model.module
    vocabulary = body_of(module).get_input_embeddings().num_embeddings
    positions = Ragged.of_rows([torch.arange(7), torch.arange(5)], 7)
    tokens = torch.cat([torch.arange(7), torch.arange(9, 14)]) * 7 % max(vocabulary, 1)
    columns = {"input_ids": positions.with_values(tokens), "position_ids": positions}
    reads = positions.with_values(torch.ones(len(tokens), dtype=torch.bool))
    feed = model.row_passes.feed(columns, reads, model.device)
    states: list[Tensor] = []
    head = module.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    try:
        with model.running(), computing_in(module, model.cast):
            logits = read(module, feed)
    finally:
        hook.remove()
    if not isinstance(module, ScalarHeadModel):
        return logits
    return states[0][0] if feed.packed else states[0][feed.reads]


def why_not_over(dims: ParallelDims) -> str:
    """Why layers that are laid over ranks so are not compiled; empty where they are."""
    axes = {"tp": "inside layers", "ep": "inside layers", "pp": "between stages of layers"}
    for axis, where in axes.items():
        if (size := getattr(dims, axis)) > 1:
            return f"{axis}={size} has collectives {where}"
    return ""


def _doubled(numbers: Tensor) -> Tensor:
    return numbers * 2
