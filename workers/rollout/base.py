"""The interface of a rollout engine, its sampling parameters and its limits.

The engines are in `workers.rollout.hf`, `workers.rollout.native.engine` and
`workers.rollout.vllm.engine`.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from verl_like.errors import ConfigError, RolloutError
from workers.rollout.sample import LENGTH_LIMIT, UNFINISHED, Sample

if TYPE_CHECKING:
    from workers.models.images import ImageReader


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling settings.

    They are applied in this order: logit bias, minimum length, temperature, top-k, top-p, min-p.

    Example:

        SamplingParams(temperature=0.7, top_p=0.9, max_tokens=256, stop_token_ids=(2,))

    Args:
        temperature: divisor of the logits.
        top_k: sample from the k most likely tokens; -1: from all.
        top_p: sample from the most likely tokens with this total probability.
        min_p: sample from tokens with at least this fraction of the largest probability.
        do_sample: False decodes greedily.
        max_tokens: maximum tokens of a response.
        min_tokens: minimum tokens of a response: before, no stop token is sampled, and no stop
            string counts.
        stop_token_ids: tokens that end a response; the sampled one stays as its last token.
        stop_strings: texts that end a response.
        logit_bias: pairs of a token id and the number that is added to its logit.
        truncated_log_probs: also return log-probs under the truncated distribution.
        routed_experts: also return the experts that the model's routers choose.
    """

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
    routed_experts: bool = False

    @property
    def filters(self) -> bool:
        """True if top-k, top-p or min-p leaves tokens out."""
        return self.top_k != -1 or self.top_p < 1 or self.min_p > 0

    def __post_init__(self) -> None:
        """Reject values that make sampling impossible."""
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
                raise ConfigError(f"sampling: {name}={value} is not possible: it must be {rule}.")

    @property
    def log_prob_temperature(self) -> float:
        """The divisor of the logits in reported log-probs; 1 for greedy decoding."""
        return self.temperature if self.do_sample else 1.0

    @property
    def num_log_probs(self) -> int:
        """Number of log-probs per token: 1, or 2 with `truncated_log_probs`."""
        return 2 if self.truncated_log_probs else 1


@dataclass(frozen=True)
class EngineLimits:
    """The sizes that an engine must support, and its memory.

    Example:

        EngineLimits(prompt_width=512, response_width=1024, max_num_seqs=64)

    Args:
        prompt_width: maximum tokens of a prompt.
        response_width: maximum tokens of a response.
        max_num_seqs: maximum number of samples that decode at once; hf decodes one at a time.
        kv_cache_gib: size of the KV cache in GiB, for native and for vllm on CPUs.
        keep_kv_cache: True if unfinished samples keep their KV cache when new weights arrive.
    """

    prompt_width: int
    response_width: int
    max_num_seqs: int = 256
    kv_cache_gib: float = 4.0
    keep_kv_cache: bool = False


class CollectBudget:
    """The limits of one `collect`: new tokens per sample, and seconds; None means no limit."""

    def __init__(
        self,
        max_tokens: int | None = None,
        seconds: float | None = None,
        until_one: bool = False,
    ) -> None:
        """Start the clock. With `until_one`, `collect` ends once a sample is finished."""
        self.max_tokens, self.until_one = max_tokens, until_one
        self._until = None if seconds is None else time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """Seconds until the time limit."""
        return math.inf if self._until is None else max(0.0, self._until - time.monotonic())

    @property
    def is_over(self) -> bool:
        """True if no time is left."""
        return self.seconds_left == 0


class RolloutEngine(ABC):
    """Base class of rollout engines, which generate samples from token ids, with their log-probs.

    A rollout worker calls an engine like this:

        for version in count():
            engine.wake_up()
            engine.load_weights(named_tensors)  # the engine is stale and does not generate ...
            engine.commit(version)              # ... until every rank has verified its weights
            ids = engine.submit(samples, sampling)
            while engine.num_running:           # between two takes, you can submit more samples
                done = engine.collect(seconds=1.0)  # and load newer weights
            engine.sleep()                      # frees memory for training

    A sample's noise does not depend on the other running samples. An engine that shares the
    trainer's module needs no `load_weights`.

    Attributes:
        version: version of the weights that was committed last; None if the engine is stale.
        num_running: number of samples that were submitted and neither taken nor aborted.
        is_asleep: True between `sleep` and `wake_up`.
        limits: longest prompt and response, and memory.
        vocab_size: number of token ids.
    """

    version: int | None = None
    """The version of the weights that was committed last; None if the engine is stale."""
    is_asleep: bool = False
    """True between `sleep` and `wake_up`."""
    owns_weights: bool = True
    """False if the engine generates with the trainer's module."""
    is_follower: bool = False
    """True if another rank of this engine leads, that is, schedules and returns the samples."""
    model_path: str = ""
    """The model's folder, which has the image processor."""
    num_bytes: int = 0
    """Size of the weights that a sync loads, for the metric `perf/weight_sync_mib`."""
    vocab_size: int

    def __init__(
        self, limits: EngineLimits, decode: Callable[[list[int]], str] | None = None
    ) -> None:
        """Create an engine without weights.

        Args:
            limits: longest prompt and response, and memory.
            decode: function from token ids to text; only stop strings need it.
        """
        self.limits = limits
        self.decode = decode
        self._num_loads = 0
        self._ids = itertools.count()
        self._running: dict[int, Sample] = {}
        self._sampling: SamplingParams | None = None

    @cached_property
    def image_reader(self) -> ImageReader:
        """The reader of images in prompts; an error if the model reads none."""
        from workers.models.folder import model_folder
        from workers.models.images import image_reader

        return image_reader(str(model_folder(self.model_path, weights=False)))

    @property
    def num_running(self) -> int:
        """Number of samples that were submitted and are not yet taken or aborted."""
        return len(self._running)

    def submit(self, samples: Sequence[Sample], sampling: SamplingParams) -> list[int]:
        """Start or continue these samples, and return a number for each of them.

        Args:
            samples: prompts, or unfinished responses to continue.
            sampling: sampling parameters; samples that run at the same time share them.
        """
        if self.version is None or self.is_asleep:
            state = "has no verified weights (it is new, was asleep, or a sync failed)"
            if self.is_asleep:
                state = "is asleep"
            raise RolloutError(
                f"rollout: this engine {state}. Call sync_weights(actor_group, rollout_group, "
                "version), which sends verified weights."
            )
        self._check_sampling(sampling)
        for sample in samples:
            _check_sample(sample, sampling, self.limits.prompt_width, self.vocab_size)
        if self._running and sampling != self._sampling:
            raise RolloutError(
                f"rollout: {self.num_running} samples are running with other sampling settings. "
                "Take or abort them first."
            )
        self._sampling = sampling
        added = {next(self._ids): sample for sample in samples}
        self._submit(added, sampling)
        self._running |= added
        return list(added)

    def collect(
        self,
        max_tokens: int | None = None,
        seconds: float | None = None,
        until_one: bool = False,
    ) -> dict[int, Sample]:
        """Generate, and return the finished samples by number.

        This returns once all samples are finished, or earlier if one of the limits is reached. It
        makes at least one decode step, except with a vLLM server, which decodes on its own.

        Args:
            max_tokens: return once a sample has this many new tokens.
            seconds: return after this time; hf first finishes the sample that it is decoding.
            until_one: return once a sample is finished.
        """
        if not self._running:
            return {}
        if self.version is None:
            num_lost = self.num_running
            self.abort()
            raise RolloutError(
                f"rollout: a weight sync failed during a generation of {num_lost} samples, so the "
                "engine has no verified weights. Call sync_weights(actor_group, rollout_group, "
                "version), then generate these samples again."
            )
        try:
            finished = self._advance(CollectBudget(max_tokens, seconds, until_one))
            for sample in finished.values():
                broken = (~sample.log_probs.isfinite() & sample.is_sampled).nonzero()
                if len(broken):
                    raise RolloutError(
                        f"rollout: the model's logits are not finite for {sample.name} at "
                        f"response token {int(broken[0])} (weights of version {self.version}). "
                        "Check the last update for NaN."
                    )
        except BaseException:
            self.abort()
            raise
        for number in finished:
            del self._running[number]
        return finished

    def abort(self, numbers: Iterable[int] | None = None) -> dict[int, Sample]:
        """Stop these samples, by default all; return them, so that they can be submitted again."""
        stopped = set(self._running if numbers is None else numbers) & self._running.keys()
        samples = self._abort(stopped)
        for number in stopped:
            del self._running[number]
        return samples

    def generate(self, samples: Sequence[Sample], sampling: SamplingParams) -> list[Sample]:
        """Generate all samples to their end with `sampling`; return them in the same order."""
        if self._running:
            raise RolloutError(
                f"rollout: this engine is already generating {self.num_running} samples. Take "
                "or abort them first."
            )
        numbers = self.submit(samples, sampling)
        finished = self.collect()
        return [finished[number] for number in numbers]

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrite every weight (or the LoRA adapter, if vLLM has loaded the base model).

        Names and shapes must equal those of the model.

        The engine is stale until `commit`. After it, running samples continue with the new weights.
        """
        self.version = None
        self.wake_up()
        self._load(tensors)
        self._num_loads += 1

    def commit(self, version: int) -> None:
        """Declare the loaded weights verified: later samples belong to `version`."""
        self.version = version

    def close(self) -> None:  # noqa: B027 - most engines need nothing
        """Free resources that garbage collection would not free."""

    def sleep(self) -> None:
        """Free memory; an engine that owns its weights drops them and becomes stale."""
        if self._running:
            raise RolloutError(
                f"rollout: cannot sleep while {self.num_running} samples are in flight. Call "
                "abort() first; it returns them."
            )
        if not self.is_asleep and self.owns_weights:
            self.version = None
            self._free()
        self.is_asleep = True

    def wake_up(self) -> None:
        """Allocate the memory again; without effect if the engine is awake.

        Next, an engine that owns its weights must load them.
        """
        if self.is_asleep and self.owns_weights:
            self._allocate()
        self.is_asleep = False

    def leading(self) -> AbstractContextManager[None]:
        """Context of a call on the engine's first rank; the other ranks `follow` until its end."""
        return nullcontext()

    def follow(self) -> None:
        """Run this rank's part of one call of the engine's first rank."""
        raise RolloutError("rollout: this engine has only one rank, so no rank follows.")

    def weights_checksum(self) -> str:
        """Return a hash of the full weights, to compare with the trainer's."""
        from workers.weights.full_weights import checksum_of

        return checksum_of(self.named_weights())

    def no_choices(self) -> Tensor | None:
        """Return an empty tensor [0, layers, choices] of expert choices.

        Return None if the engine does not record them.
        """
        return None

    @abstractmethod
    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return the engine's weights, with their Hugging Face names."""

    @abstractmethod
    def _submit(self, samples: Mapping[int, Sample], sampling: SamplingParams) -> None:
        """Start these samples, by number; they are already checked."""

    @abstractmethod
    def _advance(self, budget: CollectBudget) -> dict[int, Sample]:
        """Generate until all samples are finished or the budget is spent.

        Return the finished samples. `version` may have changed since the last call; tokens sampled
        from now on have the new version.
        """

    @abstractmethod
    def _abort(self, numbers: Iterable[int]) -> dict[int, Sample]:
        """Drop these samples and return their current state.

        After an error, some may be missing.
        """

    @abstractmethod
    def _load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load every tensor, or raise one `WeightSyncError` that lists those that do not fit."""

    @abstractmethod
    def _free(self) -> None:
        """Free the engine's own weights."""

    @abstractmethod
    def _allocate(self) -> None:
        """Allocate the engine's own weights."""

    def finish_reason(self, sample: Sample, tokens: Sequence[int], sampling: SamplingParams) -> str:
        """Return why a response ends with its newest token; `UNFINISHED` if it does not end.

        The length limit is `sampling.max_tokens`, or the sample's own `end_at` if that is lower.
        """
        is_stop = tokens[-1] in sampling.stop_token_ids
        if is_stop or self.ends_with_stop_string(sample, tokens, sampling):
            return "stop"
        longest = sample.longest(sampling.max_tokens)
        return LENGTH_LIMIT if len(tokens) == longest else UNFINISHED

    def ends_with_stop_string(
        self, sample: Sample, tokens: Sequence[int], sampling: SamplingParams
    ) -> bool:
        """Return True if the newest token of a sample's response completes a stop string."""
        strings, decode = (*sampling.stop_strings, *sample.stop_strings), self.decode
        if not strings or decode is None or len(tokens) < sampling.min_tokens:
            return False
        # Enough tokens for the longest string: a character has at most four bytes, and so at most
        # four tokens.
        window = list(tokens[-(4 * max(map(len, strings)) + 4) :])
        after, before = decode(window), decode(window[:-1])
        return any(after.count(text) > before.count(text) for text in strings)

    def _check_sampling(self, sampling: SamplingParams) -> None:
        """Raise if the engine cannot sample with these settings."""
        if sampling.max_tokens > self.limits.response_width:
            raise RolloutError(
                f"rollout: max_tokens={sampling.max_tokens} does not fit the "
                f"{self.limits.response_width} response columns. Raise data.max_response_length."
            )
        if sampling.stop_strings and self.decode is None:
            raise ConfigError(
                "sampling: stop strings need the tokenizer, and this engine was built without one. "
                "Set actor_rollout_ref.rollout.sampling_kwargs.stop_strings, or pass the engine "
                "decode=tokenizer.decode."
            )
        if sampling.routed_experts and self.no_choices() is None:
            raise ConfigError(
                f"sampling: {type(self).__name__} does not record which experts its model chooses "
                "(actor_rollout_ref.actor.router_replay). Use "
                "actor_rollout_ref.rollout.name=native, hf, or vllm in process."
            )
        outside = [token for token, _ in sampling.logit_bias if not 0 <= token < self.vocab_size]
        if outside:
            raise ConfigError(
                f"sampling: logit_bias has token id {outside[0]}, outside the vocabulary of "
                f"{self.vocab_size} tokens. Remove it from the bias."
            )


def _check_sample(
    sample: Sample, sampling: SamplingParams, prompt_width: int, vocab_size: int
) -> None:
    """Raise if the sample's prompt, or its partial response, cannot be continued."""
    length = len(sample.prompt)
    if not 1 <= length <= prompt_width:
        remedy = "drop it from the data"
        if length:
            remedy = (
                "raise data.max_prompt_length, or set data.truncation=left|right or "
                "data.filter_overlong_prompts=true"
            )
        raise RolloutError(
            f"rollout: the prompt of {sample.name} has {length} tokens; 1 to "
            f"{prompt_width} fit: {remedy}."
        )
    _check_ids("prompt", sample.prompt, sample.name, vocab_size)
    if not len(sample.tokens):
        return
    if sampling.truncated_log_probs and sample.truncated_log_probs is None:
        raise RolloutError(
            f"rollout: {sample.name} was started with truncated_log_probs=false. Continue it with "
            "the same setting."
        )
    longest = sample.longest(sampling.max_tokens)
    if len(sample.tokens) >= longest or sample.finish_reason != UNFINISHED:
        raise RolloutError(
            f"rollout: {sample.name} cannot continue: it has {len(sample.tokens)} of at most "
            f"{longest} tokens, and the finish reason {sample.finish_reason!r}. Only a response "
            f"with finish reason {UNFINISHED!r} and fewer tokens can continue."
        )
    _check_ids("partial response", sample.tokens.tolist(), sample.name, vocab_size)


def _check_ids(part: str, ids: Sequence[int], name: str, vocab_size: int) -> None:
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        raise RolloutError(
            f"rollout: the {part} of {name} has token id {low if low < 0 else high}, outside the "
            f"vocabulary of {vocab_size} tokens. Check that the tokenizer matches "
            "actor_rollout_ref.model.path."
        )


def followed_by_ranks(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a role's method that generates, so that only an engine's first rank runs it.

    The engine's other ranks follow, and return None. An engine's only rank is its first.
    """

    @functools.wraps(method)
    def call(worker: Any, *args: Any, **kwargs: Any) -> Any:
        if worker.engine.is_follower:
            worker.engine.follow()
            return None
        with worker.engine.leading():
            return method(worker, *args, **kwargs)

    return call
