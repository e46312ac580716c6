"""The key-value cache of the native engine: one slot per sample, all of one width set by config.

Columns of a slot: 0 is never attended to, 1..P hold the prompt (padded on the left), P+1..P+R the response. Samples of
different lengths decode together, each writing its own column. Two facts keep the bits of a row independent of its
neighbours: attention always runs over the same number of columns, and the never-attended column 0 keeps transformers
from dropping a mask that happens to be all ones in one batch and not in another. `native_rollout` is the caller.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class Slots:
    """Where the next forward pass writes, shared by all layers, and which columns each slot may attend to."""

    def __init__(self, num_slots: int, prompt_width: int, response_width: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.prompt_width = prompt_width
        self.width = 1 + prompt_width + response_width
        self.mask = torch.zeros((num_slots, self.width), dtype=torch.long, device=device)
        self.is_prefill = True
        self.targets = torch.empty(0, dtype=torch.long, device=device)
        self.sources = torch.empty(0, dtype=torch.long, device=device)

    def aim_prefill(self, prompt_mask: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        """Slot `targets[i]` will hold prompt `sources[i]` of the batch; returns the batch's attention mask."""
        self.is_prefill, self.sources, self.targets = True, sources, targets
        mask = torch.nn.functional.pad(prompt_mask, (1, 0))
        self.mask[targets] = 0
        self.mask[targets, : mask.shape[1]] = mask[sources]
        return mask

    def aim_decode(self, num_rows: int, steps: Tensor) -> Tensor:
        """Slots 0..num_rows-1 each write response token `steps[slot]`; returns their attention mask."""
        self.is_prefill = False
        self.sources = torch.arange(num_rows, device=steps.device)
        self.targets = 1 + self.prompt_width + steps
        self.mask[self.sources, self.targets] = 1
        return self.mask[:num_rows]


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer: [slots, heads, width, head size]."""

    is_sliding = False

    def __init__(self, slots: Slots) -> None:
        super().__init__()
        self.slots = slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate all slots, now that the model shows its head count, head size and dtype."""
        num_slots, width = self.slots.num_slots, self.slots.width
        self.keys = key_states.new_zeros((num_slots, key_states.shape[1], width, key_states.shape[3]))
        self.values = value_states.new_zeros((num_slots, value_states.shape[1], width, value_states.shape[3]))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new keys and values; returns all those that the queries of this pass look at."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._store(self.keys, key_states), self._store(self.values, value_states)

    def _store(self, stored: Tensor, new: Tensor) -> Tensor:
        slots = self.slots
        if slots.is_prefill:
            wide = torch.nn.functional.pad(new, (0, 0, 1, 0))
            stored[slots.targets, :, : wide.shape[2]] = wide[slots.sources]
            return wide
        stored[slots.sources, :, slots.targets] = new.squeeze(2)
        return stored[: len(slots.sources)]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns attended over, first column)."""
        return (1 + query_length if self.slots.is_prefill else self.slots.width), 0

    def get_seq_length(self) -> int:
        """The first query's column: 1 in prefill; the last one when decoding, so that the mask alone decides."""
        return 1 if self.slots.is_prefill else self.slots.width - 1

    def get_max_length(self) -> int:
        """Columns of a slot."""
        return self.slots.width

    def move(self, source: int, target: int) -> None:
        """Copy one slot over another."""
        self.keys[target] = self.keys[source]
        self.values[target] = self.values[source]


class SlotCache(Cache):
    """What a Hugging Face model takes as `past_key_values`."""

    def __init__(self, num_layers: int, slots: Slots) -> None:
        super().__init__(layers=[SlotLayer(slots) for _ in range(num_layers)])
        self.slots = slots

    def move(self, source: int, target: int) -> None:
        """Copy one slot over another in every layer, with its mask."""
        self.slots.mask[target] = self.slots.mask[source]
        for layer in self.layers:
            layer.move(source, target)
