"""One tiny model and every rollout engine on it, for the contract suite.

Usable in vLLM's own environment.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.rollout.base import CollectBudget, EngineLimits, RolloutEngine, SamplingParams
from workers.rollout.sample import Sample
from workers.rollout.sampling import sample_seed

VOCAB, PROMPT, RESPONSE, STOP = 64, 9, 14, (2, 5, 7)
LETTERS = [chr(ord("!") + token) for token in range(VOCAB)]


def make_model(folder: Path, seed: int = 0) -> Any:
    """Save a Llama whose distributions are neither flat nor sharp in `folder`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        initializer_range=0.1,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def decode(tokens: list[int]) -> str:
    """Return the text of token ids: one letter each."""
    return "".join(LETTERS[token] for token in tokens)


LIMITS = EngineLimits(
    prompt_width=PROMPT, response_width=RESPONSE, max_num_seqs=64, kv_cache_gib=1.0
)


def make_engine(name: str, model: Any, folder: Path, url: str = "") -> RolloutEngine:
    """Create an engine with stale weights; with a `url`, on vLLM's server there."""
    limits = LIMITS
    if name == "vllm":
        from workers.rollout.vllm.engine import VllmRolloutEngine
        from workers.rollout.vllm.setup import VllmSettings

        settings = VllmSettings(str(folder))
        return VllmRolloutEngine(settings, limits, decode=decode, server_url=url or None)
    own = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.zero_()
    if name == "hf":
        from workers.rollout.hf import HFRolloutEngine

        return HFRolloutEngine(own, limits, decode=decode)
    from workers.rollout.native.engine import NativeRolloutEngine

    return NativeRolloutEngine(own, limits, owns_weights=True, decode=decode)


def load(engine: RolloutEngine, model: Any, version: int) -> None:
    """Do what a sync does to one engine."""
    engine.load_weights((name, weight.detach()) for name, weight in model.named_parameters())
    engine.commit(version)


def make_prompts(num_ragged: int = 6) -> list[list[int]]:
    """Return ragged prompts with the longest and the shortest that fit."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, PROMPT + 1, size=num_ragged)
    ragged = [random.integers(8, VOCAB, size=n).tolist() for n in lengths]
    return [*ragged, random.integers(8, VOCAB, size=PROMPT).tolist(), [11]]


def requests_of(prompts: list[list[int]], n: int = 1) -> list[Sample]:
    """Return `n` samples of every prompt, as the role makes them."""
    return [
        Sample(prompt, sample_seed(0, f"{row}-0", index), f"uid {row}-0 sample {index}")
        for row, prompt in enumerate(prompts)
        for index in range(n)
    ]


def settings(**changes: Any) -> SamplingParams:
    """Return sampling parameters, by default with three stop tokens."""
    return SamplingParams(**{"max_tokens": RESPONSE, "stop_token_ids": STOP, **changes})


def full_logits(model: Any, prompt: list[int], tokens: torch.Tensor) -> torch.Tensor:
    """Return the trainer's logits of every response token: [tokens, vocabulary]."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([prompt + tokens.tolist()])).logits
    return logits[0, len(prompt) - 1 : -1]


def trainer_log_probs(model: Any, sample: Sample, temperature: float = 1.0) -> Tensor:
    """Return the trainer's log-probs of a sample's tokens."""
    logits = full_logits(model, list(sample.prompt), sample.tokens).float() / temperature
    return logits.log_softmax(-1).gather(1, sample.tokens[:, None])[:, 0]


def generate_and(
    engine: RolloutEngine,
    samples: Sequence[Sample],
    sampling: SamplingParams,
    max_tokens: int,
    work: Callable[[], Any],
) -> list[Sample]:
    """Generate all samples; call `work` when one has so many tokens."""
    numbers = engine.submit(samples, sampling)
    finished = engine.collect(max_tokens)
    assert len(finished) < len(numbers), "some still run"
    work()
    finished |= engine.collect()
    return [finished[number] for number in numbers]


def aborted_after(
    engine: RolloutEngine, samples: Sequence[Sample], sampling: SamplingParams, max_tokens: int
) -> list[Sample]:
    """Return all samples, aborted after so many tokens if they continue."""
    numbers = engine.submit(samples, sampling)
    taken = engine.collect(max_tokens) | engine.abort()
    return [taken[number] for number in numbers]


def first_tokens(sample: Sample, count: int) -> Sample:
    """Return a sample as it was at so many tokens."""
    log_probs, versions = sample.log_probs[:count], sample.versions[:count]
    columns = {"tokens": sample.tokens[:count], "log_probs": log_probs, "versions": versions}
    return replace(sample, **columns, finish_reason="abort")


def assert_same(left: Sample, right: Sample, engine: RolloutEngine) -> None:
    """Compare a sample, bit for bit if the engine guarantees bits."""
    assert left.tokens.tolist() == right.tokens.tolist()
    assert left.finish_reason == right.finish_reason
    assert left.versions.tolist() == right.versions.tolist()
    exact = type(engine).__name__ in ("HFRolloutEngine", "NativeRolloutEngine")
    atol = 0.0 if exact else 1e-4
    torch.testing.assert_close(left.log_probs, right.log_probs, atol=atol, rtol=0, equal_nan=True)


class EmptyEngine(RolloutEngine):
    """Takes weights and generates nothing."""

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        return ()

    def submit(self, samples: Sequence[Sample], sampling: SamplingParams) -> list[int]:
        return []

    def _submit(self, samples: Mapping[int, Sample], sampling: SamplingParams) -> None:
        pass

    def _advance(self, budget: CollectBudget) -> dict[int, Sample]:
        return {}

    def _abort(self, numbers: Iterable[int]) -> dict[int, Sample]:
        return {}

    def _load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for _ in tensors:
            pass

    def _free(self) -> None:
        pass

    def _allocate(self) -> None:
        pass
