"""The embedded rollout engine: a decode loop over any full-attention Hugging Face causal LM.

`RolloutWorker` builds it.

    waiting prompts --prefill, in groups--> slots --decode, a token a pass--> finished ones leave, waiting ones enter

A sample's tokens and log-probs are the same bits whatever else is in the batch: at least `MIN_ROWS`
rows are always computed (fewer change the bits of a linear layer), on one CPU thread (several share
the rows out by their number); attention runs over whole blocks of columns (`slot_cache`), and the
noise is keyed by the sample (`sampling`).
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

from verl_like.errors import ConfigError
from workers.models.lora import merged_tensors
from workers.rollout.base import (
    EngineLimits,
    Output,
    Request,
    SamplingParams,
    ends_with_stop_string,
    output_of,
)
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
)
from workers.rollout.native.module_forward import ModuleForward
from workers.rollout.sampling import choose_tokens, uniforms
from workers.weights.checksum import Fingerprint

MIN_ROWS = 4
"""Fewest rows of a forward pass: a linear layer's bits change at 1 to 3 rows."""
FEW_ROWS = 16
"""Rows of a pass are whole multiples of this from here on: oneDNN builds kernels for every number
of them.
"""
PREFILL_PROMPTS = 64
"""Most distinct prompts of one prefill pass, to bound its memory."""


class NativeEngine(ModuleEngine):
    """Generates with a module it shares with the trainer
    (`owns_weights=False`) or has for itself.
    """

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
        _check_model(self.config, limits.prompt_width + limits.response_width)
        self.owns_weights = owns_weights
        self.is_proven: bool | None = None
        self.cache_memory = CacheMemory()
        width = slot_width(self.config, limits.prompt_width, limits.response_width)
        fit = slots_that_fit(
            self.config, width, next(module.parameters()).dtype, limits.kv_cache_gb, MIN_ROWS
        )
        self.max_active = min(limits.max_num_seqs, fit)

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """The module's parameters, LoRA merged."""
        return merged_tensors(self.module, self.module.named_parameters())

    def commit(self, version: int) -> None:
        """From here on samples are those of `version`; a generation held between two steps goes on
        with it.
        """
        if not self.owns_weights:
            self._fingerprint = Fingerprint()
            for name, tensor in self.module.named_parameters():
                self._fingerprint.note(name, tensor)
        super().commit(version)

    def sleep(self) -> None:
        """Give memory back, that of the cache too."""
        super().sleep()
        self.cache_memory = CacheMemory()

    def _generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Output]:
        memory, self.cache_memory = self.cache_memory, CacheMemory()
        with _inference(self.module):
            direct = self._may_be_direct()
            generation = _Generation(
                self, requests, sampling, DirectForward if direct else ModuleForward, memory
            )
            with torch.inference_mode() if direct else nullcontext():
                finish = generation.run()
        if np.isfinite(generation.log_probs).all():
            memory.end()
            self.cache_memory = memory
        return [generation.output(request, finish) for request in range(len(requests))]

    def _may_be_direct(self) -> bool:
        """Whether the direct pass may stand for the module as it is now: not where it was seen to
        differ.
        """
        if not is_llama_shaped(self.module):
            return False
        if self.is_proven is None:
            self.is_proven = agrees(self.module)
            if not self.is_proven:
                warnings.warn(
                    "rollout.name=native: the direct pass differs from "
                    f"{type(self.module).__name__} as transformers {transformers.__version__} "
                    "computes it; decoding through the module instead, which is slower.",
                    stacklevel=2,
                )
        return self.is_proven


class _Generation:
    """One call of `generate`: what every request has produced, and which request sits in which
    slot.

    Requests in flight fill slots 0..num_active-1; the last ones move into freed slots, so a pass
    runs over a prefix. A request that begins with tokens already made (`forced`) is fed them one by
    one instead of drawing, so that its keys and values, and with them its bits, are those of an
    uninterrupted run.
    """

    def __init__(
        self,
        engine: NativeEngine,
        requests: Sequence[Request],
        sampling: SamplingParams,
        forward_class: type[DirectForward] | type[ModuleForward],
        memory: CacheMemory,
    ) -> None:
        self.engine, self.sampling, self.requests, self.forward_class = (
            engine,
            sampling,
            requests,
            forward_class,
        )
        self.device = next(engine.module.parameters()).device
        self.keys = np.array([request.key for request in requests], dtype=np.uint64)
        self.prompts = [tuple(request.prompt) for request in requests]
        self.prompt_lengths = np.array([len(prompt) for prompt in self.prompts])
        shape = (len(requests), sampling.max_tokens)
        self.tokens = np.zeros(shape, dtype=np.int64)
        self.log_probs = np.zeros((*shape, sampling.num_log_probs), dtype=np.float32)
        self.versions = np.zeros(shape, dtype=np.int32)
        self.lengths = np.zeros(len(requests), dtype=np.int64)
        self.forced = np.zeros(len(requests), dtype=np.int64)
        self.stopped = np.zeros(len(requests), dtype=bool)
        self.is_stop = np.zeros(engine.vocab_size, dtype=bool)
        self.is_stop[
            [token for token in sampling.stop_token_ids if 0 <= token < engine.vocab_size]
        ] = True
        self._take_partial()
        self.waiting = deque(range(len(requests)))
        self.max_active = min(engine.max_active, len(requests))
        self.num_active = self.longest = 0
        num_slots = max(MIN_ROWS, self.max_active)
        self.request_of_slot = np.zeros(num_slots, dtype=np.int64)
        width = slot_width(engine.config, max(map(len, self.prompts)), sampling.max_tokens)
        slots = Slots(num_slots, width, least_window(engine.config), self.device, memory)
        self.cache = SlotCache(engine.config.num_hidden_layers, slots)

    def run(self) -> str:
        """Prefill when a group of prompts can enter, else decode one token of everything in flight.

        Returns the finish reason of those that have no other.
        """
        version = self.engine.version
        self.forward = self.forward_class(self.engine.module, self.cache)
        while self.num_active or self.waiting:
            if self.engine.control.checkpoint():
                return "abort"
            if self.engine.version != version:
                version = self.engine.version
                self._start_over()
            group = self._entering()
            if group:
                self._prefill(group)
            else:
                self._decode()
        return "length"

    def output(self, request: int, finish: str) -> Output:
        """What a request has produced."""
        length = max(int(self.lengths[request]), int(self.forced[request]))
        reason = (
            "stop"
            if self.stopped[request]
            else "length"
            if length == self.sampling.max_tokens
            else finish
        )
        tokens, log_probs, versions = (
            torch.from_numpy(column[request, :length])
            for column in (self.tokens, self.log_probs, self.versions)
        )
        return output_of(tokens, log_probs, versions, reason)

    def _take_partial(self) -> None:
        for index, request in enumerate(self.requests):
            if request.partial is not None:
                self.forced[index] = length = len(request.partial.tokens)
                self.tokens[index, :length] = request.partial.tokens
                self.log_probs[index, :length] = request.partial.log_probs_for(self.sampling)
                self.versions[index, :length] = request.partial.versions

    def _start_over(self) -> None:
        """The weights are new: what is in flight is read again with
        them, and goes on where it was.
        """
        active = self.request_of_slot[: self.num_active]
        self.forced[active] = np.maximum(self.forced[active], self.lengths[active])
        self.lengths[active] = 0
        self.waiting.extendleft(reversed(active.tolist()))
        self.num_active = 0
        self.forward = self.forward_class(self.engine.module, self.cache)

    def _entering(self) -> list[int]:
        """The next requests to prefill: none while fewer than `MIN_ROWS` of those waiting would
        fit.
        """
        count = min(len(self.waiting), self.max_active - self.num_active)
        if count < min(MIN_ROWS, len(self.waiting), self.max_active):
            return []
        group: list[int] = []
        distinct: set[tuple[int, ...]] = set()
        while self.waiting and len(group) < count:
            distinct.add(self.prompts[self.waiting[0]])
            if len(distinct) > PREFILL_PROMPTS:
                break
            group.append(self.waiting.popleft())
        return group

    def _prefill(self, group: list[int]) -> None:
        """One pass over the distinct prompts of the group; samples of one prompt share it."""
        index = {
            prompt: i for i, prompt in enumerate(dict.fromkeys(self.prompts[r] for r in group))
        }
        sources = torch.tensor([index[self.prompts[r]] for r in group], device=self.device)
        prompts = [*index, *[(0,)] * (rows_of_pass(len(index)) - len(index))]
        width = prefill_width(max(map(len, prompts)), self.engine.limits.prompt_width)
        self.cache.fit(max(1 + width, self.longest + 2), self.num_active)
        logits = self.forward.prefill(prompts, width, sources, self.num_active)
        slots = np.arange(self.num_active, self.num_active + len(group))
        self.request_of_slot[slots] = group
        self.num_active += len(group)
        self._append(slots, logits[sources])

    def _decode(self) -> None:
        """One more token for slots 0..num_active-1; those beyond, up to a round number, compute
        what nobody reads.
        """
        requests = self.request_of_slot[: rows_of_pass(self.num_active)]
        steps = np.maximum(self.lengths[requests] - 1, 0)
        positions = self.prompt_lengths[requests] + steps
        self.longest = int(positions[: self.num_active].max())
        positions = np.minimum(positions, self.longest)
        self.cache.fit(self.longest + 2, self.num_active)
        ids = self.tokens[requests, steps]
        logits = self.forward.decode(
            *(torch.from_numpy(numbers).to(self.device) for numbers in (ids, positions))
        )
        self._append(np.arange(self.num_active), logits[: self.num_active])

    def _append(self, slots: NDArray[np.int64], logits: Tensor) -> None:
        """Draw the next token of each of these slots, and empty those that are finished."""
        requests = self.request_of_slot[slots]
        steps = self.lengths[requests]
        noise = torch.from_numpy(uniforms(self.keys[requests], steps)).to(self.device)
        drawn = choose_tokens(logits, noise, self.sampling, torch.from_numpy(steps))
        tokens, log_probs = (column.cpu().numpy() for column in drawn)
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
            stopped |= self._said(requests, steps)
        self.stopped[requests] = stopped
        finished = stopped | (steps + 1 == self.sampling.max_tokens)
        if finished.any():
            self._leave(slots[finished])

    def _said(self, requests: NDArray[np.int64], steps: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these requests have just completed a stop string."""
        said = np.zeros(len(requests), dtype=bool)
        strings, decode = self.sampling.stop_strings, self.engine.decode
        if decode is not None:
            for row, (request, step) in enumerate(
                zip(requests.tolist(), steps.tolist(), strict=True)
            ):
                if step + 1 >= self.sampling.min_tokens:
                    said[row] = ends_with_stop_string(
                        self.tokens[request, : step + 1].tolist(), strings, decode
                    )
        return said

    def _leave(self, finished: NDArray[np.int64]) -> None:
        """Empty these slots; those in use beyond the new number of
        active ones move into the gaps.
        """
        left = self.num_active - len(finished)
        gaps = finished[finished < left]
        stays = np.ones(self.num_active, dtype=bool)
        stays[finished] = False
        movers = left + stays[left:].nonzero()[0]
        if len(gaps):
            self.cache.move(*(torch.from_numpy(slots).to(self.device) for slots in (movers, gaps)))
            self.request_of_slot[gaps] = self.request_of_slot[movers]
        self.num_active = left


def rows_of_pass(count: int) -> int:
    """The round number of rows, at least `MIN_ROWS`, that a pass over `count` of them computes: few
    different ones.
    """
    if count <= FEW_ROWS:
        return max(MIN_ROWS, 1 << (count - 1).bit_length())
    return -(-count // FEW_ROWS) * FEW_ROWS


def _check_model(config: Any, width: int) -> None:
    """Refuse models whose cache is not one key and value per token, and windows that the model does
    not have.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and width > limit:
        raise ConfigError(
            f"data.max_prompt_length + data.max_response_length = {width} tokens, but the model "
            f"has {limit} positions; lower one of them."
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = (
        getattr(config, "sliding_window", None)
        if getattr(config, "use_sliding_window", True)
        else None
    )
    if kinds - {"full_attention", "sliding_attention"} or (window is not None and window < width):
        raise ConfigError(
            f"rollout.name=native decodes full attention only; model type {config.model_type!r} "
            f"has layers {', '.join(sorted(kinds))} and a sliding window of {window} (this run is "
            f"{width} tokens wide)."
        )


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
