"""The reference engine: transformers' `generate`, one sample at a time.

It is for comparison, not for speed. Its loop, cache and attention are transformers'. As in the
native engine, `workers.rollout.sampling` chooses each token, so a seed gives the same noise in both
engines. If the cache of a model's class is not known to be right, the engine decodes without a
cache, by a pass over the whole row for each token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_like.errors import ConfigError
from workers.models.folder import factor_border
from workers.models.state import named_state
from workers.models.support import Support
from workers.rollout.base import CollectBudget, EngineLimits, SamplingParams
from workers.rollout.module_engine import ModuleRolloutEngine
from workers.rollout.sample import UNFINISHED, Sample, num_of_older_weights
from workers.rollout.sampling import sample_tokens, uniforms

logger = logging.getLogger(__name__)


class HFRolloutEngine(ModuleRolloutEngine):
    """Generates with its own copy of the module, by transformers' `generate`.

    Example:

        module = load_model(ModelConfig(path="models/policy"), head="token")
        engine = HFRolloutEngine(module, EngineLimits(prompt_width=64, response_width=64))
    """

    def __init__(
        self, module: Any, limits: EngineLimits, *, decode: Callable[[list[int]], str] | None = None
    ) -> None:
        """Take a causal LM of transformers, such as one of `load_model`.

        Args:
            module: the causal LM, on its device.
            limits: longest prompt and response, and memory.
            decode: function from token ids to text; only stop strings need it.
        """
        from transformers import GenerationConfig

        super().__init__(module, limits, decode)
        # the model's own defaults would change logits: penalties, forced tokens, no-repeat n-grams
        module.generation_config = GenerationConfig()
        width = limits.prompt_width + limits.response_width
        _check_rotary(module.config, width)
        reason = Support.of(module.config).why_not("cached", width)
        self.uses_cache = not reason
        if reason:
            logger.warning(
                "actor_rollout_ref.rollout.name=hf decodes model type %s without a cache, by a "
                "pass over the whole row for each token, which is slow, because its cache is not "
                "known to be correct: %s.",
                module.config.model_type,
                reason,
            )
        self._decodings: dict[int, _Decoding] = {}

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return the module's parameters and persistent buffers."""
        return named_state(self.module)

    def _submit(self, samples: Mapping[int, Sample], sampling: SamplingParams) -> None:
        for number, sample in samples.items():
            self._decodings[number] = _Decoding(self, sample, sampling)

    def _advance(self, budget: CollectBudget) -> dict[int, Sample]:
        """Run one sample after the other; the time limit is checked only between two samples."""
        finished: dict[int, Sample] = {}
        was_training = self.module.training
        self.module.eval()
        try:
            for number, decoding in list(self._decodings.items()):
                decoding.run(budget.max_tokens)
                if decoding.finish_reason != UNFINISHED:
                    finished[number] = self._decodings.pop(number).so_far()
                if budget.is_over or (budget.until_one and finished):
                    break
        finally:
            self.module.train(was_training)
        return finished

    def _abort(self, numbers: Iterable[int]) -> dict[int, Sample]:
        known = self._decodings.keys() & set(numbers)
        return {number: self._decodings.pop(number).so_far() for number in known}


def _check_rotary(config: Any, width: int) -> None:
    """Reject rows so long that the model's rotary factors change as they grow (longrope)."""
    border = factor_border(config)
    if border is not None and width > border:
        raise ConfigError(
            "actor_rollout_ref.rollout.name=hf uses other rotary factors (longrope) for the first "
            f"{border} tokens of a row of model type {config.model_type!r} than the trainer uses "
            "for a longer row. Set data.max_prompt_length + data.max_response_length, now "
            f"{width}, to {border} or less, or set actor_rollout_ref.rollout.name=vllm."
        )


class _Decoding:
    """Decodes one sample; it is the logits processor and the stop criterion of `generate`.

    Tokens that the sample already has are fed one by one, as they were sampled. Tokens of older
    weights are read in one pass with the prompt, unless their keys and values are still cached.
    """

    def __init__(self, engine: HFRolloutEngine, sample: Sample, sampling: SamplingParams) -> None:
        self.engine, self.sample, self.sampling = engine, sample, sampling
        self.tokens: list[int] = sample.tokens.tolist()
        self.log_probs = sample.stacked_log_probs(sampling.num_log_probs).tolist()
        self.versions: list[int] = sample.versions.tolist()
        self.finish_reason = UNFINISHED
        self.max_length = sample.longest(sampling.max_tokens)
        self.end = self.max_length
        """Response length at which this run ends."""
        self.version: int | None = None
        self.cache: Any = None
        self.position = 0
        """Number of response tokens that the model will have read after its next pass."""
        self.routers = engine.routers if sampling.routed_experts else None
        self.routed: Tensor | None = None

    def run(self, max_tokens: int | None) -> None:
        """Generate until the sample is finished, or has `max_tokens` more tokens."""
        from transformers import GenerationConfig, GenerationMixin

        self.finish_reason, self.end = "", self.max_length
        if max_tokens is not None:
            self.end = min(self.end, len(self.tokens) + max_tokens)
        if self.cache is None or (
            self.engine.version != self.version and not self.engine.limits.keep_kv_cache
        ):
            self.cache = None
            self.position = num_of_older_weights(self.versions, self.engine.version)
        self.version = self.engine.version

        ids = [*self.sample.prompt, *self.tokens[: self.position]]
        row = torch.tensor([ids], device=self.engine.module.device)
        inputs = self._images(row) if self.cache is None else {"past_key_values": self.cache}
        # janus overrides `generate`, and drops the logits processor
        generate: Any = GenerationMixin.generate
        with nullcontext() if self.routers is None else self.routers.recording() as noted:
            output = generate(
                self.engine.module,
                row,
                attention_mask=torch.ones_like(row),
                generation_config=GenerationConfig(
                    max_new_tokens=self.max_length - self.position,
                    do_sample=False,
                    pad_token_id=0,
                    use_cache=self.engine.uses_cache,
                    return_dict_in_generate=True,
                ),
                logits_processor=[self],
                stopping_criteria=[self._finished],
                **inputs,
            )
        if noted is not None:
            chosen = noted.pop_choices()
            if not self.engine.uses_cache:  # each pass reads the whole row; the last one counts
                chosen = chosen[-(len(self.sample.prompt) + len(self.tokens) - 1) :]
            elif self.cache is not None and self.routed is not None:
                chosen = torch.cat([self.routed, chosen])
            self.routed = chosen
        if self.engine.uses_cache:
            self.cache = output.past_key_values

    def _images(self, ids: Tensor) -> dict[str, Tensor]:
        """Return the arguments of the first pass over a sample with images."""
        if not self.sample.images:
            return {}
        images, refs, name = self.engine.images, self.sample.images, self.sample.name
        images.reader.load([(refs, name)])
        numbers = images.of_row(ids[0].cpu(), refs, name)
        return images.arguments({"input_ids": ids}, numbers, ids.device)

    def so_far(self) -> Sample:
        """Return the sample with its tokens so far."""
        tokens = torch.tensor(self.tokens, dtype=torch.long)
        versions = torch.tensor(self.versions, dtype=torch.int32)
        log_probs = torch.tensor(self.log_probs).view(-1, self.sampling.num_log_probs)
        return self.sample.with_response(
            tokens, log_probs, versions, self.finish_reason, self.routed
        )

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores that leave greedy search one token: the sample's next, or a new one."""
        if self.position == len(self.tokens):
            place = np.array([len(self.tokens)])
            key = np.array([self.sample.seed], dtype=np.uint64)
            noise = torch.from_numpy(uniforms(key, place)).to(scores.device)
            token, log_prob = sample_tokens(scores, noise, self.sampling, torch.from_numpy(place))
            self.tokens.append(int(token))
            self.log_probs.append(log_prob[0].tolist())
            self.versions.append(self.engine.version or 0)
        next_token = torch.tensor([self.tokens[self.position]], device=scores.device)
        self.position += 1
        return torch.full_like(scores, -torch.inf).index_fill_(1, next_token, 0.0)

    def _finished(self, ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Return True to end transformers' loop; set `finish_reason`."""
        if self.position == len(self.tokens):
            reason = self.engine.finish_reason(self.sample, self.tokens, self.sampling)
            goes_on = reason == UNFINISHED and len(self.tokens) < self.end
            self.finish_reason = "" if goes_on else reason
        return torch.tensor([bool(self.finish_reason)], device=ids.device)


def check_decoding(config: Any, longest: int) -> None:
    """Reject a class whose `generate` raises an error on text, with a cache and without."""
    support = Support.of(config)
    reason = support.why_not("generate")
    if reason and support.capabilities is not None and support.why_not("cached", longest):
        raise ConfigError(
            f"actor_rollout_ref.rollout.name=hf cannot decode model type {config.model_type!r}: "
            f"{reason}. Set actor_rollout_ref.rollout.name=native or vllm."
        )
