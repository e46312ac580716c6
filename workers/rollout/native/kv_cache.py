"""The KV cache of the native engine: one slot per sample, filled from the left.

Column 0 of a slot is never attended to, columns 1..n hold the n tokens so far; samples of different
lengths decode together, each writing its own next column. Slots are as wide as the longest sample
in flight needs, and are copied when that changes: a step then reads memory in one stream, twice as
fast as skipping unused ends.

Four facts keep the bits of a row independent of its neighbours: a pass looks at a number of
columns that is a multiple of `BLOCK` (the sums over columns then group alike; masked columns add
zeros) and at `least_window` of them (with fewer a product takes another kernel), prompts are padded
to multiples of it too, and the never-attended column 0 keeps transformers from dropping a mask that
happens to be all ones in one batch and not in another.
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
from workers.models.memory_shapes import cached_widths
from workers.rollout.sample import States

BLOCK = 16
"""Widths are multiples of this many columns: the lanes of the widest vector instructions."""
MOST_KEPT = 2**28
"""Bytes of a cache that is kept between generations; a larger one is cheap to make anew."""
MIN_MULTIPLICATIONS = 400
"""With fewer torch takes another kernel for a batch of matrix products, with other bits."""


Places = Tensor | slice
"""Of slots, or of rows."""


def places_of(numbers: Sequence[int], device: torch.device) -> Places:
    """Ascending numbers as an index; neighbours as a slice, which is read in one stream."""
    if numbers and numbers[-1] - numbers[0] + 1 == len(numbers):
        return slice(numbers[0], numbers[-1] + 1)
    return torch.tensor(numbers, dtype=torch.long, device=device)


def whole_blocks(count: int) -> int:
    """`count` rounded up to a multiple of `BLOCK`."""
    return -(-count // BLOCK) * BLOCK


def heads_of(config: Any) -> tuple[int, int, int]:
    """(query heads, key-value heads, head size) of a model."""
    heads: int = config.num_attention_heads
    size: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, size


def least_window(config: Any) -> int:
    """Fewest columns that a decode step looks at.

    MKL on Intel's processors has other kernels for keys that are fewer than the numbers of a head,
    or no more than the heads that share them.
    """
    heads, groups, size = heads_of(config)
    sharing = heads // groups
    return whole_blocks(max(-(-MIN_MULTIPLICATIONS // (sharing * size)), size, sharing + 1))


def slot_width(config: Any, prompt_width: int, response_width: int) -> int:
    """Columns of a slot that holds any prompt, padded, and any response."""
    return max(least_window(config), whole_blocks(1 + whole_blocks(prompt_width) + response_width))


def prefill_width(longest: int, prompt_width: int) -> int:
    """Columns that a group of prompts is padded to: whole blocks, or always the same few."""
    return prompt_width if prompt_width <= BLOCK else whole_blocks(longest)


def slots_that_fit(config: Any, width: int, dtype: torch.dtype, limit_gb: float, least: int) -> int:
    """How many slots of `width` columns the limit allows; fewer than `least` are refused."""
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
    """Memory that reads as zeros; on a CPU new pages, huge ones where the system has such."""
    if like.device.type != "cpu":
        return like.new_zeros(count)

    # The pages become real when they are first written to.
    memory = mmap.mmap(-1, count * like.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    with torch.inference_mode(False):  # a later pass in another mode may write to it
        return torch.frombuffer(memory, dtype=like.dtype)


class CacheMemory:
    """Where slots get their memory, and give it back: to other slots, or to the next generation.

    Fresh pages are slow. What masked columns hold must be finite, so an engine lets go of the
    memory of a generation that was not.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, count: int, like: Tensor) -> Tensor:
        """Room for so many numbers such as these; it holds zeros or old states."""
        for index, old in enumerate(self._free):
            if len(old) >= count and old.dtype == like.dtype:
                return self._free.pop(index)[:count]
        return zeros(count, like)

    def give(self, states: Tensor) -> None:
        """Room that was taken, and is not used any more."""
        count = states.untyped_storage().nbytes() // states.itemsize
        self._free.append(states.as_strided((count,), (1,), 0))

    def end(self) -> None:
        """A generation has ended well: keep what it gave on a CPU, if that is little."""
        is_little = sum(whole.nbytes for whole in self._free) <= MOST_KEPT
        self._free = [whole for whole in self._free if is_little and whole.device.type == "cpu"]


class KeptMemory:
    """Counts the bytes of keys and values that samples hold between two turns."""

    def __init__(self, most: int) -> None:
        self.most, self.bytes = most, 0

    def num_fitting(self, num_bytes: int) -> int:
        """How many samples of so many bytes there is room for."""
        return max(self.most - self.bytes, 0) // max(num_bytes, 1)

    def add(self, states: States) -> None:
        """These count until nobody holds them."""
        self.bytes += states.num_bytes
        weakref.finalize(states, self._forget, states.num_bytes).atexit = False

    def _forget(self, count: int) -> None:
        self.bytes -= count


class Slots:
    """Where the next forward pass writes and how far it looks, shared by all layers."""

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
        """The columns, and the columns with column 0 beyond them all."""
        self.set_widest(widest)

        self.is_prefill = True
        self.window = 0
        self.first = 0
        self.targets = self.sources = torch.empty(0, dtype=torch.long, device=device)
        self.gather = torch.empty(0, dtype=torch.long, device=device)

    def set_widest(self, widest: int) -> None:
        """How many columns a slot may have."""
        self.columns = torch.arange(widest, device=self.columns.device)
        self.order = torch.where(self.columns > 0, self.columns, widest)

    def allocate(self, like: Tensor) -> Tensor:
        """Slots for states such as these, and memory in which they can become as wide as any."""
        count = self.num_slots * like.shape[1] * len(self.columns) * like.shape[3]
        shape = (self.num_slots, like.shape[1], self.width, like.shape[3])
        return self.memory.take(count, like)[: torch.Size(shape).numel()].view(shape)

    def copied(self, old: Tensor, num_used: int) -> Tensor:
        """A copy of the first `num_used` slots at the present width.

        The rest of the memory holds zeros or old states: finite, which is all that masked columns
        need.
        """
        new = self.allocate(old)
        kept = min(self.width, old.shape[2])
        new[:num_used, :, :kept] = old[:num_used, :, :kept]
        return new

    def target_prefill(self, lengths: Tensor, width: int, sources: Tensor, first: int) -> Tensor:
        """The next pass fills slots from `first` on with prompts `sources`; returns its mask.

        The prompts come padded on the left.
        """
        self.is_prefill, self.window = True, 1 + width
        self.sources, self.first = sources, first
        self.gather = (self.columns[:width] + (width - lengths)[:, None]).clamp(max=width - 1)
        mask = self.columns[:width] >= (width - lengths)[:, None]
        return pad(mask.long(), (1, 0))

    def target_decode(self, positions: Tensor) -> Tensor:
        """In the next pass slots 0, 1, ... write the token of this position; returns their mask."""
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
        super().__init__()
        self.slots = slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate all slots, now that the model shows its head count, head size and dtype."""
        self.keys = self.slots.allocate(key_states)
        self.values = self.slots.allocate(value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the new keys and values; returns all that the queries of this pass look at."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._store(self.keys, key_states), self._store(self.values, value_states)

    def _store(self, stored: Tensor, new: Tensor) -> Tensor:
        slots = self.slots
        if slots.is_prefill:
            by_column = new.transpose(1, 2)
            left = by_column[slots.sources[:, None], slots.gather[slots.sources]].transpose(1, 2)
            kept = left[:, :, : slots.width - 1]  # what is beyond is padding
            stored[slots.first : slots.first + len(left), :, 1 : 1 + kept.shape[2]] = kept
            return pad(new, (0, 0, 1, 0))
        stored[slots.sources, :, slots.targets] = new.squeeze(2)
        return stored[: len(slots.sources)]

    def put_prompts(self, keys: Tensor, values: Tensor, sources: Tensor, first: int) -> None:
        """Copy the states of prompts `sources` into the slots from `first` on.

        Keys and values are [prompts, heads, columns, size].
        """
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        width = min(keys.shape[2], self.slots.width - 1)  # what is beyond is padding
        target = (slice(first, first + len(sources)), slice(None), slice(1, 1 + width))
        self.keys[target] = keys[sources, :, :width]
        self.values[target] = values[sources, :, :width]

    def copies_of(self, slots: Places, count: int) -> tuple[Tensor, Tensor] | None:
        """Keys and values of the first `count` tokens of slots; None: it has none of its own."""
        if not self.is_initialized:
            return None
        keys, values = (part[slots, :, 1 : 1 + count] for part in (self.keys, self.values))
        return (keys.clone(), values.clone()) if isinstance(slots, slice) else (keys, values)

    def put_kept(self, first: int, keys: Tensor, values: Tensor, rows: Places, count: int) -> None:
        """Fill slots from `first` on with these rows of such copies, `count` tokens of each."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        keys, values = keys[rows, :, :count], values[rows, :, :count]
        target = (slice(first, first + len(keys)), slice(None), slice(1, 1 + count))
        self.keys[target], self.values[target] = keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns attended over, first column)."""
        return self.slots.window, 0

    def get_seq_length(self) -> int:
        """The first query's column: 1 in prefill, the last one when decoding.

        At the last one the mask alone decides what is attended to.
        """
        return 1 if self.slots.is_prefill else self.slots.window - 1

    def resize(self, num_used: int) -> None:
        """Copy into slots of the present width, as many columns as there is room for."""
        if self.is_initialized:
            before = self.keys, self.values
            self.keys, self.values = (self.slots.copied(states, num_used) for states in before)
            for states in before:
                self.slots.memory.give(states)

    def get_max_length(self) -> int:
        """Columns of a slot."""
        return self.slots.width


class SlotCache(Cache):
    """What a Hugging Face model takes as `past_key_values`."""

    def __init__(self, num_layers: int, slots: Slots) -> None:
        self.slots = slots
        self.slot_layers = [SlotLayer(slots) for _ in range(num_layers)]
        super().__init__(layers=list(self.slot_layers))

    def fit(self, num_columns: int, num_used: int) -> None:
        """Make the slots wide enough for so many columns, or narrower where half of them would do.

        Only the first `num_used` slots keep what they hold.
        """
        slots = self.slots
        needed = max(slots.least_width, whole_blocks(num_columns))
        needed = min(needed, len(slots.columns))
        if slots.width < needed or needed <= slots.width // 2:
            slots.width = needed
            for layer in self.slot_layers:
                layer.resize(num_used)

    def grow(self, num_slots: int, widest: int, num_used: int) -> None:
        """Room for more and wider slots; only the first `num_used` keep what they hold."""
        self.slots.num_slots = num_slots
        self.slots.set_widest(max(widest, len(self.slots.columns)))
        for layer in self.slot_layers:
            layer.resize(num_used)

    def release(self) -> None:
        """Give the slots' memory back, for others to use; no slot may be in use."""
        for layer in self.slot_layers:
            if layer.is_initialized:
                self.slots.memory.give(layer.keys)
                self.slots.memory.give(layer.values)

    def num_bytes(self, count: int) -> int:
        """Of the keys and values of so many tokens of a slot."""
        stored = (
            x for one in self.slot_layers if one.is_initialized for x in (one.keys, one.values)
        )
        return sum(count * each[0, :, 0].nbytes for each in stored)

    def copies_of(self, slots: Places, count: int) -> States:
        """Keys and values of the first `count` tokens of slots."""
        return States([layer.copies_of(slots, count) for layer in self.slot_layers])

    def put_kept(self, first: int, states: States, rows: Places, count: int) -> None:
        """Fill slots from `first` on with these rows of such copies, `count` tokens of each."""
        for layer, kept in zip(self.slot_layers, states.layers, strict=True):
            if kept is not None:
                layer.put_kept(first, *kept, rows, count)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots over others in every layer."""
        for layer in self.slot_layers:
            if not layer.is_initialized:  # it reads an earlier layer's keys and values
                continue
            for stored in (layer.keys, layer.values):
                stored.index_copy_(0, targets, stored.index_select(0, sources))
