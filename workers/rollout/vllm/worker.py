"""What runs inside vLLM's worker processes: loading weights by layers, and our choice of tokens.

vLLM gets `WorkerExtension` as its `worker_extension_cls`, and the engine calls its methods by
`collective_rpc`. The sampler of the model runner is replaced by `Sampler`, so that tokens are drawn
as the native engine draws them: by a noise keyed by the sample, vectorised over the batch, with
log-probs at the temperature and before any truncation. (vLLM's own has a generator per request,
which is ten times slower, and log-probs after truncation.)
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workers.rollout.base import SamplingParams
from workers.rollout.sampling import choose_tokens, uniforms
from workers.rollout.vllm.handover import Arrivals
from workers.rollout.vllm.read_back import ReadBack
from workers.weights.channel import Bucket
from workers.weights.checksum import hashes_of


class Sampler(nn.Module):
    """Stands in for vLLM's sampler.

    `extra_args` of a request hold its row in the table of log-probs, its noise key and its number
    of tokens made before.
    """

    def __init__(self, runner: Any, original: nn.Module) -> None:
        super().__init__()
        self.runner = runner
        self.original = original
        self.sampling: SamplingParams | None = None
        self.log_probs = torch.zeros(0, 0, 0)

    def begin(self, sampling: SamplingParams, num_rows: int) -> None:
        """Room for the log-probs of so many requests at once; what is there stays."""
        shape = (num_rows, sampling.max_tokens, sampling.num_log_probs)
        old, self.log_probs = self.log_probs, torch.zeros(shape)
        if old.shape[1:] == shape[1:]:
            self.log_probs[: len(old)] = old[:num_rows]
        self.sampling = sampling

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """The next token of every row of the runner's batch; outside our generations vLLM's own."""
        if self.sampling is None:
            return self.original(logits, sampling_metadata, *args, **kwargs)
        from vllm.v1.outputs import SamplerOutput

        batch = self.runner.input_batch
        count = len(logits)
        facts = [
            self.runner.requests[name].sampling_params.extra_args for name in batch.req_ids[:count]
        ]
        made = batch.num_tokens_no_spec[:count] - batch.num_prompt_tokens[:count]
        made_before = np.array([fact["made"] for fact in facts], dtype=np.int64)
        positions = made.astype(np.int64) + made_before
        keys = np.array([fact["key"] for fact in facts], dtype=np.uint64)
        noise = torch.from_numpy(uniforms(keys, positions)).to(logits.device)
        steps = torch.from_numpy(positions)
        tokens, log_probs = choose_tokens(logits, noise, self.sampling, steps)
        self.log_probs[[fact["row"] for fact in facts], steps] = log_probs.cpu()
        return SamplerOutput(
            sampled_token_ids=tokens.to(torch.int32).unsqueeze(-1), logprobs_tensors=None
        )


class WorkerExtension:
    """Mixed into vLLM's worker: needs `model_runner`, `vllm_config` and `rank`."""

    model_runner: Any
    vllm_config: Any
    rank: int
    _arrivals: Arrivals
    _read_back: ReadBack | None = None
    _processed: set[nn.Module]
    """Layers whose weights are what their kernels take, since this load began."""

    def install_sampler(self) -> list[str]:
        """Replace the sampler; returns the classes of the layers' methods: which quantization."""
        if not isinstance(self.model_runner.sampler, Sampler):
            self.model_runner.sampler = Sampler(self.model_runner, self.model_runner.sampler)
            watch_processing(self.model_runner.model, self._process)
        methods = set()
        for module in self.model_runner.model.modules():
            method = getattr(module, "quant_method", None)
            if method is not None:
                methods.add(type(method).__name__)
        return sorted(methods)

    def begin_requests(self, sampling: SamplingParams, num_rows: int) -> None:
        """Before requests are added: the table of log-probs has so many rows from here on."""
        self.model_runner.sampler.begin(sampling, num_rows)

    def log_probs_of(self, rows: list[int]) -> Tensor:
        """The log-probs [rows, max tokens, kinds] of what was drawn for these rows of the table."""
        log_probs: Tensor = self.model_runner.sampler.log_probs[rows]
        return log_probs

    def end_requests(self) -> None:
        """Nothing runs."""
        self.model_runner.sampler.sampling = None

    def begin_load(self, reads_back: bool) -> None:
        """Take the kernels' own layout back to the checkpoint's, by layers, as weights arrive."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._arrivals, self._processed = Arrivals(), set()
        self._read_back = ReadBack() if reads_back else None
        _forget_expert_kernels(self.model_runner.model)
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.model)

    def load_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Some of the weights, as a checkpoint has them."""
        for name, tensor in tensors:
            own = tensor.detach().clone()  # held back by the loader until its layer is complete
            if self._read_back is not None:
                self._read_back.expect(name, own)
            why_not = self._load_tensor(name, own)
            if why_not is not None:
                self._arrivals.unplaced[name] = why_not

    def load_shared(self, handles: list[bytes]) -> None:
        """Some of the weights, in memory that the process of the engine shares with every rank."""
        bucket: Bucket = pickle.loads(handles[self.rank])
        found = hashes_of(bucket.pieces())
        for (name, *_, sent), value in zip(bucket.facts, found, strict=True):
            if value != sent:
                self._arrivals.changed.append(name)
        self.load_tensors(bucket.tensors())
        if bucket.payload.is_cuda:
            # the engine fills this memory anew as soon as every rank has answered
            torch.cuda.synchronize(bucket.payload.device)

    def _load_tensor(self, name: str, tensor: Tensor) -> str | None:
        """Why vLLM's model has no place for it, in its words; None where it took it."""
        with self._loading():
            try:
                filled = self.model_runner.model.load_weights([(name, tensor)])
            except (KeyError, ValueError) as error:
                return f" ({type(error).__name__}: {error})"
        return None if filled is None or filled else ""

    def finish_load(self) -> Arrivals:
        """Back to the kernels' layout; returns what this rank then holds."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.model_runner.model
        with self._loading():
            finalize_layerwise_reload(model, self.model_runner.model_config)
            self._process_tied(model)
        if self._read_back is not None:
            with torch.no_grad():
                self._arrivals.held = self._read_back.held(model)
        return self._arrivals

    @contextmanager
    def _loading(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        with (
            set_current_vllm_config(self.vllm_config),
            torch.no_grad(),
            self._read_back or nullcontext(),
        ):
            yield

    def _process(self, process: Callable[[nn.Module], None], layer: nn.Module) -> None:
        """Have a layer make of its weights what its kernel takes."""
        with nullcontext() if self._read_back is None else self._read_back.processing(layer):
            process(layer)
        self._processed.add(layer)

    def _process_tied(self, model: nn.Module) -> None:
        """Have layers pack their weight that this load has filled by its other name alone.

        On CPUs a head that is tied to the embedding would compute with what was packed before: vLLM
        takes it for a layer without new weights.
        """
        for layer in model.modules():
            packs = hasattr(layer, "cpu_linear") and layer not in self._processed
            if packs and layer.weight.dim() == 2:
                method: Any = layer.quant_method
                method.process_weights_after_loading(layer)


def watch_processing(
    model: nn.Module, process: Callable[[Callable[[nn.Module], None], nn.Module], None]
) -> None:
    """Have a loaded model's layers pack or quantise their weights by `process(own way, layer)`."""
    methods: dict[int, Any] = {}
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if hasattr(method, "process_weights_after_loading"):
            methods[id(method)] = method
    for method in methods.values():
        own = method.process_weights_after_loading
        method.process_weights_after_loading = partial(process, own)


def _forget_expert_kernels(model: nn.Module) -> None:
    """Have experts' kernels on CPUs built anew from the weights that are about to arrive.

    vLLM packs the experts' weights when it builds their kernel, and keeps that over a reload, which
    would leave weights that are not packed. On CUDA nothing is packed, and graphs hold the kernel.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        weight = next(module.parameters(recurse=False), None)
        if weight is not None and weight.device.type == "cpu" and hasattr(method, "moe_kernel"):
            method.moe_kernel = None
