"""The embedded rollout engine: a decode loop over any full-attention Hugging Face causal LM. `RolloutWorker` builds it.

    waiting prompts --prefill, in groups--> slots --decode, a token a pass--> finished ones leave, waiting ones enter

A sample's tokens and log-probs are the same bits whatever else is in the batch: at least `MIN_ROWS` rows are always
computed (fewer change the bits of a linear layer), on one CPU thread (several share the rows out by their number);
attention runs over one width set by config (`slot_cache`), and the noise is keyed by the sample (`sampling`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_like.errors import ConfigError, RolloutError
from workers.engines.grouped_attention import grouped_decoding
from workers.engines.rollout_base import Output, Request, RolloutEngine, SamplingParams
from workers.engines.sampling import choose_tokens, uniforms
from workers.engines.slot_cache import SlotCache, Slots
from workers.weights import WeightSink

MIN_ROWS = 4
"""Fewest rows of a forward pass: a linear layer's bits change at 1 to 3 rows."""
PREFILL_ROWS = 64
"""Most prompts of one prefill pass, to bound its memory."""


class NativeEngine(RolloutEngine):
    """Generates with a module it shares with the trainer (`owns_weights=False`) or has for itself."""

    def __init__(
        self, module: Any, *, prompt_width: int, response_width: int, max_num_seqs: int, owns_weights: bool
    ) -> None:
        self.config = module.config.get_text_config()
        _check_model(self.config, prompt_width + response_width)
        self.module = module
        self.prompt_width = prompt_width
        self.response_width = response_width
        self.max_num_seqs = max_num_seqs
        self.owns_weights = owns_weights
        self.asleep = False

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Output]:
        """One output per request; memory for keys and values is held during the call only."""
        if self.version is None or self.asleep:
            state = "is asleep" if self.asleep else "has no verified weights (it is new, was asleep, or a sync failed)"
            raise RolloutError(
                f"rollout: this engine {state}; sync_weights(actor_group, rollout_group, version) makes it ready."
            )
        self._check_requests(requests, sampling)
        with _inference(self.module):
            return _Generation(self, requests, sampling).run() if requests else []

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy every tensor into the module's own weights."""
        self.version = None
        self.wake_up()
        sink = WeightSink(self.module)
        for name, tensor in tensors:
            sink.write_tensor(name, tensor)
        sink.verify("engine")

    @property
    def num_bytes(self) -> int:
        """Size of the weights."""
        return sum(weight.numel() * weight.element_size() for weight in self.module.parameters())

    def commit(self, version: int) -> None:
        """From here on samples are those of `version`."""
        self.version = version

    def sleep(self) -> None:
        """Free the weights if they are the engine's own."""
        if self.owns_weights and not self.asleep:
            self.version = None
            self._shapes = [parameter.shape for parameter in self.module.parameters()]
            for parameter in self.module.parameters():
                parameter.data = parameter.data.new_empty(0)
        self.asleep = True

    def wake_up(self) -> None:
        """Allocate the weights again; they are to be loaded before the next `generate`."""
        if self.owns_weights and self.asleep:
            for parameter, shape in zip(self.module.parameters(), self._shapes, strict=True):
                parameter.data = parameter.data.new_empty(shape)
        self.asleep = False

    def _check_requests(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        if sampling.max_tokens > self.response_width:
            raise RolloutError(
                f"rollout: max_tokens={sampling.max_tokens} does not fit the {self.response_width} response columns; "
                "raise data.max_response_length."
            )
        for request in requests:
            length = len(request.prompt)
            if not 1 <= length <= self.prompt_width:
                way_out = "raise data.max_prompt_length or truncate it" if length else "drop it from the data"
                raise RolloutError(
                    f"rollout: the prompt of {request.name} has {length} tokens; "
                    f"1 to {self.prompt_width} fit: {way_out}."
                )
            low, high = min(request.prompt), max(request.prompt)
            if low < 0 or high >= self.config.vocab_size:
                raise RolloutError(
                    f"rollout: the prompt of {request.name} has token id {low if low < 0 else high}, outside the "
                    f"vocabulary of {self.config.vocab_size}; tokenizer and actor_rollout_ref.model.path do not fit."
                )


class _Generation:
    """One call of `generate`: what every request has produced, and which request sits in which slot.

    Requests in flight fill slots 0..num_active-1; the last one moves into a freed slot, so a pass runs over a prefix.
    """

    def __init__(self, engine: NativeEngine, requests: Sequence[Request], sampling: SamplingParams) -> None:
        self.engine, self.sampling = engine, sampling
        self.device = next(engine.module.parameters()).device
        self.keys = np.array([request.key for request in requests], dtype=np.uint64)
        self.stop = torch.tensor(sampling.stop_token_ids, dtype=torch.long)
        self.prompts = [tuple(request.prompt) for request in requests]
        self.prompt_lengths = torch.tensor([len(prompt) for prompt in self.prompts])
        self.names = [request.name for request in requests]
        self.tokens = torch.zeros((len(requests), sampling.max_tokens), dtype=torch.long)
        self.log_probs = torch.zeros((len(requests), sampling.max_tokens))
        self.lengths = torch.zeros(len(requests), dtype=torch.long)
        self.stopped = torch.zeros(len(requests), dtype=torch.bool)
        self.max_active = min(engine.max_num_seqs, len(requests))
        self.num_active = 0
        self.next_request = 0
        num_slots = max(MIN_ROWS, self.max_active)
        self.request_of_slot = torch.zeros(num_slots, dtype=torch.long)
        self.slots = Slots(num_slots, engine.prompt_width, engine.response_width, self.device)
        self.cache = SlotCache(engine.config.num_hidden_layers, self.slots)
        parameters = inspect.signature(engine.module.forward).parameters
        self.takes_positions = "position_ids" in parameters
        self.takes_logits_to_keep = "logits_to_keep" in parameters

    def run(self) -> list[Output]:
        """Prefill when a group of prompts can enter, else decode one token of everything in flight."""
        while self.num_active or self.next_request < len(self.prompts):
            group = self._entering()
            if group:
                self._prefill(group)
            else:
                self._decode()
        return [
            Output(self.tokens[i, :n].clone(), self.log_probs[i, :n].clone(), "stop" if self.stopped[i] else "length")
            for i, n in enumerate(self.lengths.tolist())
        ]

    def _entering(self) -> range:
        """The next requests to prefill: none while fewer than `MIN_ROWS` of those waiting would fit."""
        waiting = len(self.prompts) - self.next_request
        count = min(waiting, self.max_active - self.num_active, PREFILL_ROWS)
        worthwhile = count >= min(MIN_ROWS, waiting, self.max_active)
        return range(self.next_request, self.next_request + count if worthwhile else self.next_request)

    def _prefill(self, group: range) -> None:
        """One pass over the distinct prompts of the group; samples of one prompt share it."""
        index = {prompt: i for i, prompt in enumerate(dict.fromkeys(self.prompts[r] for r in group))}
        sources = torch.tensor([index[self.prompts[r]] for r in group], device=self.device)
        slots = torch.arange(self.num_active, self.num_active + len(group))
        rows = [*index, *[(0,)] * (MIN_ROWS - len(index))]
        width = self.engine.prompt_width
        ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=self.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=self.device)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        attention_mask = self.slots.aim_prefill(mask, sources, slots.to(self.device))
        logits = self._forward(ids, positions, attention_mask)
        self.request_of_slot[slots] = torch.tensor(group)
        self.num_active += len(group)
        self.next_request = group.stop
        self._append(slots, logits[sources])

    def _decode(self) -> None:
        """One more token for slots 0..num_active-1; those beyond, up to `MIN_ROWS`, compute what nobody reads."""
        num_rows = max(MIN_ROWS, self.num_active)
        requests = self.request_of_slot[:num_rows]
        steps = self.lengths[requests] - 1
        positions = self.prompt_lengths[requests] + steps
        ids = self.tokens[requests, steps]
        attention_mask = self.slots.aim_decode(num_rows, steps.to(self.device))
        logits = self._forward(ids.to(self.device)[:, None], positions.to(self.device)[:, None], attention_mask)
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
        tokens, log_probs = (x.cpu() for x in choose_tokens(logits, noise.to(self.device), self.sampling))
        broken = ~log_probs.isfinite()
        if broken.any():
            name = self.names[int(requests[broken][0])]
            raise RolloutError(
                f"rollout: the model's logits are not finite for {name} at response token {int(steps[broken][0])} "
                f"(weights of version {self.engine.version}); look for NaN in the last update."
            )
        self.tokens[requests, steps] = tokens
        self.log_probs[requests, steps] = log_probs
        self.lengths[requests] += 1
        self.stopped[requests] = torch.isin(tokens, self.stop)
        finished = self.stopped[requests] | (self.lengths[requests] == self.sampling.max_tokens)
        for slot in sorted(slots[finished].tolist(), reverse=True):
            self._leave(slot)

    def _leave(self, slot: int) -> None:
        self.num_active -= 1
        if slot != self.num_active:
            self.cache.move(self.num_active, slot)
            self.request_of_slot[slot] = self.request_of_slot[self.num_active].item()


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
