"""Record in vLLM's workers which experts its routers choose: by layer per pass, then by request.

vLLM's feature (`enable_return_routed_experts`) belongs to its second model runner, which does not
support our sampler. Both runners support the routers' callback.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verl_like.errors import ConfigError


class Choices:
    """The choices for every token of the running requests, by their rows in the log-prob tables."""

    def __init__(self, runner: Any) -> None:
        """Hook the routers of the runner's model; raise a ConfigError if that is impossible."""
        from vllm.model_executor.layers.fused_moe.layer import MoERunner
        from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

        self.runner = runner
        self._pass: dict[int, Tensor] = {}
        self._kept: dict[int, Tensor] = {}
        layers = [part for part in runner.model.modules() if isinstance(part, MoERunner)]
        for number, layer in enumerate(layers):
            if layer._quant_method.is_monolithic or not isinstance(layer.router, BaseRouter):
                raise ConfigError(
                    f"rollout: vLLM chooses experts within {type(layer._quant_method).__name__}, "
                    "where they cannot be recorded. Leave actor.router_replay out, or set "
                    "rollout.name=native."
                )
            layer.router.set_capture_fn(partial(self._note, number))

    def _note(self, layer: int, chosen: Tensor) -> None:
        self._pass[layer] = chosen

    def end_pass(self, rows: Sequence[int], dtype: torch.dtype) -> None:
        """Assign the tokens that the pass has read to these requests, in the runner's order."""
        batch, width = self.runner.input_batch, self.runner.max_model_len
        chosen = torch.stack([self._pass[layer] for layer in sorted(self._pass)], dim=1)
        chosen = chosen.to(dtype).cpu()
        bounds = self.runner.query_start_loc.np[: len(rows) + 1].tolist()
        for place, row in enumerate(rows):
            begin, end = bounds[place : place + 2]
            first = int(batch.num_computed_tokens_cpu[place])
            if row not in self._kept:
                self._kept[row] = chosen.new_zeros(width, *chosen.shape[1:])
            self._kept[row][first : first + end - begin] = chosen[begin:end]

    def take(self, row: int) -> Tensor | None:
        """Return [tokens, layers, choices] of a request that has ended; the rest is zeros."""
        return self._kept.pop(row, None)
