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
from workers.rollout.base import EngineLimits, Output, Request, SamplingParams
from workers.rollout.hf_proof import why_no_cache
from workers.rollout.module_engine import ModuleEngine
from workers.rollout.responses import ends_with_stop_string, num_of_older_weights, output_of
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
    """One request: a logits processor that leaves one token, and a stop criterion.

    Tokens that are there already are fed one by one, as they were drawn; those of older weights are
    read at once with the prompt.
    """

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
        self.longest = sampling.longest(len(self.tokens))
        self.position = 0
        """Tokens of the response that the model has read, or will have with the next."""

    def run(self) -> Output:
        if self.engine.asked_to_stop():
            self.finish_reason = "abort"
        while not self.finish_reason:
            self._decode()

        tokens = torch.tensor(self.tokens, dtype=torch.long)
        versions = torch.tensor(self.versions, dtype=torch.int32)
        log_probs = torch.tensor(self.log_probs).view(-1, self.sampling.num_log_probs)
        return output_of(tokens, log_probs, versions, self.finish_reason)

    def _decode(self) -> None:
        """Until it is finished, or there are new weights to read it again with."""
        from transformers import GenerationConfig

        self.version = self.engine.version or 0
        self.position = num_of_older_weights(self.versions, self.version)
        ids = [*self.request.prompt, *self.tokens[: self.position]]
        row = torch.tensor([ids], device=self.engine.module.device)
        self.engine.module.generate(
            row,
            attention_mask=torch.ones_like(row),
            generation_config=GenerationConfig(
                max_new_tokens=self.sampling.max_tokens - self.position,
                do_sample=False,
                pad_token_id=0,
                use_cache=self.engine.uses_cache,
            ),
            logits_processor=[self],
            stopping_criteria=[self._finished],
        )

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Scores that leave greedy search the token that is there, or that the noise draws."""
        if self.position == len(self.tokens):
            self._draw(scores)
        token = torch.tensor([self.tokens[self.position]], device=scores.device)
        self.position += 1
        return torch.full_like(scores, -torch.inf).index_fill_(1, token, 0.0)

    def _draw(self, scores: Tensor) -> None:
        position = np.array([len(self.tokens)])
        noise = torch.from_numpy(uniforms(np.array([self.request.key], dtype=np.uint64), position))
        token, log_prob = choose_tokens(
            scores, noise.to(scores.device), self.sampling, torch.from_numpy(position)
        )
        self.tokens.append(int(token))
        self.log_probs.append(log_prob[0].tolist())
        self.versions.append(self.engine.version or 0)

    def _finished(self, ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Whether transformers is to return: the response is finished, or the weights are new."""
        if self.position == len(self.tokens):
            self.finish_reason = self._reason()
        if not self.finish_reason and self.engine.asked_to_stop():
            self.finish_reason = "abort"
        is_read_again = self.engine.version != self.version and not self.engine.limits.keep_kv
        return torch.tensor([bool(self.finish_reason) or is_read_again], device=ids.device)

    def _reason(self) -> str:
        """Why the response ends with its newest token; nothing if it does not."""
        if self.tokens[-1] in self.sampling.stop_token_ids or self._ends_with_stop_string():
            return "stop"
        if len(self.tokens) == self.sampling.max_tokens:
            return "length"
        return "abort" if len(self.tokens) == self.longest else ""

    def _ends_with_stop_string(self) -> bool:
        strings, decode = self.sampling.stop_strings, self.engine.decode
        if not strings or decode is None or len(self.tokens) < self.sampling.min_tokens:
            return False
        return ends_with_stop_string(self.tokens, strings, decode)
