"""The embedded rollout engine: a decode loop over any full-attention Hugging Face causal LM.

Which classes those are `native.proof` finds out when the engine is built.

    waiting prompts --prefill, in groups--> slots of the KV cache
    slots           --decode, one token a pass--> finished samples leave, waiting prompts enter

In float32 a sample's tokens and log-probs are the same bits whatever else is in the batch: at least
`linear.least_rows` rows are always computed (fewer change the bits of a linear layer), on one CPU
thread (several share the rows out by their number); attention runs over whole blocks of columns
(`native.kv_cache`), and the noise is keyed by the sample (`rollout.sampling`).
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from workers.models.lora import merged_tensors
from workers.models.state import named_state
from workers.rollout.base import EngineLimits, Output, Request, SamplingParams
from workers.rollout.module_engine import ModuleEngine
from workers.rollout.native.direct_forward import DirectForward, agrees, is_llama_shaped
from workers.rollout.native.grouped_attention import grouped_decoding
from workers.rollout.native.kv_cache import (
    CacheMemory,
    SlotCache,
    Slots,
    least_window,
    prefill_width,
    slot_width,
    slots_that_fit,
    whole_blocks,
)
from workers.rollout.native.linear import MIN_ROWS, goes_by_onednn, least_rows
from workers.rollout.native.module_forward import ModuleForward
from workers.rollout.native.proof import check_decoding, check_model
from workers.rollout.responses import ends_with_stop_string, num_of_older_weights, output_of
from workers.rollout.sampling import choose_tokens, uniforms
from workers.weights.checksum import Fingerprint

ROWS_STEP = 16
"""Passes over more rows than this compute whole multiples of it.

oneDNN builds kernels for every number of rows, so there should be few different ones.
"""
PREFILL_PROMPTS = 64
"""Most distinct prompts of one prefill pass, to bound its memory."""


class NativeEngine(ModuleEngine):
    """Generates with a module of its own, or with the trainer's (`owns_weights=False`)."""

    def __init__(
        self,
        module: Any,
        limits: EngineLimits,
        *,
        owns_weights: bool,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        super().__init__(module, limits, decode)
        self.config = module.config.get_text_config()
        width = limits.prompt_width + limits.response_width
        check_model(self.config, width)
        check_decoding(self.config, width)
        self.owns_weights = owns_weights
        self.direct_agrees: bool | None = None
        """Whether the direct pass computes what the module does; None while that is not known."""

        first_weight = next(module.parameters())
        if first_weight.device.type == "cpu":
            _limit_kernel_caches()
        width = slot_width(self.config, limits.prompt_width, limits.response_width)
        least = least_rows(first_weight, is_llama_shaped(module) and goes_by_onednn(module))
        num_slots = slots_that_fit(
            self.config, width, first_weight.dtype, limits.kv_cache_gb, least
        )
        self.max_active = min(limits.max_num_seqs, num_slots)
        self.cache_memory = CacheMemory()

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """The module's parameters and persistent buffers, LoRA merged."""
        return merged_tensors(self.module, named_state(self.module))

    def commit(self, version: int) -> None:
        """From here on samples are those of `version`.

        A generation that is paused between two steps goes on with it.
        """
        if not self.owns_weights:
            self._fingerprint = Fingerprint()
            for name, tensor in named_state(self.module):
                self._fingerprint.note(name, tensor)
        super().commit(version)

    def sleep(self) -> None:
        """Give memory back, that of the cache too."""
        super().sleep()
        self.cache_memory = CacheMemory()

    def _generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Output]:
        memory, self.cache_memory = self.cache_memory, CacheMemory()
        with _inference(self.module):
            is_direct = self._can_be_direct()
            forward_class = DirectForward if is_direct else ModuleForward
            generation = _Generation(self, requests, sampling, forward_class, memory)
            with torch.inference_mode() if is_direct else nullcontext():
                generation.run()

        # Memory that holds numbers which are not finite is not used again: see `CacheMemory`.
        if np.isfinite(generation.log_probs).all():
            memory.end()
            self.cache_memory = memory
        return [generation.output(request) for request in range(len(requests))]

    def _can_be_direct(self) -> bool:
        """Whether the direct pass may run in place of the module's; they are compared once."""
        if not is_llama_shaped(self.module):
            return False
        if self.direct_agrees is None:
            self.direct_agrees = agrees(self.module)
            if not self.direct_agrees:
                warnings.warn(
                    "rollout.name=native: the direct pass differs from "
                    f"{type(self.module).__name__} as transformers {transformers.__version__} "
                    "computes it; decoding through the module instead, which is slower.",
                    stacklevel=2,
                )
        return self.direct_agrees


class _Generation:
    """One call of `generate`: what every request has produced, and which one fills which slot.

    Requests in flight fill slots 0..num_active-1; the last ones move into freed slots, so a pass
    runs over a prefix. A request that begins with tokens already made (`forced`) reads those of
    older weights in one pass with its prompt, and is fed the others one by one instead of drawing.
    So its keys and values, and with them its bits, are those of an uninterrupted run.
    """

    def __init__(
        self,
        engine: NativeEngine,
        requests: Sequence[Request],
        sampling: SamplingParams,
        forward_class: type[DirectForward] | type[ModuleForward],
        memory: CacheMemory,
    ) -> None:
        self.engine, self.sampling, self.requests = engine, sampling, requests
        self.forward_class = forward_class
        first_weight = next(engine.module.parameters())
        self.device = first_weight.device
        by_onednn = forward_class is DirectForward and goes_by_onednn(engine.module)
        self.least_rows = least_rows(first_weight, by_onednn)
        self.keys = np.array([request.key for request in requests], dtype=np.uint64)
        self.prompts = [tuple(request.prompt) for request in requests]
        self.prompt_lengths = np.array([len(prompt) for prompt in self.prompts])

        shape = (len(requests), sampling.max_tokens)
        self.tokens = np.zeros(shape, dtype=np.int64)
        self.log_probs = np.zeros((*shape, sampling.num_log_probs), dtype=np.float32)
        self.versions = np.zeros(shape, dtype=np.int32)
        self.lengths = np.zeros(len(requests), dtype=np.int64)
        self.forced = np.zeros(len(requests), dtype=np.int64)
        most = [sampling.longest(request.num_made) for request in requests]
        self.most_tokens = np.array(most, dtype=np.int64)
        self.read_at_once = np.zeros(len(requests), dtype=np.int64)
        self.stopped = np.zeros(len(requests), dtype=bool)
        stops = [token for token in sampling.stop_token_ids if 0 <= token < engine.vocab_size]
        self.is_stop = np.zeros(engine.vocab_size, dtype=bool)
        self.is_stop[stops] = True
        self._take_partial()

        self.waiting = deque(np.argsort(self.read_at_once == 0, kind="stable").tolist())
        self.max_active = min(engine.max_active, len(requests))
        self.num_active = self.longest = 0
        num_slots = max(self.least_rows, self.max_active)
        self.request_of_slot = np.zeros(num_slots, dtype=np.int64)
        width = slot_width(engine.config, max(map(len, self.prompts)), sampling.max_tokens)
        slots = Slots(num_slots, width, least_window(engine.config), self.device, memory)
        self.cache = SlotCache(engine.config.num_hidden_layers, slots)

    def run(self) -> None:
        """Prefill when a group of prompts can enter, else decode one token of everything in flight.

        Ends when all are finished, have drawn as many tokens as this call may, or are aborted.
        """
        version = self.engine.version
        self.forward = self.forward_class(self.engine.module, self.cache)
        while self.num_active or self.waiting:
            if self.engine.asked_to_stop():
                return
            if self.engine.version != version:
                version = self.engine.version
                self._take_weights()
            group = self._next_group()
            if group:
                self._prefill(group)
            else:
                self._decode()

    def output(self, request: int) -> Output:
        """What a request has produced."""
        length = max(int(self.lengths[request]), int(self.forced[request]))
        finish = "length" if length == self.sampling.max_tokens else "abort"
        if self.stopped[request]:
            finish = "stop"

        tokens, log_probs, versions = (
            torch.from_numpy(column[request, :length])
            for column in (self.tokens, self.log_probs, self.versions)
        )
        return output_of(tokens, log_probs, versions, finish)

    def _take_partial(self) -> None:
        for index, request in enumerate(self.requests):
            if request.partial is not None:
                self.forced[index] = length = len(request.partial.tokens)
                self.tokens[index, :length] = request.partial.tokens
                self.log_probs[index, :length] = request.partial.log_probs_for(self.sampling)
                self.versions[index, :length] = request.partial.versions
                versions = request.partial.versions.tolist()
                self.read_at_once[index] = num_of_older_weights(versions, self.engine.version)

    def _take_weights(self) -> None:
        """The weights are new: what is in flight goes on with them.

        It is read again first, unless its keys and values are to be kept as the old ones made them.
        """
        self.forward = self.forward_class(self.engine.module, self.cache)
        if self.engine.limits.keep_kv:
            return
        active = self.request_of_slot[: self.num_active]
        self.forced[active] = np.maximum(self.forced[active], self.lengths[active])
        self.waiting.extendleft(reversed(active.tolist()))
        unread = list(self.waiting)
        self.read_at_once[unread] = self.forced[unread]
        self.num_active = 0

    def _text(self, request: int) -> tuple[int, ...]:
        """What is read of a request in one pass."""
        made = self.tokens[request, : self.read_at_once[request]]
        return (*self.prompts[request], *made.tolist())

    def _next_group(self) -> list[int]:
        """The next requests to prefill; none while fewer than `MIN_ROWS` of them would fit."""
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
        texts = [self._text(request) for request in group]
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
        requests = self.request_of_slot[: rows_of_pass(self.num_active, self.least_rows)]
        steps = np.maximum(self.lengths[requests] - 1, 0)
        positions = self.prompt_lengths[requests] + steps
        self.longest = int(positions[: self.num_active].max())
        positions = np.minimum(positions, self.longest)
        ids = self.tokens[requests, steps]

        self.cache.fit(self.longest + 2, self.num_active)
        logits = self.forward.decode(
            torch.from_numpy(ids).to(self.device), torch.from_numpy(positions).to(self.device)
        )
        self._append(np.arange(self.num_active), logits[: self.num_active])

    def _append(self, slots: NDArray[np.int64], logits: Tensor) -> None:
        """Draw the next token of each of these slots, and empty those that are finished."""
        requests = self.request_of_slot[slots]
        steps = self.lengths[requests]
        noise = torch.from_numpy(uniforms(self.keys[requests], steps)).to(self.device)
        drawn = choose_tokens(logits, noise, self.sampling, torch.from_numpy(steps))
        tokens, log_probs = (column.cpu().numpy() for column in drawn)

        # A request that is fed tokens made before keeps them, with their log-probs and versions.
        new = steps >= self.forced[requests]
        if not new.all():
            tokens = np.where(new, tokens, self.tokens[requests, steps])
            log_probs = np.where(new[:, None], log_probs, self.log_probs[requests, steps])
        self.tokens[requests, steps] = tokens
        self.log_probs[requests, steps] = log_probs
        self.versions[requests[new], steps[new]] = int(self.engine.version or 0)
        self.lengths[requests] = steps + 1

        stopped = self.is_stop[tokens]
        if self.sampling.stop_strings:
            stopped |= self._ends_with_stop_string(requests, steps)
        self.stopped[requests] = stopped
        finished = stopped | (steps + 1 == self.most_tokens[requests])
        if finished.any():
            self._free_slots(slots[finished])

    def _ends_with_stop_string(
        self, requests: NDArray[np.int64], steps: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Which of these requests have just completed a stop string."""
        found = np.zeros(len(requests), dtype=bool)
        strings, decode = self.sampling.stop_strings, self.engine.decode
        if decode is None:
            return found

        pairs = zip(requests.tolist(), steps.tolist(), strict=True)
        for row, (request, step) in enumerate(pairs):
            if step + 1 >= self.sampling.min_tokens:
                tokens = self.tokens[request, : step + 1].tolist()
                found[row] = ends_with_stop_string(tokens, strings, decode)
        return found

    def _free_slots(self, finished: NDArray[np.int64]) -> None:
        """Empty these slots, and move active ones from the end into the gaps."""
        left = self.num_active - len(finished)
        gaps = finished[finished < left]
        stays = np.ones(self.num_active, dtype=bool)
        stays[finished] = False
        movers = left + stays[left:].nonzero()[0]
        if len(gaps):
            self.cache.move(*(torch.from_numpy(slots).to(self.device) for slots in (movers, gaps)))
            self.request_of_slot[gaps] = self.request_of_slot[movers]
        self.num_active = left


def rows_of_pass(count: int, least: int) -> int:
    """How many rows a pass over `count` of them computes: at least `least`, see `ROWS_STEP`."""
    if count <= ROWS_STEP:
        return max(least, 1 << (count - 1).bit_length())
    return -(-count // ROWS_STEP) * ROWS_STEP


def _limit_kernel_caches() -> None:
    from workers.cpu import onednn

    onednn.limit_kernel_caches()


@contextmanager
def _inference(module: Any) -> Iterator[None]:
    """Evaluation mode, no gradients, one CPU thread, fast decoding; all is given back as it was."""
    was_training, num_threads = module.training, torch.get_num_threads()
    module.eval()
    torch.set_num_threads(1)
    try:
        with torch.no_grad(), grouped_decoding(module):
            yield
    finally:
        module.train(was_training)
        torch.set_num_threads(num_threads)
