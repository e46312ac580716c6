"""vLLM in the role's process, or with tensor parallelism in all processes of the engine.

Each of these ranks has its shard of the model on its device. vLLM starts no processes (its
`external_launcher`). Every rank has its own scheduler, and all schedulers must do the same. The
first rank leads: it announces every call that affects its scheduler to the other ranks. They follow
until the role's call ends:

    with engine.leading():                  # on the first rank, in a role's call
        engine.submit(samples, sampling)    # announces the requests to add ...
        engine.collect()                    # ... and each step
    engine.follow()                         # on the other ranks, in the same call

Weights need no announcement, because every rank receives its own weights at the same time.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from verl_like.errors import ConfigError, RolloutError
from verl_like.process.info import environment
from workers.images import ImageRef, open_image
from workers.models.causal_lm import MODEL_ERRORS
from workers.models.images import image_reader
from workers.rollout.base import CollectBudget, EngineLimits
from workers.rollout.vllm.handover import Arrivals, by_layer
from workers.rollout.vllm.setup import (
    ADAPTER,
    EXTENSION,
    VllmRequest,
    VllmSettings,
    check_version,
    class_options,
    graph_options,
    merge_hint,
    process_environment,
)

if TYPE_CHECKING:
    from verl_like.process.worker import Worker


LONGEST = timedelta(days=1)
"""Time that ranks wait for the first rank, whose environments have their own time limits."""


class Lockstep:
    """The communication between the ranks of one engine."""

    def __init__(self, worker: Worker, size: int) -> None:
        """Group `size` consecutive ranks into an engine; every rank must call this."""
        lines = [[*range(first, first + size)] for first in range(0, worker.world_size, size)]
        group, _ = dist.new_subgroups_by_enumeration(lines, timeout=LONGEST, backend="gloo")
        self.size, self._group = size, group
        self._first = worker.rank - worker.rank % size
        self.leads = worker.rank == self._first
        self._rank, self._device = worker.rank, worker.device.index or 0
        self._name = self._broadcast(uuid.uuid4().hex)

    @property
    def executor(self) -> type:
        """vLLM's executor for ranks that another program has launched."""
        from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

        # vLLM's CPU worker names its shared memory by the text after the last colon; nothing else
        # reads this init method, because the process group is already open
        method = f"env://:{self._name}"

        class Launched(ExecutorWithExternalLauncher):  # type: ignore[misc]
            def _distributed_args(self) -> tuple[str, int, int]:
                return (method, *super()._distributed_args()[1:])

        return Launched

    def launched(self) -> AbstractContextManager[None]:
        """Context with the environment variables of vLLM's launcher."""
        return environment({"RANK": str(self._rank), "LOCAL_RANK": str(self._device)})

    def tell(self, method: str, args: tuple[Any, ...]) -> None:
        """Make the other ranks call this method of their vLLM."""
        self._broadcast((method, args))

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Context of a call on the first rank; at its end, the other ranks stop following."""
        try:
            yield
        finally:
            self._broadcast(None)

    def follow(self, vllm: Any) -> None:
        """Repeat the first rank's calls until its role's call ends.

        Then raise the first error, if there was one.
        """
        failure: Exception | None = None
        while (received := self._broadcast(None)) is not None:
            method, args = received
            try:
                getattr(vllm, method)(*args)
            except Exception as error:  # noqa: BLE001 - raised at the end of the call
                failure = failure or error
        if failure is not None:
            raise failure

    def gathered(self, local: Any) -> list[Any]:
        """Return the objects of all ranks; every rank must call this."""
        objects: list[Any] = [None] * self.size
        dist.all_gather_object(objects, local, group=self._group)
        return objects

    def _broadcast(self, local: Any) -> Any:
        """Return the first rank's object; every rank must call this."""
        objects = [local]
        dist.broadcast_object_list(objects, src=self._first, group=self._group)
        return objects[0]


def on_all_ranks(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method that affects vLLM's scheduler; all ranks repeat the first rank's calls."""

    @functools.wraps(method)
    def call(vllm: Any, *args: Any) -> Any:
        if vllm.lockstep is not None and vllm.lockstep.leads:
            vllm.lockstep.tell(method.__name__, args)
        return method(vllm, *args)

    return call


_opened = lru_cache(maxsize=8)(open_image)
"""The samples of a prompt arrive one after the other."""


class InProcessVllm:
    """A vLLM in this process, with our `WorkerExtension` in its workers."""

    def __init__(
        self, settings: VllmSettings, limits: EngineLimits, lockstep: Lockstep | None
    ) -> None:
        self.settings, self.limits, self.lockstep = settings, limits, lockstep
        self.llm = self.start()
        if settings.reads_images:
            self._share_image_processor()
        self._lacks_cache = False
        """True while the KV cache is not allocated, because syncing weights needs the memory."""

    def start(self) -> Any:
        """Build vLLM's engine."""
        settings, limits = self.settings, self.limits
        check_version(settings.device_type)
        options: dict[str, Any] = {"async_scheduling": False}
        if settings.device_type == "cuda":
            options = {
                "gpu_memory_utilization": settings.gpu_memory_utilization,
                "enable_sleep_mode": True,
                "disable_custom_all_reduce": True,
                "async_scheduling": not settings.notes_routing,
                **graph_options(limits.max_num_seqs, settings.options),
            }
        launched: AbstractContextManager[None] = nullcontext()
        num_ranks = 1
        if self.lockstep is not None:
            launched, num_ranks = self.lockstep.launched(), self.lockstep.size
            options["async_scheduling"] = False
            options["distributed_executor_backend"] = "external_launcher"
            if settings.device_type == "cpu":
                options["distributed_executor_backend"] = self.lockstep.executor
        if settings.adapter is not None:
            options |= lora_options(settings.adapter.lora_rank)
        options |= class_options(settings) | settings.options
        is_multimodal = "language_model_only" in options or settings.reads_images
        if self.lockstep is not None and options["async_scheduling"]:
            raise ConfigError(
                "actor_rollout_ref.rollout.engine_kwargs.async_scheduling with "
                f"tensor_model_parallel_size={num_ranks}: vLLM's schedule then depends on the "
                "timing of each rank, but all ranks must have the same schedule. Leave out "
                "async_scheduling."
            )
        try:
            environment = process_environment(settings.device_type, limits.kv_cache_gib, num_ranks)
            with environment, launched:
                from vllm import LLM

                return LLM(
                    model=settings.model_path,
                    load_format="dummy" if settings.adapter is None else "auto",
                    skip_tokenizer_init=not is_multimodal,
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
        except (*MODEL_ERRORS, OSError) as error:
            num_tokens = limits.prompt_width + limits.response_width
            memory = f"kv_cache_gib={limits.kv_cache_gib:g}"
            if settings.device_type == "cuda":
                memory = f"gpu_memory_utilization={settings.gpu_memory_utilization:g}"
            raise RolloutError(
                f"rollout: vLLM cannot start for {settings.model_path}: "
                f"{' '.join(str(error).split())[:500]} (actor_rollout_ref.rollout.{memory}, "
                f"{num_tokens} tokens per sample).{merge_hint(settings)}"
            ) from error

    def _share_image_processor(self) -> None:
        """Let vLLM compute the pixels that the trainer computes, by the same image processor."""
        processor = self.llm.llm_engine.renderer.get_mm_processor().info.get_hf_processor()
        ours = image_reader(self.settings.model_path).processor
        processor.image_processor = ours.image_processor

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `WorkerExtension` in every worker of this process."""
        results: list[Any] = self.llm.collective_rpc(method, args=args)
        return results

    @on_all_ranks
    def begin(
        self, sampling: dict[str, Any], num_rows: int, requests: Sequence[VllmRequest]
    ) -> None:
        """Add requests; the table of log-probs then has `num_rows` rows."""
        self.call("begin_requests", sampling, num_rows)
        for request in requests:
            self.add(request)

    def add(self, request: VllmRequest) -> None:
        """Add one request to this process's scheduler."""
        from vllm import SamplingParams as VllmParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        params = VllmParams(**request.params, output_kind=RequestOutputKind.DELTA)
        prompt = {"prompt_token_ids": request.token_ids, "cache_salt": request.cache_salt}
        prompt |= self._image_prompt(request)
        has_adapter = self.settings.adapter is not None
        adapter = LoRARequest(ADAPTER, 1, "loaded by syncs") if has_adapter else None
        engine = self.llm.llm_engine
        name = engine.add_request(str(request.number), prompt, params, lora_request=adapter)
        read = engine.output_processor.request_states[name].prompt_token_ids
        if request.images and read != request.token_ids:
            engine.abort_request([str(request.number)])
            raise RolloutError(
                f"rollout: vLLM reads {len(read)} tokens for the prompt of {request.name}, which "
                f"has {len(request.token_ids)}: its processor expands the {len(request.images)} "
                "images to other tokens. Set actor_rollout_ref.rollout.name=hf."
            )

    def _image_prompt(self, request: VllmRequest) -> dict[str, Any]:
        """Return the parts of a prompt with images: vLLM itself expands one token per image."""
        if not request.images:
            return {}
        refs = [ImageRef(*ref) for ref in request.images]
        try:
            images = [_opened(ref) for ref in refs]
            ids = image_reader(self.settings.model_path).collapsed(request.token_ids, refs)
        except ValueError as error:
            problem = str(error).rstrip(".")
            raise RolloutError(f"rollout: the prompt of {request.name}: {problem}.") from error
        return {
            "prompt_token_ids": ids,
            "multi_modal_data": {"image": images},
            "multi_modal_uuids": {"image": [ref.sha for ref in refs]},
        }

    def step(self, budget: CollectBudget) -> Iterator[tuple[int, Sequence[int]]]:
        """Run one decode step; yield the new tokens of requests, by number."""
        for output in self._step():
            yield int(output.request_id), output.outputs[0].token_ids

    @on_all_ranks
    def _step(self) -> list[Any]:
        outputs: list[Any] = self.llm.llm_engine.step()
        return outputs

    @on_all_ranks
    def stop(self, numbers: Sequence[int]) -> None:
        """Drop these requests."""
        self.llm.llm_engine.abort_request([str(number) for number in numbers])

    @on_all_ranks
    def choices(self, rows: list[int]) -> list[Tensor]:
        """Return the experts that were chosen for these requests, which have ended."""
        chosen: list[Tensor] = self.call("choices_for", rows)[0]
        return chosen

    @on_all_ranks
    def end(self) -> None:
        """Tell the workers that there are no more requests."""
        self.call("end_requests")

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> list[Arrivals]:
        """Send these tensors to the workers; return each worker's report."""
        self.call("begin_load")
        try:
            for layer in by_layer(tensors):
                self.call("load_tensors", layer)
        finally:
            arrivals: list[Arrivals] = self.call("finish_load")
            if self.lockstep is not None:
                arrivals = self.lockstep.gathered(arrivals[0])
        return arrivals

    def load_adapter(self, folder: str) -> None:
        """Load the adapter in this folder, for running and later requests."""
        try:
            self.call("load_adapter", folder)
        except ValueError as error:
            raise RolloutError(
                f"rollout: vLLM rejects the adapter: {error}.{merge_hint(self.settings)}"
            ) from error

    def close(self) -> None:
        """Shut vLLM down, which also reverts its `gc.freeze`."""
        self.llm.llm_engine.engine_core.shutdown()

    def resume(self) -> None:
        """Do nothing, because nothing was paused."""

    def drop_prefixes(self, of_running: bool) -> bool:
        """Drop cached keys and values, and features of images; return True if vLLM succeeded."""
        if self.settings.reads_images:
            self.llm.llm_engine.reset_encoder_cache()
        return bool(self.llm.llm_engine.reset_prefix_cache(reset_running_requests=of_running))

    def sleep(self) -> None:
        """Free the memory of a GPU. Level 2 drops the weights; level 1 copies them to the host.

        With an adapter, the base model needs level 1, because syncs never send it. On a CPU, do
        nothing.
        """
        if self.settings.device_type == "cuda":
            self.wake_cache()  # vLLM's `sleep` does nothing if the cache is asleep
            self.call("save_loose_tensors")
            self.llm.sleep(level=2 if self.settings.adapter is None else 1)

    def wake_weights(self) -> None:
        """Allocate a GPU's weights, not the cache: the trainer needs memory to gather its own."""
        if self.settings.device_type == "cuda":
            torch.cuda.empty_cache()  # vLLM allocates outside torch's cache
            self.llm.wake_up(tags=["weights"])
            self._lacks_cache = True
            self.call("restore_loose_tensors")

    def wake_cache(self) -> None:
        """Allocate the KV cache, if it is asleep."""
        if self._lacks_cache:
            torch.cuda.empty_cache()  # frees the memory in which weights were gathered
            self.llm.wake_up(tags=["kv_cache"])
            self._lacks_cache = False


def lora_options(rank: int) -> dict[str, Any]:
    """Return vLLM's options for one adapter of this LoRA rank."""
    from vllm.config.lora import MaxLoRARanks

    slots = [slot for slot in get_args(MaxLoRARanks) if slot >= rank]
    if not slots:
        raise ConfigError(
            f"actor_rollout_ref.model.lora_rank={rank}: vLLM's largest adapter has rank "
            f"{max(get_args(MaxLoRARanks))}. Set a smaller rank, or "
            "actor_rollout_ref.rollout.merge_lora=true."
        )
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": min(slots)}
