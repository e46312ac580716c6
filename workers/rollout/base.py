"""The interface of a rollout engine, and its data types: sampling, requests, outputs, limits.

The engines are `rollout.hf`, `rollout.native.engine` and `rollout.vllm.engine`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_like.errors import ConfigError, RolloutError, WeightSyncError
from workers.rollout.control import GenerationControl
from workers.weights.checksum import CopyCheck, Fingerprint, checksum_of
from workers.weights.module_writer import refuse_problems


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn: bias, minimum length, then temperature, top-k, top-p, min-p.

    A response that is unfinished after `max_new_tokens_per_call` tokens of this call is returned as
    an aborted one is.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    do_sample: bool = True
    max_tokens: int
    max_new_tokens_per_call: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    truncated_log_probs: bool = False

    def __post_init__(self) -> None:
        """Refuse values that draw nothing."""
        greedy = "for greedy decoding set do_sample=false"
        in_range = 0 <= self.min_tokens <= self.max_tokens
        per_call = self.max_new_tokens_per_call
        checks = (
            ("temperature", self.temperature > 0, f"above 0; {greedy}"),
            ("top_k", self.top_k >= 1 or self.top_k == -1, "1 or more, or -1 for all tokens"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("max_tokens", self.max_tokens >= 1, "1 or more"),
            ("max_new_tokens_per_call", per_call is None or per_call >= 1, "1 or more, or null"),
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

    def longest(self, num_made: int) -> int:
        """Tokens that a response may have after this call, `num_made` of which it had before."""
        if self.max_new_tokens_per_call is None:
            return self.max_tokens
        return min(self.max_tokens, num_made + self.max_new_tokens_per_call)

    @property
    def num_log_probs(self) -> int:
        """Log-probs per token: the policy's, and with `truncated_log_probs` those drawn from."""
        return 2 if self.truncated_log_probs else 1


@dataclass(frozen=True)
class Output:
    """A sample: token ids to the stop token and with it, their log-probs, the version of each.

    `finish_reason` is "stop", "length", or "abort" for a partial result, which a later `Request`
    can continue: of an aborted generation, or of a call that drew as much as it may.
    `truncated_log_probs` are those of the distribution that was drawn from, where the sampling asks
    for them.
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

    @property
    def num_made(self) -> int:
        """Tokens of the response that were made before."""
        return 0 if self.partial is None else len(self.partial.tokens)


@dataclass(frozen=True)
class EngineLimits:
    """What an engine is built for: widths of columns, how much it decodes and stores at once.

    With `keep_kv` weights that arrive within a generation leave its KV cache as it is. What an
    engine holds after a load is compared with what came at the first of every `read_back_every`
    loads.
    """

    prompt_width: int
    response_width: int
    max_num_seqs: int = 256
    kv_cache_gb: float = 4.0
    keep_kv: bool = False
    read_back_every: int = 1


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
    can_take_weights_in_flight: bool = False
    """Whether a generation goes on with weights that are loaded while it stands still."""
    num_bytes: int = 0
    hash_s: float = 0.0
    """What it cost to compare the weights of the last load with what the engine holds."""
    vocab_size: int

    def __init__(
        self, limits: EngineLimits, decode: Callable[[list[int]], str] | None = None
    ) -> None:
        """`decode` turns token ids into text; only stop strings need it."""
        self.limits = limits
        self.decode = decode
        self.control = GenerationControl()
        self._fingerprint = Fingerprint()
        self._came = CopyCheck()
        self._num_loads = 0

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Output]:
        """One output per request, in the order of the requests.

        Where weights are arriving it begins when they are there.
        """
        with self.control.running(len(requests)):
            self._check_ready()
            self._check_requests(requests, sampling)
            if not requests:
                return []
            outputs = self._generate(requests, sampling)
        log_probs = torch.cat([output.log_probs for output in outputs])
        if not bool(log_probs.isfinite().all()):
            self._refuse_broken(requests, outputs)
        return outputs

    def asked_to_stop(self) -> bool:
        """Between two steps of `_generate`: waits while it is to stand still; True ends it.

        The weights may be others afterwards; without verified ones no further token is drawn.
        """
        stop = self.control.checkpoint()
        if self.version is None and not stop:
            raise RolloutError(
                f"rollout: new weights came within a generation of {self.control.num_running} "
                "samples and were refused, so there are none to go on with; "
                "sync_weights(actor_group, rollout_group, version), then generate them again."
            )
        return stop

    def load_weights(
        self, tensors: Iterable[tuple[str, Tensor]], hashes: Mapping[str, int] | None = None
    ) -> None:
        """Overwrite every weight; names and shapes must be exactly the module's.

        Where the engine `reads_back`, what it then holds is compared with what came, whose hashes
        are taken on the way unless `hashes` has them by then. Leaves the engine stale.
        """
        if self.control.in_flight and not self.control.is_paused:
            raise WeightSyncError(
                f"engine: {self.control.num_running} samples are being generated; control.pause() "
                "them or control.abort() them first."
            )
        self.version = None
        self.wake_up()
        self._fingerprint, self._came = Fingerprint(), CopyCheck()
        self._load(self._noted(tensors, {} if hashes is None else hashes))
        damaged = self._damaged() if self.reads_back else []
        self.hash_s = self._came.watch.seconds
        self._num_loads += 1
        refuse_problems("engine", **{"held otherwise than they were sent": damaged})

    @property
    def reads_back(self) -> bool:
        """Whether the weights of this load are compared with what the engine then holds."""
        return self._num_loads % self.limits.read_back_every == 0

    def _noted(
        self, tensors: Iterable[tuple[str, Tensor]], hashes: Mapping[str, int]
    ) -> Iterable[tuple[str, Tensor]]:
        for name, tensor in tensors:
            if self.reads_back:
                self._came.note(name, tensor, hashes.get(name))
            self._fingerprint.note(name, tensor)
            yield name, tensor

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
        """`generate` on checked requests; asks `asked_to_stop()` between steps.

        After that the version may be another: later tokens are of it.
        """

    @abstractmethod
    def _load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write every tensor, or raise one `WeightSyncError` that lists what does not fit."""

    @abstractmethod
    def _free(self) -> None:
        """Drop the engine's own weights."""

    @abstractmethod
    def _allocate(self) -> None:
        """Make room for them again."""

    def _damaged(self) -> list[str]:
        """Names of the weights of this load that the engine does not hold as they came."""
        return self._came.damaged(self.named_weights())

    def _check_ready(self) -> None:
        if self.version is None or self.asleep:
            state = "has no verified weights (it is new, was asleep, or a sync failed)"
            if self.asleep:
                state = "is asleep"
            raise RolloutError(
                f"rollout: this engine {state}; sync_weights(actor_group, rollout_group, version) "
                "makes it ready."
            )

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
            if request.partial is not None:
                self._check_partial(request, request.partial, sampling)

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

        self._check_ids("prompt", request.prompt, request.name)

    def _check_partial(self, request: Request, partial: Output, sampling: SamplingParams) -> None:
        if sampling.truncated_log_probs and partial.truncated_log_probs is None:
            raise RolloutError(
                f"rollout: {request.name} was begun without truncated_log_probs; go on without."
            )
        if request.num_made >= sampling.max_tokens:
            raise RolloutError(
                f"rollout: {request.name} was begun with {request.num_made} tokens and may have "
                f"{sampling.max_tokens}: there is nothing to go on with. Only responses of finish "
                'reason "abort" are unfinished.'
            )
        if request.num_made:
            self._check_ids("partial response", partial.tokens.tolist(), request.name)

    def _check_ids(self, what: str, ids: Sequence[int], name: str) -> None:
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.vocab_size:
            raise RolloutError(
                f"rollout: the {what} of {name} has token id {low if low < 0 else high}, outside "
                f"the vocabulary of {self.vocab_size}; tokenizer and actor_rollout_ref.model.path "
                "do not fit."
            )
