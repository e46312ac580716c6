"""The embedded rollout engine: a decode loop over Hugging Face causal LMs with full attention.

`module_forward.check_decoding` rejects classes that the engine does not decode correctly.

    waiting prompts --prefill, in groups--> slots of the KV cache
    slots           --decode, one token per pass--> finished samples leave, waiting prompts enter

In float32 on a CPU, a sample's tokens and log-probs have the same bits in any batch, except with a
mixture of experts. This has four reasons. A pass has at least `direct_forward.fewest_rows` rows,
because the bits of a linear layer differ with fewer rows. It runs on one CPU thread, because
several threads would split the rows in a way that depends on their number. Attention covers whole
blocks of columns (`native.kv_cache`). The noise is keyed by the sample (`rollout.sampling`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import transformers
from torch import Tensor

from workers.models.lora import merged_tensors
from workers.models.state import named_state
from workers.rollout.base import EngineLimits, SamplingParams, TakeBudget
from workers.rollout.module_engine import ModuleRolloutEngine
from workers.rollout.native.direct_forward import (
    DirectForward,
    agrees,
    fewest_rows,
    is_llama_shaped,
    uses_onednn,
)
from workers.rollout.native.kv_cache import CacheMemory, TurnCache, slot_width, slots_that_fit
from workers.rollout.native.module_forward import (
    ModuleForward,
    check_decoding,
    check_model,
    grouped_decoding,
)
from workers.rollout.native.scheduler import Scheduler
from workers.rollout.sample import Sample


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
        self.max_active = min(limits.max_num_seqs, num_slots)
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

    def _advance(self, budget: TakeBudget) -> dict[int, Sample]:
        scheduler = self._scheduler
        assert scheduler is not None, "`_submit` creates it"
        is_direct = scheduler.forward_class is DirectForward
        with _inference(self.module), torch.inference_mode() if is_direct else nullcontext():
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
    """Context with evaluation mode, no gradients, one CPU thread, and `grouped_decoding`."""
    num_threads = torch.get_num_threads()
    was_training = module.training
    if any(part.training for part in module.modules()):  # `eval` costs more than this check
        module.eval()
    torch.set_num_threads(1)
    try:
        with torch.no_grad(), grouped_decoding(module):
            yield
    finally:
        if was_training:
            module.train()
        torch.set_num_threads(num_threads)
