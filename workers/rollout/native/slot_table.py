"""The samples in the slots of the KV cache, as arrays with one row per slot."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from workers.rollout.sample import CachedStates, Sample

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
