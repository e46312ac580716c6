"""The embedded rollout engine: a decode loop over Hugging Face causal LMs with full attention.

    waiting samples --prefill, in groups--> slots of the KV cache
    slots           --decode, a token per pass--> finished samples leave, waiting samples enter

`module_forward.check_decoding` rejects classes that the engine does not decode correctly. The
`Scheduler` assigns samples to slots.

In float32 on a CPU, a sample's tokens and log-probs have the same bits in any batch, except with a
mixture of experts. This has four reasons. A pass has at least `direct_forward.fewest_rows` rows,
because the bits of a linear layer differ with fewer rows. Threads share a pass such that each
computes whole blocks of numbers (`MAX_MODULE_THREADS`, `direct_forward.SERIAL_NUMBERS`). Attention
covers whole blocks of columns (`native.kv_cache`). The noise is keyed by the sample
(`rollout.sampling`).
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from verl_like.process.threads import computing_with
from workers.models.lora import merged_tensors
from workers.models.routing import RecordedChoices
from workers.models.state import named_state
from workers.rollout.base import CollectBudget, EngineLimits, SamplingParams
from workers.rollout.module_engine import ModuleRolloutEngine
from workers.rollout.native.direct_forward import (
    MIN_ROWS,
    DirectForward,
    agrees,
    fewest_rows,
    is_llama_shaped,
    uses_onednn,
)
from workers.rollout.native.kv_cache import (
    CacheMemory,
    Row,
    SlotCache,
    Slots,
    SlotTable,
    TurnCache,
    Waiting,
    min_window,
    prefill_width,
    restore,
    slot_width,
    slots_that_fit,
    whole_blocks,
    with_states,
)
from workers.rollout.native.module_forward import (
    ModuleForward,
    check_decoding,
    check_model,
    grouped_decoding,
)
from workers.rollout.sample import LENGTH_LIMIT, UNFINISHED, Sample, num_read_at_once
from workers.rollout.sampling import sample_tokens, uniforms


class NativeRolloutEngine(ModuleRolloutEngine):
    """Generates with its own module, or with the trainer's (`owns_weights=False`).

    Example:

        module = load_model(ModelConfig(path="models/policy"), head="token")
        limits = EngineLimits(prompt_width=64, response_width=64)
        engine = NativeRolloutEngine(module, limits, owns_weights=True)
    """

    def __init__(
        self,
        module: Any,
        limits: EngineLimits,
        *,
        owns_weights: bool,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        """Take a causal LM of transformers, and reject one that the engine cannot decode.

        Args:
            module: the causal LM, on its device.
            limits: longest prompt and response, and memory.
            owns_weights: False if `module` is the trainer's; True if weights are loaded into it.
            decode: function from token ids to text; only stop strings need it.
        """
        super().__init__(module, limits, decode)
        self.config = module.config.get_text_config()
        width = limits.prompt_width + limits.response_width
        check_model(self.config, width)
        check_decoding(module.config, width)
        self.owns_weights = owns_weights
        self.direct_agrees: bool | None = None
        """True if `DirectForward` agrees with the module; None before they are compared."""

        first_weight = next(module.parameters())
        if first_weight.device.type == "cpu":
            from workers.cpu.onednn import limit_kernel_caches

            limit_kernel_caches()
        width = slot_width(self.config, limits.prompt_width, limits.response_width)
        least = fewest_rows(first_weight, is_llama_shaped(module) and uses_onednn(module))
        num_slots = slots_that_fit(
            self.config, width, first_weight.dtype, limits.kv_cache_gib, least
        )
        self.max_active = min(limits.max_num_seqs, num_slots // least * least)
        self.cache_memory = CacheMemory()
        self.turn_cache = TurnCache(int(limits.kv_cache_gib * 2**30))
        self._scheduler: Scheduler | None = None

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return the module's parameters and persistent buffers, with LoRA merged."""
        return merged_tensors(self.module, named_state(self.module))

    def sleep(self) -> None:
        """Free memory, including the cache."""
        super().sleep()
        self.cache_memory = CacheMemory()

    def _submit(self, samples: Mapping[int, Sample], sampling: SamplingParams) -> None:
        if self._scheduler is None:
            forward_class = DirectForward if self._can_be_direct() else ModuleForward
            memory, self.cache_memory = self.cache_memory, CacheMemory()
            self._scheduler = Scheduler(
                self, sampling, forward_class, memory, self.turn_cache, self.max_active
            )
        self._scheduler.add(samples)

    def _advance(self, budget: CollectBudget) -> dict[int, Sample]:
        scheduler = self._scheduler
        assert scheduler is not None, "`_submit` creates it"
        is_direct = scheduler.forward_class is DirectForward
        threads = torch.get_num_threads()
        with ExitStack() as context:
            context.enter_context(_inference(self.module))
            if is_direct:
                context.enter_context(torch.inference_mode())
            else:
                context.enter_context(computing_with(min(threads, MAX_MODULE_THREADS)))
            finished = scheduler.run(budget)
        if scheduler.is_empty:
            self._scheduler = None
            # memory with non-finite numbers is not reused, see `CacheMemory`
            if scheduler.all_finite:
                scheduler.cache.release()
                scheduler.memory.end()
                self.cache_memory = scheduler.memory
        return finished

    def _abort(self, numbers: Iterable[int]) -> dict[int, Sample]:
        if self._scheduler is None:
            return {}
        samples = self._scheduler.remove(set(numbers))
        if self._scheduler.is_empty:
            self._scheduler = None
        return samples

    def _can_be_direct(self) -> bool:
        """Return True if `DirectForward` supports the module and agrees with it (compared once)."""
        if not is_llama_shaped(self.module):
            return False
        if self.direct_agrees is None:
            with _inference(self.module):
                self.direct_agrees = agrees(self.module)
            if not self.direct_agrees:
                warnings.warn(
                    "actor_rollout_ref.rollout.name=native: the direct pass differs from "
                    f"{type(self.module).__name__} as transformers {transformers.__version__} "
                    "computes it; decoding through the module instead, which is slower.",
                    stacklevel=2,
                )
        return self.direct_agrees


@contextmanager
def _inference(module: Any) -> Iterator[None]:
    """Context with evaluation mode, no gradients, and `grouped_decoding`."""
    was_training = module.training
    if any(part.training for part in module.modules()):  # `eval` costs more than this check
        module.eval()
    try:
        with torch.no_grad(), grouped_decoding(module):
            yield
    finally:
        if was_training:
            module.train()


ROWS_STEP = 16
"""The number of rows of a larger pass is rounded up to a multiple of this.

oneDNN builds a kernel for every number of rows, so there should be few different numbers.
"""
MAX_MODULE_THREADS = 2
"""Maximum number of threads of a pass through the module.

Torch divides the numbers of an activation function by the threads, and computes the last numbers
of each thread differently. Each of two threads gets half of the rows, which are whole vectors.
"""
PREFILL_PROMPTS = 64
"""Maximum number of distinct texts in a prefill pass, to bound its memory."""


class Scheduler:
    """The running samples, each of which waits for a slot of the cache or has one (is active).

    Active samples are in slots 0..num_active-1, and have the same rows in the table. When slots
    become free, the last active samples move into them, so that a decode pass runs over a prefix of
    the slots.

    A sample may be submitted with response tokens (`forced`). Those of older weights are read in
    one pass with its prompt, and the others are fed one by one instead of sampling. So its keys and
    values, and therefore its results, equal those of an uninterrupted run. A sample that returns
    with the keys and values of an earlier turn is fed only the tokens that were observed since.
    """

    def __init__(
        self,
        engine: ModuleRolloutEngine,
        sampling: SamplingParams,
        forward_class: type[DirectForward] | type[ModuleForward],
        memory: CacheMemory,
        turn_cache: TurnCache,
        most_active: int,
    ) -> None:
        """Create the scheduler; at most `most_active` samples have a slot."""
        self.config, self.most_active = engine.module.config.get_text_config(), most_active
        self.engine, self.sampling, self.memory = engine, sampling, memory
        self.turn_cache = turn_cache
        self.forward_class, self.version = forward_class, engine.version
        first_weight = next(engine.module.parameters())
        self.device = first_weight.device
        by_onednn = forward_class is DirectForward and uses_onednn(engine.module)
        self.fewest_rows = fewest_rows(first_weight, by_onednn)
        stops = [token for token in sampling.stop_token_ids if 0 <= token < engine.vocab_size]
        self.is_stop = np.zeros(engine.vocab_size, dtype=bool)
        self.is_stop[stops] = True

        self.table = SlotTable(0, sampling.max_tokens, sampling.num_log_probs)
        """One row per slot; the rows of slots 0..num_active-1 are in use."""
        self.routers = engine.routers if sampling.routed_experts else None
        self.noted: RecordedChoices | None = None
        self.waiting: deque[Waiting] = deque()
        self.num_active = self.longest = self.max_active = 0
        least = min_window(self.config)
        slots = Slots(0, least, least, self.device, memory)
        self.cache = SlotCache(self.config.num_hidden_layers, slots)
        self._forward: DirectForward | ModuleForward | None = None
        self.all_finite = True

    @property
    def forward(self) -> DirectForward | ModuleForward:
        """The forward pass over the current weights and slots."""
        if self._forward is None:
            self._forward = self.forward_class(self.engine.module, self.cache)
        return self._forward

    @property
    def is_empty(self) -> bool:
        """True if no sample is active or waiting."""
        return not self.num_active and not self.waiting

    def add(self, samples: Mapping[int, Sample]) -> None:
        """Queue these samples, by number, for a slot.

        Samples with stored keys and values go to the front of the queue. Of the others, those with
        response tokens to read at once come first.
        """
        added = []
        for number, sample in samples.items():
            versions, end_of_images = sample.versions.tolist(), self._end_of_images(sample)
            at_once = num_read_at_once(versions, self.engine.version, end_of_images)
            entry = Waiting(number, sample, at_once)
            entry = with_states(entry, self.engine.version, self.routers is not None)
            if entry.cached is None:
                added.append(entry)
            else:
                self.waiting.appendleft(entry)
        self.waiting.extend(sorted(added, key=lambda entry: entry.read_at_once == 0))

    def _end_of_images(self, sample: Sample) -> int:
        """Return the position in a response after its last image; 0 without images there."""
        if not sample.images or not len(sample.tokens):
            return 0
        is_image = (sample.tokens == self.engine.image_reader.token_id) & ~sample.is_sampled
        return int((is_image * torch.arange(1, len(is_image) + 1)).max())

    def remove(self, numbers: Collection[int]) -> dict[int, Sample]:
        """Remove these samples; return them as unfinished, with their tokens so far."""
        slots = np.flatnonzero(np.isin(self.table.numbers[: self.num_active], list(numbers)))
        removed = self._take_out(slots, [UNFINISHED] * len(slots))
        for entry in self.waiting:
            if entry.number in numbers:
                removed[entry.number] = replace(entry.sample, finish_reason=UNFINISHED)
        self.waiting = deque(entry for entry in self.waiting if entry.number not in numbers)
        return removed

    def run(self, budget: CollectBudget) -> dict[int, Sample]:
        """Generate until all samples are finished, or the budget is spent; return finished ones.

        Each pass prefills a group of prompts if there are slots for it. Otherwise it decodes one
        token for every active sample.
        """
        self._prepare()
        self.table.num_sampled[:] = 0
        finished: dict[int, Sample] = {}
        with nullcontext() if self.routers is None else self.routers.recording() as self.noted:
            while not self.is_empty:
                self._admit_cached()
                group = self._next_group()
                if group:
                    finished |= self._prefill(group)
                elif budget.max_tokens is not None and (
                    int(self.table.num_sampled[: self.num_active].max()) >= budget.max_tokens
                ):
                    break
                else:
                    finished |= self._decode()
                if budget.is_over or (budget.until_one and finished):
                    break
        return finished

    def _prepare(self) -> None:
        """Continue running samples with the newest weights; allocate enough and wide enough slots.

        Unless `keep_kv_cache` is set, new weights read the tokens of these samples again.
        """
        if self.engine.version != self.version:
            self.version, self._forward = self.engine.version, None
            if not self.engine.limits.keep_kv_cache:
                active = self._take_out(np.arange(self.num_active), [UNFINISHED] * self.num_active)
                unread = active | {entry.number: entry.sample for entry in self.waiting}
                self.waiting = deque(Waiting(n, s, len(s.tokens)) for n, s in unread.items())

        num_running = self.num_active + len(self.waiting)
        self.max_active = max(self.max_active, min(self.most_active, num_running))
        num_slots = -(-self.max_active // self.fewest_rows) * self.fewest_rows
        longest = max((len(entry.sample.prompt) for entry in self.waiting), default=0)
        longest = max(longest, *self.table.prompt_lengths[: self.num_active].tolist(), 0)
        widest = slot_width(self.config, longest, self.sampling.max_tokens)
        if num_slots > self.cache.slots.num_slots or widest > len(self.cache.slots.columns):
            self.cache.grow(num_slots, widest, self.num_active)
            self._forward = None
        if num_slots > len(self.table.numbers):
            self.table = self.table.grown(num_slots)

    def _admit_cached(self) -> None:
        """Put waiting samples with stored keys and values into free slots."""
        group: list[Waiting] = []
        num_free = self.max_active - self.num_active
        while self.waiting and self.waiting[0].cached and len(group) < num_free:
            group.append(self.waiting.popleft())
        if group:
            longest = max(len(entry.text) for entry in group)
            self.cache.fit(max(longest, self.longest) + 2, self.num_active)
            self.longest = max(self.longest, longest - 1)  # a prefill may come before a decode
            restore(group, self.table, self.cache, self.num_active)
            self.num_active += len(group)

    def _next_group(self) -> list[Waiting]:
        """Return the next samples to prefill; none while slots for `MIN_ROWS` of them are missing.

        If fewer samples wait, or fewer can be active, fewer slots suffice. A row with images is
        read alone, because a vision tower computes other bits in a larger batch.
        """
        count = min(len(self.waiting), self.max_active - self.num_active)
        if not self.waiting or count < min(MIN_ROWS, len(self.waiting), self.max_active):
            return []

        group: list[Waiting] = []
        distinct: set[Row] = set()
        most_tokens = PREFILL_PROMPTS * self.engine.limits.prompt_width
        reads_responses = self.waiting[0].read_at_once > 0
        while self.waiting and len(group) < count:
            if (self.waiting[0].read_at_once > 0) != reads_responses:
                break
            row = self.waiting[0].row
            if group and row not in distinct and any(images for _, images in (*distinct, row)):
                break
            distinct.add(row)
            num_tokens = len(distinct) * max(len(text) for text, _ in distinct)
            if group and (len(distinct) > PREFILL_PROMPTS or num_tokens > most_tokens):
                break
            group.append(self.waiting.popleft())
        return group

    def _prefill(self, group: Sequence[Waiting]) -> dict[int, Sample]:
        """Read the distinct texts of the group in one pass, and sample each sample's next token.

        Samples with the same text share its row of the pass. Return the finished samples.
        """
        names = {entry.row: entry.sample.name for entry in group}
        distinct = list(names)
        row_of = {row: place for place, row in enumerate(distinct)}
        sources = torch.tensor([row_of[entry.row] for entry in group], device=self.device)

        longest = max(len(text) for text, _ in distinct)
        width = whole_blocks(longest)
        if not any(entry.read_at_once for entry in group):
            width = prefill_width(longest, self.engine.limits.prompt_width)
        rows = rows_of_pass(len(distinct), max(MIN_ROWS, -(-self.fewest_rows // width)))
        prompts = [*(text for text, _ in distinct), *[(0,)] * (rows - len(distinct))]
        self.cache.fit(max(1 + width, self.longest + 2), self.num_active)
        images = self._image_numbers(names)
        inputs = {}
        if images:
            shape = rows, width
            inputs["images"] = partial(self.engine.images.left_padded, numbers=images, shape=shape)
        logits = self.forward.prefill(prompts, width, sources, self.num_active, **inputs)
        self.longest = max(self.longest, longest - 1)  # a prefill may come before the next decode

        slots = np.arange(self.num_active, self.num_active + len(group))
        for slot, entry in zip(slots.tolist(), group, strict=True):
            self.table.put(slot, entry, entry.read_at_once)
            self.table.shifts[slot] = shift_of(images[row_of[entry.row]]) if images else 0
        if self.noted is not None:
            routed = self.noted.pop_choices().unflatten(0, (rows, width))
            for slot, entry in zip(slots.tolist(), group, strict=True):
                self.table.routed[slot] = [routed[row_of[entry.row], width - len(entry.text) :]]
        self.num_active += len(group)
        return self._append(slots, logits[sources])

    def _image_numbers(self, names: Mapping[Row, str]) -> list[Tensor]:
        """Return the numbers of the rows' tokens (`ImageInput`); nothing if no row has images."""
        if not any(refs for _, refs in names):
            return []
        images, rows = self.engine.images, names.items()
        images.reader.load((refs, name) for (_, refs), name in rows)
        return [images.of_row(torch.tensor(text), refs, name) for (text, refs), name in rows]

    def _decode(self) -> dict[int, Sample]:
        """Sample a token for each of the slots 0..num_active-1; return the finished samples.

        A pass may have more rows than that (`rows_of_pass`); results of further slots are ignored.
        """
        table = self.table
        rows = np.arange(min(rows_of_pass(self.num_active, self.fewest_rows), len(table.numbers)))
        steps = np.maximum(table.lengths[rows] - 1, 0)
        positions = table.prompt_lengths[rows] + steps
        self.longest = int(positions[: self.num_active].max())
        positions = np.minimum(positions, self.longest)
        ids = table.tokens[rows, steps]

        self.cache.fit(self.longest + 2, self.num_active)
        shifts = torch.from_numpy(table.shifts[rows])
        inputs = {"shifts": shifts.to(self.device)} if shifts.any() else {}
        logits = self.forward.decode(
            torch.from_numpy(ids).to(self.device),
            torch.from_numpy(positions).to(self.device),
            **inputs,
        )
        if self.noted is not None:
            routed = self.noted.pop_choices().split(1)
            for slot in range(self.num_active):
                table.routed[slot].append(routed[slot])
        return self._append(np.arange(self.num_active), logits[: self.num_active])

    def _append(self, slots: NDArray[np.int64], logits: Tensor) -> dict[int, Sample]:
        """Sample the next token of each of these slots; take out and return finished samples."""
        table = self.table
        steps = table.lengths[slots]
        noise = torch.from_numpy(uniforms(table.keys[slots], steps)).to(self.device)
        sampled = sample_tokens(logits, noise, self.sampling, torch.from_numpy(steps))
        tokens, log_probs = (column.cpu().numpy() for column in sampled)

        # A sample that is fed existing tokens keeps them, with their log-probs and versions.
        new = steps >= table.forced[slots]
        if not new.all():
            tokens = np.where(new, tokens, table.tokens[slots, steps])
            log_probs = np.where(new[:, None], log_probs, table.log_probs[slots, steps])
        self.all_finite &= bool(np.isfinite(log_probs[new]).all())
        table.tokens[slots, steps] = tokens
        table.log_probs[slots, steps] = log_probs
        table.versions[slots[new], steps[new]] = int(self.engine.version or 0)
        table.lengths[slots] = steps + 1
        table.num_sampled[slots] += new

        stopped = self.is_stop[tokens] & new
        samples = table.samples[slots].tolist()
        if self.sampling.stop_strings or any(sample.stop_strings for sample in samples):
            texts = [table.tokens[slot, : table.lengths[slot]].tolist() for slot in slots]
            ends_with = self.engine.ends_with_stop_string
            ends = [ends_with(s, t, self.sampling) for s, t in zip(samples, texts, strict=True)]
            stopped |= np.asarray(ends) & new
        is_finished = stopped | (steps + 1 == table.longest[slots])
        if not is_finished.any():
            return {}
        reasons = np.where(stopped, "stop", LENGTH_LIMIT)[is_finished]
        return self._take_out(slots[is_finished], reasons.tolist())

    def _take_out(self, emptied: NDArray[np.int64], reasons: Sequence[str]) -> dict[int, Sample]:
        """Empty these slots and return their samples, with these finish reasons.

        The last active samples move into the gaps.
        """
        table, ended = self.table, emptied[np.asarray(reasons) != UNFINISHED]
        cached = self.turn_cache.keep(ended, table, self.cache, self.engine.version)
        taken = {
            int(table.numbers[slot]): table.sample(slot, reason, cached.get(slot))
            for slot, reason in zip(emptied.tolist(), reasons, strict=True)
        }
        left = self.num_active - len(emptied)
        gaps = emptied[emptied < left]
        stays = np.ones(self.num_active, dtype=bool)
        stays[emptied] = False
        movers = left + stays[left:].nonzero()[0]
        if len(gaps):
            self.cache.move(*(torch.from_numpy(slots).to(self.device) for slots in (movers, gaps)))
            table.move(movers, gaps)
        self.num_active = left
        return taken


def shift_of(numbers: Tensor) -> int:
    """Return how far the images of a row shift the position of its next token (`ImageInput`)."""
    return int(numbers[:, 1:].max()) + 1 - len(numbers) if numbers.shape[1] > 1 else 0


def rows_of_pass(count: int, least: int) -> int:
    """Return the number of rows of a pass over `count` samples, rounded up; at least `least`.

    Up to `ROWS_STEP`, they are rounded up to a power of two.
    """
    if count <= ROWS_STEP:
        return max(least, 1 << (count - 1).bit_length())
    return -(-count // ROWS_STEP) * ROWS_STEP
