"""Layers compiled by torch.compile: `model.compile`.

    layers = CompiledLayers(module, device)     # before FSDP gives layers classes of its own
    with layers.computing():                    # passes go through them; a backward pass, too

Each layer is a graph by itself, cut at attention. So collectives stay outside: FSDP's are hooks
around a layer, those of sequence parallelism are in attention. Checkpointing runs a compiled layer
again. Layers of one class share what was compiled; lengths of rows make no new graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from workers.parallel.dims import ParallelDims

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


def why_not_over(dims: ParallelDims) -> str:
    """Why layers that are laid over ranks so are not compiled; empty where they are."""
    axes = {"tp": "inside layers", "ep": "inside layers", "pp": "between stages of layers"}
    for axis, where in axes.items():
        if (size := getattr(dims, axis)) > 1:
            return f"{axis}={size} has collectives {where}"
    return ""


def _doubled(numbers: Tensor) -> Tensor:
    return numbers * 2


def outside_of_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which no graph takes in."""
    disabled: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled
