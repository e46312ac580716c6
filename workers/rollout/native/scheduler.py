"""Which samples run in the native engine, what each has so far, and which slot of the cache it has.

waiting samples --prefill, in groups--> slots of the KV cache
slots           --decode, one token a pass--> finished samples leave, waiting ones enter
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.rollout.base import Budget, SamplingParams
from workers.rollout.module_engine import ModuleEngine
from workers.rollout.native.direct_forward import DirectForward
from workers.rollout.native.kv_cache import (
    CacheMemory,
    SlotCache,
    Slots,
    least_window,
    prefill_width,
    slot_width,
    whole_blocks,
)
from workers.rollout.native.linear import MIN_ROWS, goes_by_onednn, least_rows
from workers.rollout.native.module_forward import ModuleForward
from workers.rollout.sample import Sample, ends_with_stop_string, num_of_older_weights
from workers.rollout.sampling import choose_tokens, uniforms

ROWS_STEP = 16
"""Passes over more rows than this compute whole multiples of it.

oneDNN builds kernels for every number of rows, so there should be few different ones.
"""
PREFILL_PROMPTS = 64
"""Most distinct prompts of one prefill pass, to bound its memory."""

TABLES = (
    *("keys", "tokens", "log_probs", "versions", "prompt_lengths", "lengths"),
    *("forced", "read_at_once", "num_drawn"),
)
"""Arrays of a scheduler with a row for each of its samples."""


class Scheduler:
    """The running samples, a row each in its tables; rows are added and removed between passes.

    Samples in flight fill slots 0..num_active-1; the last ones move into freed slots, so a pass
    runs over a prefix. A sample that begins with tokens already made (`forced`) reads those of
    older weights in one pass with its prompt, and is fed the others one by one instead of drawing.
    So its keys and values, and with them its bits, are those of an uninterrupted run.
    """

    def __init__(
        self,
        engine: ModuleEngine,
        sampling: SamplingParams,
        forward_class: type[DirectForward] | type[ModuleForward],
        memory: CacheMemory,
        most_active: int,
    ) -> None:
        """At most `most_active` samples are in flight."""
        self.config, self.most_active = engine.module.config.get_text_config(), most_active
        self.engine, self.sampling, self.memory = engine, sampling, memory
        self.forward_class, self.version = forward_class, engine.version
        first_weight = next(engine.module.parameters())
        self.device = first_weight.device
        by_onednn = forward_class is DirectForward and goes_by_onednn(engine.module)
        self.least_rows = least_rows(first_weight, by_onednn)
        stops = [token for token in sampling.stop_token_ids if 0 <= token < engine.vocab_size]
        self.is_stop = np.zeros(engine.vocab_size, dtype=bool)
        self.is_stop[stops] = True

        width = sampling.max_tokens
        self.samples: list[Sample | None] = []
        self.prompts: list[tuple[int, ...]] = []
        self.number_of_row: list[int] = []
        self.keys = np.zeros(0, dtype=np.uint64)
        self.tokens = np.zeros((0, width), dtype=np.int64)
        self.log_probs = np.zeros((0, width, sampling.num_log_probs), dtype=np.float32)
        self.versions = np.zeros((0, width), dtype=np.int32)
        self.prompt_lengths, self.lengths, self.forced, self.read_at_once, self.num_drawn = (
            np.zeros(0, dtype=np.int64) for _ in range(5)
        )
        """Of every row; `num_drawn` counts what the present `run` drew."""

        self.waiting: deque[int] = deque()
        self.free_rows: list[int] = []
        self.num_active = self.longest = self.max_active = 0
        self.request_of_slot = np.zeros(0, dtype=np.int64)
        self.cache: SlotCache | None = None
        self.forward: DirectForward | ModuleForward | None = None
        self.all_finite = True
        self._ended: dict[int, str] = {}
        """Row -> why it is finished."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing runs."""
        return not self.num_active and not self.waiting

    def add(self, samples: Mapping[int, Sample]) -> None:
        """These wait for a slot, by number; those that go on come before those that begin."""
        rows = self._rows(len(samples))
        for row, (number, sample) in zip(rows, samples.items(), strict=True):
            length = len(sample.tokens)
            self.samples[row], self.number_of_row[row] = sample, number
            self.prompts[row] = tuple(sample.prompt)
            self.keys[row], self.prompt_lengths[row] = sample.key, len(sample.prompt)
            self.lengths[row], self.forced[row] = 0, length
            self.tokens[row, :length] = sample.tokens
            self.log_probs[row, :length] = sample.stacked_log_probs(self.sampling.num_log_probs)
            self.versions[row, :length] = sample.versions
            versions = sample.versions.tolist()
            self.read_at_once[row] = num_of_older_weights(versions, self.engine.version)
        self.waiting.extend(sorted(rows, key=lambda row: self.read_at_once[row] == 0))

    def remove(self, numbers: Collection[int]) -> dict[int, Sample]:
        """Let go of these; as far as they are."""
        rows = [row for row, number in enumerate(self.number_of_row) if number in numbers]
        removed = {self.number_of_row[row]: self._sample(row, "abort") for row in rows}
        self.waiting = deque(row for row in self.waiting if row not in set(rows))
        active = self.request_of_slot[: self.num_active]
        self._free_slots(np.flatnonzero(np.isin(active, rows)))
        self._free_rows(rows)
        return removed

    def take_finished(self) -> dict[int, Sample]:
        """What has been finished since the last call."""
        ended, self._ended = self._ended, {}
        finished = {self.number_of_row[row]: self._sample(row, why) for row, why in ended.items()}
        self._free_rows(ended)
        return finished

    def run(self, budget: Budget) -> None:
        """Prefill when a group of prompts can enter, else decode one token of everything in flight.

        Until all are finished, or the budget is spent.
        """
        self._take_newer_weights()
        self._fit_cache()
        self.num_drawn[:] = 0
        while not self.is_empty:
            group = self._next_group()
            if group:
                self._prefill(group)
            elif self._has_drawn(budget.max_tokens):
                return
            else:
                self._decode()
            if budget.is_over:
                return

    def _has_drawn(self, max_tokens: int | None) -> bool:
        if max_tokens is None:
            return False
        active = self.request_of_slot[: self.num_active]
        return int(self.num_drawn[active].max()) >= max_tokens

    def _rows(self, count: int) -> list[int]:
        """Rows of the tables for so many samples: free ones, and new ones behind them."""
        rows = [self.free_rows.pop() for _ in range(min(count, len(self.free_rows)))][::-1]
        more, first = count - len(rows), len(self.samples)
        if more:
            self.samples += [None] * more
            self.prompts += [()] * more
            self.number_of_row += [-1] * more
            for name in TABLES:
                table = getattr(self, name)
                new = np.zeros((more, *table.shape[1:]), dtype=table.dtype)
                setattr(self, name, np.concatenate([table, new]))
        return [*rows, *range(first, first + more)]

    def _fit_cache(self) -> None:
        """Slots for as many samples as run, wide enough for each."""
        num_running = len(self.samples) - len(self.free_rows)
        self.max_active = max(self.max_active, min(self.most_active, num_running))
        num_slots = max(self.least_rows, self.max_active)
        longest = max(map(len, self.prompts), default=0)
        widest = slot_width(self.config, longest, self.sampling.max_tokens)
        if self.cache is None:
            least = least_window(self.config)
            slots = Slots(num_slots, widest, least, self.device, self.memory)
            self.cache = SlotCache(self.config.num_hidden_layers, slots)
        elif num_slots > self.cache.slots.num_slots or widest > len(self.cache.slots.columns):
            self.cache.grow(num_slots, widest, self.num_active)
            self.forward = None
        more = num_slots - len(self.request_of_slot)
        if more > 0:
            self.request_of_slot = np.pad(self.request_of_slot, (0, more))
        if self.forward is None:
            self.forward = self.forward_class(self.engine.module, self.cache)

    def _take_newer_weights(self) -> None:
        """What is in flight goes on with the weights of now.

        It is read again first, unless its keys and values are to be kept as the old ones made them.
        """
        if self.engine.version == self.version:
            return
        self.version, self.forward = self.engine.version, None
        if self.engine.limits.keep_kv:
            return
        active = self.request_of_slot[: self.num_active]
        self.forced[active] = np.maximum(self.forced[active], self.lengths[active])
        self.waiting.extendleft(reversed(active.tolist()))
        unread = list(self.waiting)
        self.read_at_once[unread] = self.forced[unread]
        self.num_active = 0

    def _text(self, row: int) -> tuple[int, ...]:
        """What is read of a sample in one pass."""
        made = self.tokens[row, : self.read_at_once[row]]
        return (*self.prompts[row], *made.tolist())

    def _next_group(self) -> list[int]:
        """The next samples to prefill; none while fewer than `MIN_ROWS` of them would fit."""
        count = min(len(self.waiting), self.max_active - self.num_active)
        if not self.waiting or count < min(MIN_ROWS, len(self.waiting), self.max_active):
            return []

        group: list[int] = []
        distinct: set[tuple[int, ...]] = set()
        most_tokens = PREFILL_PROMPTS * self.engine.limits.prompt_width
        reads_responses = self.read_at_once[self.waiting[0]] > 0
        while self.waiting and len(group) < count:
            if (self.read_at_once[self.waiting[0]] > 0) != reads_responses:
                break
            distinct.add(self._text(self.waiting[0]))
            num_tokens = len(distinct) * max(map(len, distinct))
            if group and (len(distinct) > PREFILL_PROMPTS or num_tokens > most_tokens):
                break
            group.append(self.waiting.popleft())
        return group

    def _prefill(self, group: list[int]) -> None:
        """One pass over the distinct prompts of the group; samples of one prompt share it."""
        assert self.cache is not None, "made before the first pass"
        assert self.forward is not None, "made before the first pass"
        texts = [self._text(row) for row in group]
        distinct = list(dict.fromkeys(texts))
        row_of = {text: row for row, text in enumerate(distinct)}
        sources = torch.tensor([row_of[text] for text in texts], device=self.device)

        longest = max(map(len, distinct))
        width = whole_blocks(longest)
        if not self.read_at_once[group].any():
            width = prefill_width(longest, self.engine.limits.prompt_width)
        rows = rows_of_pass(len(distinct), max(MIN_ROWS, -(-self.least_rows // width)))
        prompts = [*distinct, *[(0,)] * (rows - len(distinct))]
        self.cache.fit(max(1 + width, self.longest + 2), self.num_active)
        logits = self.forward.prefill(prompts, width, sources, self.num_active)

        slots = np.arange(self.num_active, self.num_active + len(group))
        self.request_of_slot[slots] = group
        self.num_active += len(group)
        self.lengths[group] = self.read_at_once[group]
        self._append(slots, logits[sources])

    def _decode(self) -> None:
        """One more token for slots 0..num_active-1.

        Slots beyond, up to the number of rows of a pass, are computed and not read.
        """
        assert self.cache is not None, "made before the first pass"
        assert self.forward is not None, "made before the first pass"
        rows = self.request_of_slot[: rows_of_pass(self.num_active, self.least_rows)]
        steps = np.maximum(self.lengths[rows] - 1, 0)
        positions = self.prompt_lengths[rows] + steps
        self.longest = int(positions[: self.num_active].max())
        positions = np.minimum(positions, self.longest)
        ids = self.tokens[rows, steps]

        self.cache.fit(self.longest + 2, self.num_active)
        logits = self.forward.decode(
            torch.from_numpy(ids).to(self.device), torch.from_numpy(positions).to(self.device)
        )
        self._append(np.arange(self.num_active), logits[: self.num_active])

    def _append(self, slots: NDArray[np.int64], logits: Tensor) -> None:
        """Draw the next token of each of these slots, and empty those that are finished."""
        rows = self.request_of_slot[slots]
        steps = self.lengths[rows]
        noise = torch.from_numpy(uniforms(self.keys[rows], steps)).to(self.device)
        drawn = choose_tokens(logits, noise, self.sampling, torch.from_numpy(steps))
        tokens, log_probs = (column.cpu().numpy() for column in drawn)

        # A sample that is fed tokens made before keeps them, with their log-probs and versions.
        new = steps >= self.forced[rows]
        if not new.all():
            tokens = np.where(new, tokens, self.tokens[rows, steps])
            log_probs = np.where(new[:, None], log_probs, self.log_probs[rows, steps])
        self.tokens[rows, steps] = tokens
        self.log_probs[rows, steps] = log_probs
        self.versions[rows[new], steps[new]] = int(self.engine.version or 0)
        self.lengths[rows] = steps + 1
        self.num_drawn[rows] += new

        stopped = self.is_stop[tokens]
        if self.sampling.stop_strings:
            stopped |= self._ends_with_stop_string(rows, steps)
        is_finished = stopped | (steps + 1 == self.sampling.max_tokens)
        if is_finished.any():
            for row, is_stop in zip(rows[is_finished].tolist(), stopped[is_finished], strict=True):
                self._ended[row] = "stop" if is_stop else "length"
            self._free_slots(slots[is_finished])

    def _sample(self, row: int, finish_reason: str) -> Sample:
        """The sample of a row, with what it has so far."""
        sample, length = self.samples[row], max(int(self.lengths[row]), int(self.forced[row]))
        assert sample is not None, "a row that is free has none"
        self.all_finite &= bool(np.isfinite(self.log_probs[row, :length]).all())
        tokens, log_probs, versions = (
            torch.from_numpy(table[row, :length])
            for table in (self.tokens, self.log_probs, self.versions)
        )
        return sample.with_response(tokens, log_probs, versions, finish_reason)

    def _ends_with_stop_string(
        self, rows: NDArray[np.int64], steps: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Which of these samples have just completed a stop string."""
        found = np.zeros(len(rows), dtype=bool)
        strings, decode = self.sampling.stop_strings, self.engine.decode
        if decode is None:
            return found

        for place, (row, step) in enumerate(zip(rows.tolist(), steps.tolist(), strict=True)):
            if step + 1 >= self.sampling.min_tokens:
                tokens = self.tokens[row, : step + 1].tolist()
                found[place] = ends_with_stop_string(tokens, strings, decode)
        return found

    def _free_slots(self, emptied: NDArray[np.int64]) -> None:
        """Empty these slots, and move active ones from the end into the gaps."""
        left = self.num_active - len(emptied)
        gaps = emptied[emptied < left]
        stays = np.ones(self.num_active, dtype=bool)
        stays[emptied] = False
        movers = left + stays[left:].nonzero()[0]
        if len(gaps):
            assert self.cache is not None, "slots were filled"
            self.cache.move(*(torch.from_numpy(slots).to(self.device) for slots in (movers, gaps)))
            self.request_of_slot[gaps] = self.request_of_slot[movers]
        self.num_active = left

    def _free_rows(self, rows: Iterable[int]) -> None:
        for row in rows:
            self.samples[row], self.prompts[row], self.number_of_row[row] = None, (), -1
            self.free_rows.append(row)


def rows_of_pass(count: int, least: int) -> int:
    """How many rows a pass over `count` of them computes: at least `least`, see `ROWS_STEP`."""
    if count <= ROWS_STEP:
        return max(least, 1 << (count - 1).bit_length())
    return -(-count // ROWS_STEP) * ROWS_STEP
