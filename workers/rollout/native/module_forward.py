"""The forward pass of any full-attention Hugging Face causal LM, through the module itself."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from workers.rollout.native.kv_cache import SlotCache
from workers.rollout.native.linear import MIN_ROWS_OF_MKL


class ModuleForward:
    """Reads tokens into a slot cache and returns the next token's logits."""

    def __init__(self, module: Any, cache: SlotCache) -> None:
        self.module, self.cache, self.slots = module, cache, cache.slots
        parameters = inspect.signature(module.forward).parameters
        self.takes_positions = "position_ids" in parameters
        self.takes_logits_to_keep = "logits_to_keep" in parameters

    def prefill(
        self, prompts: Sequence[tuple[int, ...]], width: int, sources: Tensor, first: int
    ) -> Tensor:
        """Fill slots from `first` on with prompts `sources`; return the logits after each prompt.

        The logits are [prompts, vocabulary].
        """
        device = self.slots.columns.device
        padded = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        ids = torch.tensor(padded, device=device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        positions = (self.slots.columns[:width] - (width - lengths)[:, None]).clamp(min=0)
        mask = self.slots.target_prefill(lengths, width, sources, first)
        few = -(-MIN_ROWS_OF_MKL // len(prompts))  # so that the head has enough rows, too
        return self._logits(ids, positions, mask, few)

    def decode(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Let slots 0, 1, ... each read the token at its position; return the logits after it.

        The logits are [rows, vocabulary].
        """
        mask = self.slots.target_decode(positions)
        return self._logits(ids[:, None], positions[:, None], mask, 1)

    def _logits(
        self, ids: Tensor, positions: Tensor, attention_mask: Tensor, num_logits: int
    ) -> Tensor:
        inputs: dict[str, Any] = {
            "attention_mask": attention_mask,
            "past_key_values": self.cache,
            "use_cache": True,
        }
        if self.takes_positions:
            inputs["position_ids"] = positions
        if self.takes_logits_to_keep:
            inputs["logits_to_keep"] = num_logits
        logits: Tensor = self.module(input_ids=ids, **inputs).logits[:, -1]
        return logits
