"""Keys and values of multi-turn samples, which the scheduler stores from one turn to the next.

When a turn has ended, `TurnCache.keep` copies its slots. When the next one begins, `restore` writes
the copies into slots.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from workers.rollout.native.kv_cache import SlotCache, places_of
from workers.rollout.native.slot_table import SlotTable, Waiting
from workers.rollout.sample import CachedStates, States


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
