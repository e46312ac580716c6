"""The KV cache of the native engine: one slot per sample, filled from the left.

Column 0 of a slot is never attended to; columns 1..n contain the n tokens so far. Samples of
different lengths decode together, each writing its own next column. Slots are as wide as the
longest running sample needs, and are copied when that changes: a step then reads memory in one
stream, twice as fast as skipping unused ends.

Four facts make the bits of a row independent of its neighbours. A pass attends to a number of
columns that is a multiple of `BLOCK` (sums over columns then group equally; masked columns add
zeros). It attends to at least `min_window` columns (fewer would use another kernel). Prompts are
padded to multiples of `BLOCK`, too. And the never-attended column 0 keeps transformers from
dropping a mask that is all ones in one batch but not in another.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin

from verl_like.errors import RolloutError
from workers.models.attention import heads_of
from workers.models.memory_shapes import cached_widths
from workers.rollout.sample import States

BLOCK = 16
"""Widths are multiples of this many columns: the lanes of the widest vector instructions."""
MOST_KEPT = 2**28
"""Largest cache, in bytes, that the next generation reuses; larger ones are cheap to create."""
MIN_MULTIPLICATIONS = 400
"""With fewer, torch uses another kernel for a batch of matrix products, with other bits."""


Places = Tensor | slice
"""Indices of slots or rows."""


def places_of(numbers: Sequence[int], device: torch.device) -> Places:
    """Return ascending numbers as an index; consecutive ones as a slice, which reads faster."""
    if numbers and numbers[-1] - numbers[0] + 1 == len(numbers):
        return slice(numbers[0], numbers[-1] + 1)
    return torch.tensor(numbers, dtype=torch.long, device=device)


def whole_blocks(count: int) -> int:
    """Round `count` up to a multiple of `BLOCK`."""
    return -(-count // BLOCK) * BLOCK


def min_window(config: Any) -> int:
    """Return the smallest number of columns that a decode step attends to.

    On Intel's processors MKL uses other kernels if there are fewer keys than the numbers of a head,
    or no more than the heads that share them.
    """
    heads, groups, size = heads_of(config)
    sharing = heads // groups
    return whole_blocks(max(-(-MIN_MULTIPLICATIONS // (sharing * size)), size, sharing + 1))


def slot_width(config: Any, prompt_width: int, response_width: int) -> int:
    """Return the columns of a slot that fits any prompt, padded, and any response."""
    return max(min_window(config), whole_blocks(1 + whole_blocks(prompt_width) + response_width))


def prefill_width(longest: int, prompt_width: int) -> int:
    """Return the columns that a group of prompts is padded to: whole blocks, or a fixed width."""
    return prompt_width if prompt_width <= BLOCK else whole_blocks(longest)


def slots_that_fit(config: Any, width: int, dtype: torch.dtype, limit_gb: float, least: int) -> int:
    """Return the number of slots that fit into the limit; fewer than `least` is an error."""
    keys, values = cached_widths(config)
    per_token = (config.num_hidden_layers + 1) * (keys + values)  # a layer's copy: `resize`
    slot_bytes = per_token * width * dtype.itemsize
    fit = int(limit_gb * 2**30 / slot_bytes)
    if fit < least:
        raise RolloutError(
            f"rollout: a cache of kv_cache_gb={limit_gb:g} is too small. One sample of up to "
            f"{width} tokens takes {slot_bytes / 2**30:.3g} GiB of keys and values, and at least "
            f"{least} are computed together: set actor_rollout_ref.rollout.kv_cache_gb to "
            f"{1.01 * least * slot_bytes / 2**30:.3g} or more, or lower data.max_prompt_length or "
            "data.max_response_length."
        )
    return fit


def zeros(count: int, like: Tensor) -> Tensor:
    """Return zeroed memory; on a CPU new pages, huge ones if the system supports them."""
    if like.device.type != "cpu":
        return like.new_zeros(count)

    # Pages are allocated when they are first written to.
    memory = mmap.mmap(-1, count * like.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    with torch.inference_mode(False):  # a later pass in another mode may write to it
        return torch.frombuffer(memory, dtype=like.dtype)


class CacheMemory:
    """Provides memory for slots, and reuses it for other slots or the next generation.

    Fresh pages are slow. Masked columns must contain finite numbers, so an engine drops the memory
    of a generation with non-finite numbers.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, count: int, like: Tensor) -> Tensor:
        """Return room for `count` numbers of the type of `like`, with zeros or old states."""
        for index, old in enumerate(self._free):
            if len(old) >= count and old.dtype == like.dtype:
                return self._free.pop(index)[:count]
        return zeros(count, like)

    def give(self, states: Tensor) -> None:
        """Return memory that is no longer used."""
        count = states.untyped_storage().nbytes() // states.itemsize
        self._free.append(states.as_strided((count,), (1,), 0))

    def end(self) -> None:
        """End a successful generation: keep its memory if it is small and on a CPU."""
        is_little = sum(whole.nbytes for whole in self._free) <= MOST_KEPT
        self._free = [whole for whole in self._free if is_little and whole.device.type == "cpu"]


class KeptMemory:
    """Counts the bytes of keys and values that samples store between two turns."""

    def __init__(self, most: int) -> None:
        self.most, self.bytes = most, 0

    def num_fitting(self, num_bytes: int) -> int:
        """Return the number of samples of `num_bytes` bytes that fit."""
        return max(self.most - self.bytes, 0) // max(num_bytes, 1)

    def add(self, states: States) -> None:
        """Count these states until they are deleted."""
        self.bytes += states.num_bytes
        weakref.finalize(states, self._forget, states.num_bytes).atexit = False

    def _forget(self, count: int) -> None:
        self.bytes -= count


class Slots:
    """Columns that the next forward pass writes and attends to, shared by all layers."""

    def __init__(
        self,
        num_slots: int,
        widest: int,
        least: int,
        device: torch.device,
        memory: CacheMemory | None = None,
    ) -> None:
        self.num_slots, self.memory = num_slots, memory or CacheMemory()
        self.width = self.least_width = least
        self.columns = self.order = torch.empty(0, dtype=torch.long, device=device)
        """The columns; in `order`, column 0 comes after all others."""
        self.set_widest(widest)

        self.is_prefill = True
        self.window = 0
        self.first = 0
        self.targets = self.sources = torch.empty(0, dtype=torch.long, device=device)
        self.gather = torch.empty(0, dtype=torch.long, device=device)

    def set_widest(self, widest: int) -> None:
        """Set the largest number of columns of a slot."""
        self.columns = torch.arange(widest, device=self.columns.device)
        self.order = torch.where(self.columns > 0, self.columns, widest)

    def allocate(self, like: Tensor) -> Tensor:
        """Return slots for states like these, in memory that suffices for the widest slots."""
        count = self.num_slots * like.shape[1] * len(self.columns) * like.shape[3]
        shape = (self.num_slots, like.shape[1], self.width, like.shape[3])
        return self.memory.take(count, like)[: torch.Size(shape).numel()].view(shape)

    def copied(self, old: Tensor, num_used: int) -> Tensor:
        """Return a copy of the first `num_used` slots with the current width.

        The rest of the memory contains zeros or old states: finite numbers, which is all that
        masked columns need.
        """
        new = self.allocate(old)
        width = min(self.width, old.shape[2])
        new[:num_used, :, :width] = old[:num_used, :, :width]
        return new

    def target_prefill(self, lengths: Tensor, width: int, sources: Tensor, first: int) -> Tensor:
        """Prepare a pass that fills slots from `first` on with prompts `sources`; return its mask.

        The prompts are padded on the left.
        """
        self.is_prefill, self.window = True, 1 + width
        self.sources, self.first = sources, first
        self.gather = (self.columns[:width] + (width - lengths)[:, None]).clamp(max=width - 1)
        mask = self.columns[:width] >= (width - lengths)[:, None]
        return pad(mask.long(), (1, 0))

    def target_decode(self, positions: Tensor) -> Tensor:
        """Prepare a pass in which each active slot writes one token; return the mask."""
        self.is_prefill, self.window = False, self.width
        self.sources = self.columns.new_ones(len(positions)).cumsum(0) - 1
        self.targets = positions + 1
        return (self.order[: self.window] <= self.targets[:, None]).long()


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer: [slots, heads, width, head size]."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, slots: Slots) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.slots = slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate all slots, once the model shows its head count, head size and dtype."""
        self.keys = self.slots.allocate(key_states)
        self.values = self.slots.allocate(value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the new keys and values; return all that the queries of this pass attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._store(self.keys, key_states), self._store(self.values, value_states)

    def _store(self, stored: Tensor, new: Tensor) -> Tensor:
        slots = self.slots
        if slots.is_prefill:
            by_column = new.transpose(1, 2)
            left = by_column[slots.sources[:, None], slots.gather[slots.sources]].transpose(1, 2)
            real = left[:, :, : slots.width - 1]  # the rest is padding
            stored[slots.first : slots.first + len(left), :, 1 : 1 + real.shape[2]] = real
            return pad(new, (0, 0, 1, 0))
        stored[slots.sources, :, slots.targets] = new.squeeze(2)
        return stored[: len(slots.sources)]

    def copies_of(self, slots: Places, count: int) -> tuple[Tensor, Tensor] | None:
        """Return keys and values of the first `count` tokens of slots, or None without any."""
        if not self.is_initialized:
            return None
        keys, values = (part[slots, :, 1 : 1 + count] for part in (self.keys, self.values))
        return (keys.clone(), values.clone()) if isinstance(slots, slice) else (keys, values)

    def fill(self, first: int, keys: Tensor, values: Tensor, rows: Places, count: int) -> None:
        """Fill slots from `first` on with these rows of states, `count` tokens each."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        keys, values = keys[rows, :, :count], values[rows, :, :count]
        target = (slice(first, first + len(keys)), slice(None), slice(1, 1 + count))
        self.keys[target], self.values[target] = keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (attended columns, first column)."""
        return self.slots.window, 0

    def get_seq_length(self) -> int:
        """Return the first query's column: 1 in prefill, the last column in decode.

        In decode the mask alone decides what is attended to.
        """
        return 1 if self.slots.is_prefill else self.slots.window - 1

    def resize(self, num_used: int) -> None:
        """Copy into slots of the current width, as many columns as fit."""
        if self.is_initialized:
            before = self.keys, self.values
            self.keys, self.values = (self.slots.copied(states, num_used) for states in before)
            for states in before:
                self.slots.memory.give(states)

    def get_max_length(self) -> int:
        """Return the number of columns of a slot."""
        return self.slots.width


class SlotCache(Cache):
    """The `past_key_values` of a Hugging Face model."""

    def __init__(self, num_layers: int, slots: Slots) -> None:
        self.slots = slots
        self.slot_layers = [SlotLayer(slots) for _ in range(num_layers)]
        super().__init__(layers=list(self.slot_layers))

    def fit(self, num_columns: int, num_used: int) -> None:
        """Make the slots wide enough for `num_columns`, or narrower if half the width suffices.

        Only the first `num_used` slots keep their contents.
        """
        slots = self.slots
        needed = max(slots.least_width, whole_blocks(num_columns))
        needed = min(needed, len(slots.columns))
        if slots.width < needed or needed <= slots.width // 2:
            slots.width = needed
            for layer in self.slot_layers:
                layer.resize(num_used)

    def grow(self, num_slots: int, widest: int, num_used: int) -> None:
        """Make room for more and wider slots; only the first `num_used` keep their contents."""
        self.slots.num_slots = num_slots
        self.slots.set_widest(max(widest, len(self.slots.columns)))
        for layer in self.slot_layers:
            layer.resize(num_used)

    def release(self) -> None:
        """Return the slots' memory for reuse; no slot may be in use."""
        for layer in self.slot_layers:
            if layer.is_initialized:
                self.slots.memory.give(layer.keys)
                self.slots.memory.give(layer.values)

    def num_bytes(self, count: int) -> int:
        """Return the bytes of keys and values of `count` tokens of a slot."""
        stored = (part for x in self.slot_layers if x.is_initialized for part in (x.keys, x.values))
        return sum(count * part[0, :, 0].nbytes for part in stored)

    def copies_of(self, slots: Places, count: int) -> States:
        """Return keys and values of the first `count` tokens of slots."""
        return States([layer.copies_of(slots, count) for layer in self.slot_layers])

    def restore_states(self, first: int, states: States, rows: Places, count: int) -> None:
        """Fill slots from `first` on with these rows of copied states, `count` tokens each."""
        for layer, part in zip(self.slot_layers, states.layers, strict=True):
            if part is not None:
                layer.fill(first, *part, rows, count)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots over others in every layer."""
        for layer in self.slot_layers:
            if not layer.is_initialized:  # the layer reads an earlier layer's keys and values
                continue
            for stored in (layer.keys, layer.values):
                stored.index_copy_(0, targets, stored.index_select(0, sources))
