"""Which experts vLLM's routers choose, noted in its workers: by layer in a pass, then by request.

vLLM's own way (`enable_return_routed_experts`) is that of its second model runner, which has no
place for our sampler. Its routers' callback is that of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verl_like.errors import ConfigError


class Choices:
    """Of every token of the running requests, by their rows in the tables of log-probs."""

    def __init__(self, runner: Any) -> None:
        """Listen to the routers of the runner's model; a ConfigError where one cannot be heard."""
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
                    "where nobody hears it. Leave actor.router_replay out, or set "
                    "rollout.name=native."
                )
            layer.router.set_capture_fn(partial(self._note, number))

    def _note(self, layer: int, chosen: Tensor) -> None:
        self._pass[layer] = chosen

    def end_pass(self, rows: Sequence[int], dtype: torch.dtype) -> None:
        """The tokens that the pass has read are those of these requests, in the runner's order."""
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
        """[tokens, layers, choices] of a request that has ended; what lies behind it is zeros."""
        return self._kept.pop(row, None)
