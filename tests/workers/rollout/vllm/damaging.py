"""Weights that change in vLLM's memory before its layers pack them, as by broken memory."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from workers.rollout.vllm.read_back import ReadBack

Fault = Callable[[nn.Module], bool]
"""Gets at a layer, and says whether it was the one to be damaged."""


class Damaging:
    """Within, one fault a load: it gets at every layer that processes its weights, and in the end
    at all others.

    What a fault does to memory through numpy is not taken for vLLM's own doing.
    """

    def __init__(self) -> None:
        self.next: list[Fault] = []
        self._has_hit = False
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Damaging:
        reload: Any = importlib.import_module("vllm.model_executor.model_loader.reload")
        processing, finalize = ReadBack.processing, reload.finalize_layerwise_reload

        def damaged(read_back: ReadBack, layer: nn.Module) -> Any:
            self._try(layer)
            return processing(read_back, layer)

        def finalize_and_damage(model: nn.Module, *args: object) -> None:
            finalize(model, *args)
            for module in model.modules():
                self._try(module)
            self._has_hit = False

        self._patch.setattr(ReadBack, "processing", damaged)
        self._patch.setattr(reload, "finalize_layerwise_reload", finalize_and_damage)
        return self

    def _try(self, layer: nn.Module) -> None:
        if self.next and not self._has_hit and self.next[0](layer):
            self.next.pop(0)
            self._has_hit = True

    def __exit__(self, *error: object) -> None:
        self._patch.undo()
