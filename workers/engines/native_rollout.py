"""The embedded rollout engine: a decode loop over any full-attention Hugging Face causal LM. `RolloutWorker` builds it.

    waiting prompts --prefill, in groups--> slots --decode, a token a pass--> finished ones leave, waiting ones enter

A sample's tokens and log-probs are the same bits whatever else is in the batch: at least `MIN_ROWS` rows are always
computed (fewer change the bits of a linear layer), on one CPU thread (several share the rows out by their number);
attention runs over whole blocks of columns (`slot_cache`), and the noise is keyed by the sample (`sampling`).
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_like.errors import ConfigError
from workers.engines.grouped_attention import grouped_decoding
from workers.engines.lora import merged_tensors
from workers.engines.module_engine import ModuleEngine
from workers.engines.rollout_base import (
    EngineLimits,
    Output,
    Request,
    SamplingParams,
    ends_with_stop_string,
)
from workers.engines.sampling import choose_tokens, uniforms
from workers.engines.slot_cache import SlotCache, Slots, least_window, prefill_width, slot_width, slots_that_fit
from workers.weights import Fingerprint

MIN_ROWS = 4
"""Fewest rows of a forward pass: a linear layer's bits change at 1 to 3 rows."""
PREFILL_PROMPTS = 64
"""Most distinct prompts of one prefill pass, to bound its memory."""


class NativeEngine(ModuleEngine):
    """Generates with a module it shares with the trainer (`owns_weights=False`) or has for itself."""

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
        width = slot_width(self.config, limits.prompt_width, limits.response_width)
        fit = slots_that_fit(self.config, width, next(module.parameters()).dtype, limits.kv_cache_gb, MIN_ROWS)
        self.max_active = min(limits.max_num_seqs, fit)

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """The module's parameters, LoRA merged."""
        return merged_tensors(self.module, self.module.named_parameters())

    def commit(self, version: int) -> None:
        """From here on samples are those of `version`; a generation held between two steps goes on with it."""
        if not self.owns_weights:
            self._fingerprint = Fingerprint()
            for name, tensor in self.module.named_parameters():
                self._fingerprint.note(name, tensor)
        super().commit(version)

    def _generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Output]:
        with _inference(self.module):
            return _Generation(self, requests, sampling).run()


class _Generation:
    """One call of `generate`: what every request has produced, and which request sits in which slot.

    Requests in flight fill slots 0..num_active-1; the last ones move into freed slots, so a pass runs over a prefix.
    A request that begins with tokens already made (`forced`) is fed them one by one instead of drawing, so that its
    keys and values, and with them its bits, are those of an uninterrupted run.
    """

    def __init__(self, engine: NativeEngine, requests: Sequence[Request], sampling: SamplingParams) -> None:
        self.engine, self.sampling, self.requests = engine, sampling, requests
        self.device = next(engine.module.parameters()).device
        self.keys = np.array([request.key for request in requests], dtype=np.uint64)
        self.stop = torch.tensor(sampling.stop_token_ids, dtype=torch.long)
        self.prompts = [tuple(request.prompt) for request in requests]
        self.prompt_lengths = torch.tensor([len(prompt) for prompt in self.prompts])
        shape = (len(requests), sampling.max_tokens)
        self.tokens = torch.zeros(shape, dtype=torch.long)
        self.log_probs = torch.zeros(shape)
        self.versions = torch.zeros(shape, dtype=torch.int32)
        self.lengths = torch.zeros(len(requests), dtype=torch.long)
        self.forced = torch.zeros(len(requests), dtype=torch.long)
        self.stopped = torch.zeros(len(requests), dtype=torch.bool)
        self._take_partial()
        self.waiting = deque(range(len(requests)))
        self.max_active = min(engine.max_active, len(requests))
        self.num_active = self.longest = 0
        num_slots = max(MIN_ROWS, self.max_active)
        self.request_of_slot = torch.zeros(num_slots, dtype=torch.long)
        longest = max(map(len, self.prompts))
        width = slot_width(engine.config, longest, sampling.max_tokens)
        self.slots = Slots(num_slots, width, least_window(engine.config), self.device)
        self.cache = SlotCache(engine.config.num_hidden_layers, self.slots)
        parameters = inspect.signature(engine.module.forward).parameters
        self.takes_positions = "position_ids" in parameters
        self.takes_logits_to_keep = "logits_to_keep" in parameters

    def run(self) -> list[Output]:
        """Prefill when a group of prompts can enter, else decode one token of everything in flight."""
        version = self.engine.version
        finish = "length"
        while self.num_active or self.waiting:
            if self.engine.control.checkpoint():
                finish = "abort"
                break
            if self.engine.version != version:
                version = self.engine.version
                self._start_over()
            group = self._entering()
            if group:
                self._prefill(group)
            else:
                self._decode()
        return [self._output(request, finish) for request in range(len(self.prompts))]

    def _output(self, request: int, finish: str) -> Output:
        length = max(int(self.lengths[request]), int(self.forced[request]))
        reason = "stop" if self.stopped[request] else "length" if length == self.sampling.max_tokens else finish
        made = slice(0, length)
        return Output(
            self.tokens[request, made].clone(),
            self.log_probs[request, made].clone(),
            reason,
            self.versions[request, made].clone(),
        )

    def _take_partial(self) -> None:
        for index, request in enumerate(self.requests):
            if request.partial is not None:
                self.forced[index] = length = len(request.partial.tokens)
                self.tokens[index, :length] = request.partial.tokens
                self.log_probs[index, :length] = request.partial.log_probs
                self.versions[index, :length] = request.partial.versions

    def _start_over(self) -> None:
        """The weights are new: what is in flight is read again with them, and goes on where it was."""
        active = self.request_of_slot[: self.num_active]
        self.forced[active] = torch.maximum(self.forced[active], self.lengths[active])
        self.lengths[active] = 0
        self.waiting.extendleft(reversed(active.tolist()))
        self.num_active = 0

    def _entering(self) -> list[int]:
        """The next requests to prefill: none while fewer than `MIN_ROWS` of those waiting would fit."""
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
        index = {prompt: i for i, prompt in enumerate(dict.fromkeys(self.prompts[r] for r in group))}
        sources = torch.tensor([index[self.prompts[r]] for r in group], device=self.device)
        rows = [*index, *[(0,)] * (MIN_ROWS - len(index))]
        lengths = torch.tensor([len(row) for row in rows], device=self.device)
        width = prefill_width(int(lengths.max()), self.engine.limits.prompt_width)
        self.cache.fit(max(1 + width, self.longest + 2))
        ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=self.device)
        positions = (self.slots.columns[:width] - (width - lengths)[:, None]).clamp(min=0)
        attention_mask = self.slots.aim_prefill(lengths, width, sources, self.num_active)
        logits = self._forward(ids, positions, attention_mask)
        slots = torch.arange(self.num_active, self.num_active + len(group))
        self.request_of_slot[slots] = torch.tensor(group)
        self.num_active += len(group)
        self._append(slots, logits[sources])

    def _decode(self) -> None:
        """One more token for slots 0..num_active-1; those beyond, up to `MIN_ROWS`, compute what nobody reads."""
        requests = self.request_of_slot[: max(MIN_ROWS, self.num_active)]
        steps = (self.lengths[requests] - 1).clamp(min=0)
        positions = self.prompt_lengths[requests] + steps
        ids = self.tokens[requests, steps]
        self.longest = int(positions[: self.num_active].max())
        positions = positions.clamp(max=self.longest).to(self.device)
        self.cache.fit(self.longest + 2)
        attention_mask = self.slots.aim_decode(positions)
        logits = self._forward(ids.to(self.device)[:, None], positions[:, None], attention_mask)
        self._append(torch.arange(self.num_active), logits[: self.num_active])

    def _forward(self, ids: Tensor, positions: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits of the last column: [rows, vocabulary]."""
        inputs: dict[str, Any] = {"attention_mask": attention_mask, "past_key_values": self.cache, "use_cache": True}
        if self.takes_positions:
            inputs["position_ids"] = positions
        if self.takes_logits_to_keep:
            inputs["logits_to_keep"] = 1
        logits: Tensor = self.engine.module(input_ids=ids, **inputs).logits[:, -1]
        return logits

    def _append(self, slots: Tensor, logits: Tensor) -> None:
        """Draw the next token of each of these slots, and empty those that are finished."""
        requests = self.request_of_slot[slots]
        steps = self.lengths[requests]
        noise = torch.from_numpy(uniforms(self.keys[requests.numpy()], steps.numpy()))
        tokens, log_probs = (x.cpu() for x in choose_tokens(logits, noise.to(self.device), self.sampling, steps))
        new = steps >= self.forced[requests]
        if not bool(new.all()):
            tokens = torch.where(new, tokens, self.tokens[requests, steps])
            log_probs = torch.where(new, log_probs, self.log_probs[requests, steps])
        self.tokens[requests, steps] = tokens
        self.log_probs[requests, steps] = log_probs
        self.versions[requests[new], steps[new]] = int(self.engine.version or 0)
        self.lengths[requests] += 1
        self.stopped[requests] = stopped = torch.isin(tokens, self.stop) | self._said(requests, steps)
        finished = stopped | (self.lengths[requests] == self.sampling.max_tokens)
        if bool(finished.any()):
            self._leave(slots[finished])

    def _said(self, requests: Tensor, steps: Tensor) -> Tensor:
        """Which of these requests have just completed a stop string."""
        said = torch.zeros(len(requests), dtype=torch.bool)
        strings, decode = self.sampling.stop_strings, self.engine.decode
        if strings and decode is not None:
            for row, (request, step) in enumerate(zip(requests.tolist(), steps.tolist(), strict=True)):
                if step + 1 >= self.sampling.min_tokens:
                    said[row] = ends_with_stop_string(self.tokens[request, : step + 1].tolist(), strings, decode)
        return said

    def _leave(self, finished: Tensor) -> None:
        """Empty these slots; those in use beyond the new number of active ones move into the gaps."""
        left = self.num_active - len(finished)
        gaps = finished[finished < left]
        beyond = torch.arange(left, self.num_active)
        movers = beyond[~torch.isin(beyond, finished)]
        if len(gaps):
            self.cache.move(movers.to(self.device), gaps.to(self.device))
            self.request_of_slot[gaps] = self.request_of_slot[movers]
        self.num_active = left


def _check_model(config: Any, width: int) -> None:
    """Refuse models whose cache is not one key and value per token, and windows that the model does not have."""
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and width > limit:
        raise ConfigError(
            f"data.max_prompt_length + data.max_response_length = {width} tokens, but the model has {limit} positions; "
            "lower one of them."
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if kinds - {"full_attention", "sliding_attention"} or (window is not None and window < width):
        raise ConfigError(
            f"rollout.name=native decodes full attention only; model type {config.model_type!r} has layers "
            f"{', '.join(sorted(kinds))} and a sliding window of {window} (this run is {width} tokens wide)."
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
