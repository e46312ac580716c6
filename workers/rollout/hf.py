"""The reference engine: transformers' own `generate`, one sample at a time.

It is there to compare with, not for speed. Where a class's cache is not proven right
(`workers.rollout.hf_proof`) each token is computed from its whole row. Nothing of the native
engine's loop, cache or attention is used here; only the choice of a token is (`rollout.sampling`),
as a logits processor, so that one seed draws the same noise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_like.errors import ConfigError
from workers.models.rotary import factor_border
from workers.models.state import named_state
from workers.rollout.base import (
    EngineLimits,
    Output,
    Request,
    SamplingParams,
    ends_with_stop_string,
    output_of,
)
from workers.rollout.hf_proof import why_no_cache
from workers.rollout.module_engine import ModuleEngine
from workers.rollout.sampling import choose_tokens, uniforms

logger = logging.getLogger(__name__)


class HFEngine(ModuleEngine):
    """Generates with a module of its own."""

    def __init__(
        self, module: Any, limits: EngineLimits, *, decode: Callable[[list[int]], str] | None = None
    ) -> None:
        from transformers import GenerationConfig

        super().__init__(module, limits, decode)
        # the model's own would change scores: penalties, forced tokens, n-grams not to be repeated
        module.generation_config = GenerationConfig()
        width = limits.prompt_width + limits.response_width
        _check_rotary(module.config, width)
        reason = why_no_cache(module.config, width)
        self.uses_cache = not reason
        if reason:
            logger.warning(
                "rollout.name=hf decodes model type %s without a cache, by a pass over the whole "
                "row for each token, which is slow: with its cache %s.",
                module.config.model_type,
                reason,
            )

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """The module's parameters and persistent buffers."""
        return named_state(self.module)

    def _generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Output]:
        was_training = self.module.training
        self.module.eval()
        try:
            return [_Sample(self, request, sampling).run() for request in requests]
        finally:
            self.module.train(was_training)


def _check_rotary(config: Any, width: int) -> None:
    """Refuse rows that pass, as they grow, to other rotary factors than they began with."""
    border = factor_border(config)
    if border is not None and width > border:
        raise ConfigError(
            f"rollout.name=hf draws the first {border} tokens of a row of model type "
            f"{config.model_type!r} with other rotary factors (longrope) than the trainer's pass "
            f"over a longer row has: keep data.max_prompt_length + data.max_response_length, now "
            f"{width}, at {border} or less, or choose actor_rollout_ref.rollout.name=vllm."
        )


class _Sample:
    """One call of `generate`: a logits processor that leaves it one token, and a stop criterion."""

    def __init__(self, engine: HFEngine, request: Request, sampling: SamplingParams) -> None:
        self.engine, self.request, self.sampling = engine, request, sampling
        self.tokens: list[int] = []
        self.log_probs: list[list[float]] = []
        self.versions: list[int] = []
        self.finish_reason = ""
        if request.partial is not None:
            self.tokens = request.partial.tokens.tolist()
            self.log_probs = request.partial.log_probs_for(sampling).tolist()
            self.versions = request.partial.versions.tolist()

    def run(self) -> Output:
        if self.engine.control.checkpoint():
            self.finish_reason = "abort"
        if not self.finish_reason:
            device = self.engine.module.device
            ids = torch.tensor([[*self.request.prompt, *self.tokens]], device=device)
            self.engine.module.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=self.sampling.max_tokens - len(self.tokens),
                do_sample=False,
                logits_processor=[self._choose],
                stopping_criteria=[self._finished],
                eos_token_id=None,
                pad_token_id=0,
                use_cache=self.engine.uses_cache,
            )

        tokens = torch.tensor(self.tokens, dtype=torch.long)
        versions = torch.tensor(self.versions, dtype=torch.int32)
        log_probs = torch.tensor(self.log_probs).view(-1, self.sampling.num_log_probs)
        return output_of(tokens, log_probs, versions, self.finish_reason)

    def _choose(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Scores that leave greedy search the token that the noise draws."""
        position = np.array([len(self.tokens)])
        noise = torch.from_numpy(uniforms(np.array([self.request.key], dtype=np.uint64), position))
        token, log_prob = choose_tokens(
            scores, noise.to(scores.device), self.sampling, torch.from_numpy(position)
        )
        self.tokens.append(int(token))
        self.log_probs.append(log_prob[0].tolist())
        self.versions.append(self.engine.version or 0)
        return torch.full_like(scores, -torch.inf).index_fill_(1, token, 0.0)

    def _finished(self, ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        if self.tokens[-1] in self.sampling.stop_token_ids or self._ends_with_stop_string():
            self.finish_reason = "stop"
        elif len(self.tokens) == self.sampling.max_tokens:
            self.finish_reason = "length"
        elif self.engine.control.checkpoint():
            self.finish_reason = "abort"
        return torch.tensor([bool(self.finish_reason)], device=ids.device)

    def _ends_with_stop_string(self) -> bool:
        strings, decode = self.sampling.stop_strings, self.engine.decode
        if not strings or decode is None or len(self.tokens) < self.sampling.min_tokens:
            return False
        return ends_with_stop_string(self.tokens, strings, decode)
