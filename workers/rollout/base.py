"""The interface of a rollout engine, and its data types: sampling, requests, outputs, limits.

The engines are `rollout.hf`, `rollout.native.engine` and `rollout.vllm.engine`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_like.errors import ConfigError, RolloutError, WeightSyncError, nearest
from workers.rollout.control import GenerationControl
from workers.weights.checksum import Fingerprint, checksum_of


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn: bias, minimum length, then temperature, top-k, top-p, min-p."""

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    do_sample: bool = True
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    truncated_log_probs: bool = False

    def __post_init__(self) -> None:
        """Refuse values that draw nothing."""
        greedy = "for greedy decoding set do_sample=false"
        in_range = 0 <= self.min_tokens <= self.max_tokens
        checks = (
            ("temperature", self.temperature > 0, f"above 0; {greedy}"),
            ("top_k", self.top_k >= 1 or self.top_k == -1, "1 or more, or -1 for all tokens"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("max_tokens", self.max_tokens >= 1, "1 or more"),
            ("min_tokens", in_range, "between 0 and max_tokens"),
            ("stop_strings", all(self.stop_strings), "without empty strings"),
        )
        for name, is_valid, rule in checks:
            if not is_valid:
                value = getattr(self, name)
                raise ConfigError(f"sampling: {name}={value} cannot work; it must be {rule}.")

    @property
    def log_prob_temperature(self) -> float:
        """What logits are divided by in reported log-probs: greedy counts as 1."""
        return self.temperature if self.do_sample else 1.0

    @property
    def num_log_probs(self) -> int:
        """Log-probs per token: the policy's, and with `truncated_log_probs` those drawn from."""
        return 2 if self.truncated_log_probs else 1


STOPS = ("stop_strings", "stop_token_ids")
"""Where a response ends, however it is sampled: of a training's settings all that validation reads.
"""
EXTRA_SAMPLING = ("min_p", "min_tokens", *STOPS, "logit_bias", "truncated_log_probs")
"""Fields that `rollout.sampling_kwargs` may set."""


def sampling_params(
    settings: dict[str, Any], max_tokens: int, stop_token_ids: tuple[int, ...]
) -> SamplingParams:
    """From settings as configuration and `meta_info` spell them: lists, a table for the bias.

    Their stop ids are added to `stop_token_ids`, those of the model.
    """
    settings = {"max_tokens": max_tokens, **settings}
    stops = (*stop_token_ids, *_stop_ids_in(settings))
    settings["stop_token_ids"] = tuple(dict.fromkeys(stops))
    settings["stop_strings"] = tuple(settings.get("stop_strings", ()))
    bias = dict(settings.get("logit_bias", {}))
    settings["logit_bias"] = tuple((int(token), float(value)) for token, value in bias.items())
    return SamplingParams(**settings)


def _stop_ids_in(settings: dict[str, Any]) -> tuple[int, ...]:
    ids = settings.get("stop_token_ids", ())
    ids = (ids,) if isinstance(ids, int) else tuple(ids)
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        raise ConfigError(
            f"rollout.sampling_kwargs.stop_token_ids={list(ids)} cannot work; it must be token "
            "ids, such as [32007]; for text there is stop_strings."
        )
    return ids


def check_sampling_kwargs(settings: dict[str, Any], max_tokens: int) -> None:
    """Refuse what `sampling_params` would not understand or draw nothing from."""
    for name in settings:
        if name not in EXTRA_SAMPLING:
            valid = ", ".join(EXTRA_SAMPLING)
            raise ConfigError(
                f"rollout.sampling_kwargs names {name!r}; valid: "
                f"{valid}.{nearest(name, EXTRA_SAMPLING)}"
            )
    sampling_params(settings, max_tokens, (0,))


@dataclass(frozen=True)
class Output:
    """A sample: token ids to the stop token and with it, their log-probs, the version of each.

    `finish_reason` is "stop", "length", or "abort" for a partial result, which a later `Request`
    can continue. `truncated_log_probs` are those of the distribution that was drawn from, where the
    sampling asks for them.
    """

    tokens: Tensor
    log_probs: Tensor
    finish_reason: str
    versions: Tensor
    truncated_log_probs: Tensor | None = None

    def log_probs_for(self, sampling: SamplingParams) -> Tensor:
        """[tokens, kinds], as engines keep them."""
        kinds = [self.log_probs, self.truncated_log_probs][: sampling.num_log_probs]
        return torch.stack([kind for kind in kinds if kind is not None], dim=1)


@dataclass(frozen=True)
class Request:
    """One sample to generate: prompt ids without padding, its noise key, its name in errors.

    With `partial`, an aborted output of the same prompt and key, it goes on where that one ended.
    """

    prompt: Sequence[int]
    key: int = 0
    name: str = "request"
    partial: Output | None = None


@dataclass(frozen=True)
class EngineLimits:
    """What an engine is built for: widths of columns, how much it decodes and stores at once."""

    prompt_width: int
    response_width: int
    max_num_seqs: int = 256
    kv_cache_gb: float = 4.0


class RolloutEngine(ABC):
    """Token ids in, token ids and log-probs out.

        for version in count():
            engine.wake_up()
            engine.load_weights(named_tensors)  # the engine is stale and refuses to generate ...
            engine.commit(version)              # ... until every rank has verified its weights
            outputs = engine.generate(requests, sampling)
            engine.sleep()                      # training takes the memory

    An engine that shares the trainer's module needs no `load_weights`. `version` is the last
    commit's, None when stale; `weights_id` names the weights themselves. `control` aborts, pauses
    and resumes `generate` from another thread.
    """

    version: int | None = None
    weights_id: int = 0
    asleep: bool = False
    owns_weights: bool = True
    num_bytes: int = 0
    vocab_size: int

    def __init__(
        self, limits: EngineLimits, decode: Callable[[list[int]], str] | None = None
    ) -> None:
        """`decode` turns token ids into text; only stop strings need it."""
        self.limits = limits
        self.decode = decode
        self.control = GenerationControl()
        self._fingerprint = Fingerprint()

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Output]:
        """One output per request, in the order of the requests."""
        if self.version is None or self.asleep:
            state = "has no verified weights (it is new, was asleep, or a sync failed)"
            if self.asleep:
                state = "is asleep"
            raise RolloutError(
                f"rollout: this engine {state}; sync_weights(actor_group, rollout_group, version) "
                "makes it ready."
            )
        self._check_requests(requests, sampling)
        if not requests:
            return []

        with self.control.running(len(requests)):
            outputs = self._generate(requests, sampling)
        log_probs = torch.cat([output.log_probs for output in outputs])
        if not bool(log_probs.isfinite().all()):
            self._refuse_broken(requests, outputs)
        return outputs

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrite every weight; names and shapes must be exactly the module's.

        Leaves the engine stale.
        """
        if self.control.in_flight and not self.control.is_paused:
            raise WeightSyncError(
                f"engine: {self.control.num_running} samples are being generated; control.pause() "
                "them or control.abort() them first."
            )
        self.version = None
        self.wake_up()
        self._fingerprint = Fingerprint()
        self._load(self._fingerprint.watch(tensors))

    def commit(self, version: int) -> None:
        """Declare the loaded weights verified: from here on samples are those of `version`."""
        self.version, self.weights_id = version, self._fingerprint.value()

    def sleep(self) -> None:
        """Give memory back; an engine that owns its weights loses them and becomes stale."""
        if self.control.in_flight:
            raise RolloutError(
                f"rollout: sleep with {self.control.num_running} samples in flight; "
                "control.abort() returns them first."
            )
        if not self.asleep and self.owns_weights:
            self.version = None
            self._free()
        self.asleep = True

    def wake_up(self) -> None:
        """Take the memory again; no effect when awake.

        The engine's own weights are to be loaded next.
        """
        if self.asleep and self.owns_weights:
            self._allocate()
        self.asleep = False

    def weights_checksum(self) -> str:
        """Hash of the full weights, comparable with the trainer's."""
        return checksum_of(self.named_weights())

    @abstractmethod
    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """The weights as they are in the engine, under Hugging Face's names."""

    @abstractmethod
    def _generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Output]:
        """`generate` on checked requests; asks `control.checkpoint()` between steps."""

    @abstractmethod
    def _load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write every tensor, or raise one `WeightSyncError` that lists what does not fit."""

    @abstractmethod
    def _free(self) -> None:
        """Drop the engine's own weights."""

    @abstractmethod
    def _allocate(self) -> None:
        """Make room for them again."""

    def _check_requests(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        limits = self.limits
        if sampling.max_tokens > limits.response_width:
            raise RolloutError(
                f"rollout: max_tokens={sampling.max_tokens} does not fit the "
                f"{limits.response_width} response columns; raise data.max_response_length."
            )
        if sampling.stop_strings and self.decode is None:
            raise ConfigError(
                "sampling: stop strings need the tokenizer, and this engine was built without one."
            )
        outside = [token for token, _ in sampling.logit_bias if not 0 <= token < self.vocab_size]
        if outside:
            raise ConfigError(
                f"sampling: logit_bias names token {outside[0]}, outside the vocabulary of "
                f"{self.vocab_size}."
            )

        for request in requests:
            self._check_prompt(request)
            partial = request.partial
            lacks_log_probs = partial is not None and partial.truncated_log_probs is None
            if sampling.truncated_log_probs and lacks_log_probs:
                raise RolloutError(
                    f"rollout: {request.name} was begun without truncated_log_probs; go on without."
                )

    def _refuse_broken(self, requests: Sequence[Request], outputs: Sequence[Output]) -> None:
        for request, output in zip(requests, outputs, strict=True):
            broken = (~output.log_probs.isfinite()).nonzero()
            if len(broken):
                raise RolloutError(
                    f"rollout: the model's logits are not finite for {request.name} at response "
                    f"token {int(broken[0])} (weights of version {self.version}); look for NaN in "
                    "the last update."
                )

    def _check_prompt(self, request: Request) -> None:
        length = len(request.prompt)
        if not 1 <= length <= self.limits.prompt_width:
            way_out = "drop it from the data"
            if length:
                way_out = (
                    "raise data.max_prompt_length, or set data.truncation=left|right or "
                    "data.filter_overlong_prompts=true"
                )
            raise RolloutError(
                f"rollout: the prompt of {request.name} has {length} tokens; 1 to "
                f"{self.limits.prompt_width} fit: {way_out}."
            )

        low, high = min(request.prompt), max(request.prompt)
        if low < 0 or high >= self.vocab_size:
            raise RolloutError(
                f"rollout: the prompt of {request.name} has token id {low if low < 0 else high}, "
                f"outside the vocabulary of {self.vocab_size}; tokenizer and "
                "actor_rollout_ref.model.path do not fit."
            )


def output_of(tokens: Tensor, log_probs: Tensor, versions: Tensor, finish_reason: str) -> Output:
    """An `Output` that shares no memory with these; `log_probs` is [tokens, kinds]."""
    policy, *truncated = (column.clone() for column in log_probs.unbind(dim=1))
    return Output(tokens.clone(), policy, finish_reason, versions.clone(), *truncated)


def ends_with_stop_string(
    tokens: Sequence[int], stop_strings: Sequence[str], decode: Callable[[Any], str]
) -> bool:
    """Whether the newest token completes a stop string: it is in the text now, and was not before.

    Only a tail is decoded: every character of a stop string takes at least a byte and at most four
    tokens of it.
    """
    window = list(tokens[-(4 * max(map(len, stop_strings)) + 4) :])
    after, before = decode(window), decode(window[:-1])
    return any(after.count(text) > before.count(text) for text in stop_strings)
