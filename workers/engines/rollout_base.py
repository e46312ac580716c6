"""The interface of a rollout engine, and its data types. `RolloutWorker` calls it, `native_rollout` implements it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from verl_like.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn: temperature first, then top-k, then top-p of what is left, then min-p."""

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    do_sample: bool = True
    max_tokens: int
    stop_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse values that draw nothing."""
        checks = (
            ("temperature", self.temperature, self.temperature > 0, "above 0; for greedy decoding set do_sample=false"),
            ("top_k", self.top_k, self.top_k >= 1 or self.top_k == -1, "1 or more, or -1 for all tokens"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "between 0 and 1"),
            ("max_tokens", self.max_tokens, self.max_tokens >= 1, "1 or more"),
        )
        for name, value, valid, rule in checks:
            if not valid:
                raise ConfigError(f"sampling: {name}={value} cannot work; it must be {rule}.")

    @property
    def log_prob_temperature(self) -> float:
        """What logits are divided by in reported log-probs: greedy counts as 1."""
        return self.temperature if self.do_sample else 1.0


@dataclass(frozen=True)
class Request:
    """One sample to generate: prompt token ids without padding, its noise key, and a name for error messages."""

    prompt: Sequence[int]
    key: int = 0
    name: str = "request"


@dataclass(frozen=True)
class Output:
    """The sample: token ids up to and including the stop token, their log-probs, and "stop" or "length"."""

    tokens: Tensor
    log_probs: Tensor
    finish_reason: str


class RolloutEngine(ABC):
    """Token ids in, token ids and log-probs out. The caller, `RolloutWorker`, drives it so:

    for version in count():
        engine.wake_up()
        engine.load_weights(named_tensors)   # the engine is stale and refuses to generate ...
        engine.commit(version)               # ... until every rank has verified what it received
        outputs = engine.generate(requests, sampling)
        engine.sleep()                       # training takes the memory

    An engine that shares the trainer's module skips `load_weights`. `version` is the last commit's, None when stale.
    """

    version: int | None = None

    @abstractmethod
    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Output]:
        """One output per request, in the order of the requests."""

    @abstractmethod
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrite every weight; names and shapes must be exactly the module's. Leaves the engine stale."""

    @abstractmethod
    def commit(self, version: int) -> None:
        """Declare the loaded weights verified as `version`."""

    @abstractmethod
    def sleep(self) -> None:
        """Give memory back; an engine that owns its weights loses them and becomes stale."""

    @abstractmethod
    def wake_up(self) -> None:
        """Take the memory again; no effect when awake."""
