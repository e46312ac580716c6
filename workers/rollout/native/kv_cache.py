"""The KV cache of the native engine: a slot per sample, filled from the left, and its samples.

A slot's columns 1..n contain the keys and values of the sample's n tokens so far. Column 0 is never
attended to. Samples of different lengths decode together, and each writes its own next column. All
slots have the same width, less than twice what the longest running sample needs (or `min_window`),
and are copied when the width changes. So a decode step reads memory in one stream, twice as fast as
if it skipped unused columns.

On a CPU, four facts make the bits of a row's attention independent of the other rows. A pass
attends to a number of columns that is a multiple of `BLOCK`, so sums over columns are grouped in
the same way (masked columns add zeros). It attends to at least `min_window` columns, because fewer
would use another kernel. Prompts are padded to multiples of `BLOCK`, too. Because column 0 is
always masked, no mask is all ones, which transformers would drop in some batches and not in others.

`TurnCache` stores keys and values of multi-turn samples: when a turn has ended, `keep` copies its
slots. When the next one begins, `restore` writes the copies into slots.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin

from verl_like.errors import RolloutError
from workers.models.attention import heads_of, layer_configs
from workers.models.memory_shapes import cached_widths
from workers.rollout.sample import CachedStates, Sample, States

BLOCK = 16
"""Widths are multiples of this number of columns, the lanes of the widest vector instructions."""
MAX_REUSED_BYTES = 2**28
"""Largest cache, in bytes, whose memory the next generation reuses.

For a larger cache, the cost of new memory is small in comparison.
"""
MIN_MULTIPLICATIONS = 400
"""For smaller matrix products in a batch, torch uses another kernel, with other bits."""


Places = Tensor | slice
"""Indices of slots or rows."""


def places_of(numbers: Sequence[int], device: torch.device) -> Places:
    """Return ascending numbers as an index: a slice if they are consecutive, which is faster."""
    if numbers and numbers[-1] - numbers[0] + 1 == len(numbers):
        return slice(numbers[0], numbers[-1] + 1)
    return torch.tensor(numbers, dtype=torch.long, device=device)


def whole_blocks(count: int) -> int:
    """Round `count` up to a multiple of `BLOCK`."""
    return -(-count // BLOCK) * BLOCK


def min_window(config: Any) -> int:
    """Return the smallest number of columns that a decode step attends to.

    On Intel CPUs, MKL uses other kernels if there are fewer keys than the head size, or no more
    keys than query heads that share them, and the results then differ in the last bits.
    """
    columns = 0
    for layer in layer_configs(config):
        heads, groups, size = heads_of(layer)
        sharing = heads // groups
        needed = max(-(-MIN_MULTIPLICATIONS // (sharing * size)), size, sharing + 1)
        columns = max(columns, needed)
    return whole_blocks(columns)


def slot_width(config: Any, prompt_width: int, response_width: int) -> int:
    """Return the number of columns that a padded prompt and a response of these widths need."""
    return max(min_window(config), whole_blocks(1 + whole_blocks(prompt_width) + response_width))


def prefill_width(longest: int, prompt_width: int) -> int:
    """Return the width to which a group of prompts is padded.

    It is a multiple of `BLOCK`, or `prompt_width` if that is at most one block.
    """
    return prompt_width if prompt_width <= BLOCK else whole_blocks(longest)


def slots_that_fit(
    config: Any, width: int, dtype: torch.dtype, limit_gib: float, least: int
) -> int:
    """Return the number of slots in `limit_gib` GiB; raise if it is less than `least`."""
    widths = [sum(cached_widths(layer)) for layer in layer_configs(config)]
    per_token = sum(widths) + max(widths)  # `resize` copies one layer
    slot_bytes = per_token * width * dtype.itemsize
    fit = int(limit_gib * 2**30 / slot_bytes)
    if fit < least:
        raise RolloutError(
            f"rollout: a cache of kv_cache_gib={limit_gib:g} is too small. One sample of up to "
            f"{width} tokens needs {slot_bytes / 2**30:.3g} GiB of keys and values, and at least "
            f"{least} are computed together. Set actor_rollout_ref.rollout.kv_cache_gib to "
            f"{1.01 * least * slot_bytes / 2**30:.3g} or more, or lower data.max_prompt_length or "
            "data.max_response_length."
        )
    return fit


class CacheMemory:
    """Memory of slots, reused for other slots and by the next generation.

    Memory is reused because writing to new memory pages is slow. Masked columns must contain finite
    numbers, so the engine drops the memory of a generation with non-finite numbers.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def allocate(self, count: int, like: Tensor) -> Tensor:
        """Return memory for `count` numbers in the dtype of `like`, with zeros or old contents.

        On a CPU, new memory is in huge pages if the system has them.
        """
        for index, old in enumerate(self._free):
            if len(old) >= count and old.dtype == like.dtype:
                return self._free.pop(index)[:count]
        if like.device.type != "cpu":
            return like.new_zeros(count)

        # the system allocates pages when they are first written to
        memory = mmap.mmap(-1, count * like.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # the system has no huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        with torch.inference_mode(False):  # so that passes in any mode may write to it
            return torch.frombuffer(memory, dtype=like.dtype)

    def release(self, states: Tensor) -> None:
        """Accept memory that is no longer used."""
        count = states.untyped_storage().nbytes() // states.itemsize
        self._free.append(states.as_strided((count,), (1,), 0))

    def end(self) -> None:
        """End a successful generation: keep its memory if it is small and on a CPU."""
        is_little = sum(block.nbytes for block in self._free) <= MAX_REUSED_BYTES
        self._free = [block for block in self._free if is_little and block.device.type == "cpu"]


class Slots:
    """The columns that the next forward pass writes and attends to, the same in all layers."""

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
        """Column numbers; in `order`, column 0 has the largest number, so that it is masked."""
        self.set_widest(widest)

        self.is_prefill = True
        self.window = 0
        self.first = 0
        self.targets = self.sources = torch.empty(0, dtype=torch.long, device=device)
        self.gather = torch.empty(0, dtype=torch.long, device=device)

    def set_widest(self, widest: int) -> None:
        """Set the maximum number of columns of a slot."""
        self.columns = torch.arange(widest, device=self.columns.device)
        self.order = torch.where(self.columns > 0, self.columns, widest)

    def allocate(self, like: Tensor) -> Tensor:
        """Return memory for the slots of one layer, large enough to widen them to the maximum.

        `like` is a tensor of keys or values, whose head count, head size and dtype are used.
        """
        count = self.num_slots * like.shape[1] * len(self.columns) * like.shape[3]
        shape = (self.num_slots, like.shape[1], self.width, like.shape[3])
        return self.memory.allocate(count, like)[: torch.Size(shape).numel()].view(shape)

    def copied(self, old: Tensor, num_used: int) -> Tensor:
        """Return slots of the current width, with copies of the first `num_used` old slots.

        The rest of the memory contains zeros or old states. Both are finite, as masked columns must
        be.
        """
        new = self.allocate(old)
        width = min(self.width, old.shape[2])
        new[:num_used, :, :width] = old[:num_used, :, :width]
        return new

    def target_prefill(self, lengths: Tensor, width: int, sources: Tensor, first: int) -> Tensor:
        """Prepare a pass that reads prompts into slots; return its mask.

        Slot `first + i` gets prompt `sources[i]`. The prompts are padded on the left.
        """
        self.is_prefill, self.window = True, 1 + width
        self.sources, self.first = sources, first
        self.gather = (self.columns[:width] + (width - lengths)[:, None]).clamp(max=width - 1)
        mask = self.columns[:width] >= (width - lengths)[:, None]
        return pad(mask.long(), (1, 0))

    def target_decode(self, positions: Tensor) -> Tensor:
        """Prepare a pass that reads one token into each active slot; return its mask."""
        self.is_prefill, self.window = False, self.width
        self.sources = self.columns.new_ones(len(positions)).cumsum(0) - 1
        self.targets = positions + 1
        return (self.order[: self.window] <= self.targets[:, None]).long()


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, each [slots, heads, width, head size]."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, slots: Slots) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.slots = slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate all slots with the head count, head size and dtype of these states."""
        self.keys = self.slots.allocate(key_states)
        self.values = self.slots.allocate(value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values; return all keys and values that this pass attends to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._store(self.keys, key_states), self._store(self.values, value_states)

    def _store(self, stored: Tensor, new: Tensor) -> Tensor:
        slots = self.slots
        if slots.is_prefill:
            by_column = new.transpose(1, 2)
            moved = by_column[slots.sources[:, None], slots.gather[slots.sources]].transpose(1, 2)
            real = moved[:, :, : slots.width - 1]  # further columns are padding
            stored[slots.first : slots.first + len(moved), :, 1 : 1 + real.shape[2]] = real
            return pad(new, (0, 0, 1, 0))
        stored[slots.sources, :, slots.targets] = new.squeeze(2)
        return stored[: len(slots.sources)]

    def copies_of(self, slots: Places, count: int) -> tuple[Tensor, Tensor] | None:
        """Return copies of the first `count` tokens' keys and values in these slots.

        Return None if this layer stores none.
        """
        if not self.is_initialized:
            return None
        keys, values = (part[slots, :, 1 : 1 + count] for part in (self.keys, self.values))
        return (keys.clone(), values.clone()) if isinstance(slots, slice) else (keys, values)

    def fill(self, first: int, keys: Tensor, values: Tensor, rows: Places, count: int) -> None:
        """Write rows of keys and values, `count` tokens each, into slots from `first` on."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        keys, values = keys[rows, :, :count], values[rows, :, :count]
        target = (slice(first, first + len(keys)), slice(None), slice(1, 1 + count))
        self.keys[target], self.values[target] = keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of attended columns, and the first of them."""
        return self.slots.window, 0

    def get_seq_length(self) -> int:
        """Return the column of the first query: 1 in prefill, the last column in decode.

        In decode this is only an upper bound, because the mask decides which columns count.
        """
        return 1 if self.slots.is_prefill else self.slots.window - 1

    def resize(self, num_used: int) -> None:
        """Copy the first `num_used` slots into slots of the current width."""
        if self.is_initialized:
            before = self.keys, self.values
            self.keys, self.values = (self.slots.copied(states, num_used) for states in before)
            for states in before:
                self.slots.memory.release(states)

    def get_max_length(self) -> int:
        """Return the number of columns of a slot."""
        return self.slots.width


class SlotCache(Cache):
    """The KV cache of a model, used as the `past_key_values` of a Hugging Face module."""

    def __init__(self, num_layers: int, slots: Slots) -> None:
        self.slots = slots
        self.slot_layers = [SlotLayer(slots) for _ in range(num_layers)]
        super().__init__(layers=list(self.slot_layers))

    def fit(self, num_columns: int, num_used: int) -> None:
        """Widen the slots to `num_columns` if needed; narrow them if half their width suffices.

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
        """Allocate more and wider slots; only the first `num_used` keep their contents."""
        self.slots.num_slots = num_slots
        self.slots.set_widest(max(widest, len(self.slots.columns)))
        for layer in self.slot_layers:
            layer.resize(num_used)

    def release(self) -> None:
        """Give the slots' memory back to `CacheMemory`; no slot may be in use."""
        for stored in self._stored():
            self.slots.memory.release(stored)

    def num_bytes(self, count: int) -> int:
        """Return the bytes of the keys and values of `count` tokens."""
        return sum(count * stored[0, :, 0].nbytes for stored in self._stored())

    def copies_of(self, slots: Places, count: int) -> States:
        """Return copies of the first `count` tokens' keys and values in these slots."""
        return States([layer.copies_of(slots, count) for layer in self.slot_layers])

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the contents of slots `sources` to slots `targets` in every layer."""
        for stored in self._stored():
            stored.index_copy_(0, targets, stored.index_select(0, sources))

    def _stored(self) -> Iterator[Tensor]:
        """Yield the keys and values of all layers that do not read those of an earlier layer."""
        for layer in self.slot_layers:
            if layer.is_initialized:
                yield layer.keys
                yield layer.values


Row = tuple[tuple[int, ...], tuple[Any, ...]]
"""Tokens, and the images among them."""


@dataclass(frozen=True)
class Waiting:
    """A sample that waits for a slot."""

    number: int
    sample: Sample
    read_at_once: int
    """Number of response tokens that are read in one pass with the prompt."""
    cached: CachedStates | None = None
    """Stored keys and values, which replace this pass."""

    @property
    def text(self) -> tuple[int, ...]:
        """The tokens that are read in this pass."""
        return (*self.sample.prompt, *self.sample.tokens[: self.read_at_once].tolist())

    @property
    def row(self) -> Row:
        """The tokens and the images that are read in this pass."""
        return self.text, self.sample.images


class SlotTable:
    """One row per slot; rows of empty slots have arbitrary contents."""

    def __init__(self, num_slots: int, max_tokens: int, num_log_probs: int) -> None:
        """Create a table without samples."""
        shape = num_slots, max_tokens
        self.numbers = np.zeros(num_slots, dtype=np.int64)
        """The numbers by which the engine knows the samples."""
        self.samples = np.zeros(num_slots, dtype=object)
        """The samples as they were submitted."""
        self.keys = np.zeros(num_slots, dtype=np.uint64)
        self.prompt_lengths = np.zeros(num_slots, dtype=np.int64)
        self.lengths = np.zeros(num_slots, dtype=np.int64)
        """Response tokens so far: those in the cache, and the one to be read next."""
        self.forced = np.zeros(num_slots, dtype=np.int64)
        """Response tokens that the sample had when it was submitted."""
        self.shifts = np.zeros(num_slots, dtype=np.int64)
        """The shift that images cause in the positions of later tokens (Qwen-VL)."""
        self.longest = np.zeros(num_slots, dtype=np.int64)
        """Maximum response tokens of the sample."""
        self.num_sampled = np.zeros(num_slots, dtype=np.int64)
        """Tokens that the current `run` of the scheduler has sampled."""
        self.tokens = np.zeros(shape, dtype=np.int64)
        self.log_probs = np.zeros((*shape, num_log_probs), dtype=np.float32)
        self.versions = np.zeros(shape, dtype=np.int32)
        self.routed = np.zeros(num_slots, dtype=object)
        """Lists of the routers' choices, one entry per pass, if the sampling requests them."""

    def grown(self, num_slots: int) -> SlotTable:
        """Return a table with more slots and the same samples."""
        larger = SlotTable(num_slots, *self.log_probs.shape[1:])
        for new, old in zip(vars(larger).values(), vars(self).values(), strict=True):
            new[: len(old)] = old
        return larger

    def move(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Copy the rows of slots `sources` to slots `targets`."""
        for array in vars(self).values():
            array[targets] = array[sources]

    def put(self, slot: int, entry: Waiting, length: int) -> None:
        """Put a sample into a slot, with `length` as its entry in `lengths`."""
        sample = entry.sample
        if sample.cached is not None:
            sample = replace(sample, cached=CachedStates())  # its states are outdated from now on
        count = len(sample.tokens)
        self.numbers[slot], self.samples[slot], self.keys[slot] = entry.number, sample, sample.seed
        self.prompt_lengths[slot], self.lengths[slot] = len(sample.prompt), length
        self.forced[slot], self.num_sampled[slot] = count, 0
        self.longest[slot] = sample.longest(self.tokens.shape[1])
        self.tokens[slot, :count] = sample.tokens
        self.log_probs[slot, :count] = sample.stacked_log_probs(self.log_probs.shape[2])
        self.versions[slot, :count] = sample.versions

    def sample(self, slot: int, finish_reason: str, states: CachedStates | None) -> Sample:
        """Return the sample in a slot, with its tokens so far."""
        length = max(int(self.lengths[slot]), int(self.forced[slot]))
        sample: Sample = self.samples[slot]
        if states is not None:
            sample = replace(sample, cached=states)
        routed = torch.cat(self.routed[slot]) if self.routed[slot] else None
        with torch.inference_mode(False):  # autograd rejects tensors created in inference mode
            return sample.with_response(
                torch.from_numpy(self.tokens[slot, :length]),
                torch.from_numpy(self.log_probs[slot, :length]),
                torch.from_numpy(self.versions[slot, :length]),
                finish_reason,
                routed,
            )


class TurnCache:
    """Copies keys and values from slots, and counts the bytes of all copies up to a limit."""

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0

    def keep(
        self, slots: NDArray[np.int64], table: SlotTable, cache: SlotCache, version: int | None
    ) -> dict[int, CachedStates]:
        """Copy the keys and values of samples that continue later, as long as memory suffices.

        They do not include the newest token of each sample, which the model has not read yet.
        """
        asking = slots[[sample.cached is not None for sample in table.samples[slots]]]
        if not len(asking):
            return {}
        counts = table.prompt_lengths[asking] + table.lengths[asking] - 1
        longest = int(counts.max())
        num_fitting = max(self.limit - self.bytes, 0) // max(cache.num_bytes(longest), 1)
        fitting = asking[:num_fitting].tolist()
        states = cache.copies_of(places_of(fitting, cache.slots.columns.device), longest)
        self.bytes += states.num_bytes
        weakref.finalize(states, self._forget, states.num_bytes).atexit = False
        states_of_slots = {}
        for row, (slot, count) in enumerate(zip(fitting, counts.tolist(), strict=False)):
            prompt = table.samples[slot].prompt
            read = [*prompt, *table.tokens[slot, : count - len(prompt)].tolist()]
            shift = int(table.shifts[slot])
            states_of_slots[slot] = CachedStates(states, row, read, version, shift)
        return states_of_slots

    def _forget(self, num_bytes: int) -> None:
        self.bytes -= num_bytes


def with_states(entry: Waiting, version: int | None, is_routed: bool) -> Waiting:
    """Return the entry, with stored keys and values if they equal those of a new pass."""
    sample, cached = entry.sample, entry.sample.cached
    if cached is None or cached.states is None or cached.version != version:
        return entry
    if is_routed and sample.routed_experts is None:
        return entry
    num_read = len(cached.read) - len(sample.prompt)
    text = [*sample.prompt, *sample.tokens[: max(num_read, 0)].tolist()]
    is_usable = entry.read_at_once <= num_read and text == cached.read
    return replace(entry, read_at_once=num_read, cached=cached) if is_usable else entry


def restore(group: Sequence[Waiting], table: SlotTable, cache: SlotCache, first: int) -> None:
    """Put samples with stored keys and values into the slots from `first` on, in any order."""
    of_states: dict[States | None, list[tuple[CachedStates, Waiting]]] = {}
    for entry in group:
        if entry.cached:
            of_states.setdefault(entry.cached.states, []).append((entry.cached, entry))
    for states, together in of_states.items():
        assert states is not None, "else they are not usable"
        together.sort(key=lambda pair: pair[0].row)
        rows = places_of([cached.row for cached, _ in together], cache.slots.columns.device)
        longest = max(len(cached.read) for cached, _ in together)
        for layer, keys_and_values in zip(cache.slot_layers, states.layers, strict=True):
            if keys_and_values is not None:
                layer.fill(first, *keys_and_values, rows, longest)
        for slot, (cached, entry) in enumerate(together, start=first):
            table.put(slot, entry, entry.read_at_once + 1)
            table.shifts[slot] = cached.shift
            if entry.sample.routed_experts is not None:
                table.routed[slot] = [entry.sample.routed_experts[: len(cached.read)]]
            cached.states = None
        first += len(together)
