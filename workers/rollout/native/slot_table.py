"""The samples in the slots of the KV cache, as arrays with one row per slot.

`TurnCache` stores keys and values of multi-turn samples: when a turn has ended, `keep` copies its
slots. When the next one begins, `restore` writes the copies into slots.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from workers.rollout.native.kv_cache import SlotCache, places_of
from workers.rollout.sample import CachedStates, Sample, States

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
        """How far images shift the positions of the tokens after them (Qwen-VL)."""
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
