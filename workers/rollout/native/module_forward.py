"""The forward pass of any full-attention Hugging Face causal LM, through the module itself.

For `native_rollout`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from workers.rollout.native.kv_cache import SlotCache


class ModuleForward:
    """Reads tokens into a slot cache and says the next token's logits."""

    def __init__(self, module: Any, cache: SlotCache) -> None:
        self.module, self.cache, self.slots = module, cache, cache.slots
        parameters = inspect.signature(module.forward).parameters
        self.takes_positions = "position_ids" in parameters
        self.takes_logits_to_keep = "logits_to_keep" in parameters

    def prefill(
        self, prompts: Sequence[tuple[int, ...]], width: int, sources: Tensor, first: int
    ) -> Tensor:
        """Slots from `first` on get prompts `sources`; the logits after each prompt: [prompts,
        vocabulary].
        """
        device = self.slots.columns.device
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        ids = torch.tensor(
            [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device
        )
        positions = (self.slots.columns[:width] - (width - lengths)[:, None]).clamp(min=0)
        return self._logits(ids, positions, self.slots.aim_prefill(lengths, width, sources, first))

    def decode(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Slots 0, 1, ... each read the token of this position; the logits after it: [rows,
        vocabulary].
        """
        return self._logits(ids[:, None], positions[:, None], self.slots.aim_decode(positions))

    def _logits(self, ids: Tensor, positions: Tensor, attention_mask: Tensor) -> Tensor:
        inputs: dict[str, Any] = {
            "attention_mask": attention_mask,
            "past_key_values": self.cache,
            "use_cache": True,
        }
        if self.takes_positions:
            inputs["position_ids"] = positions
        if self.takes_logits_to_keep:
            inputs["logits_to_keep"] = 1
        logits: Tensor = self.module(input_ids=ids, **inputs).logits[:, -1]
        return logits
