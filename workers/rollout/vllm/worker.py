"""What runs inside vLLM's worker processes: loading weights by layers, and our choice of tokens.

vLLM gets `WorkerExtension` as its `worker_extension_cls`, and the engine calls its methods by
`collective_rpc`. The sampler of the model runner is replaced by `Sampler`, so that tokens are drawn
as the native engine draws them: by a noise keyed by the sample, vectorised over the batch, with
log-probs at the temperature and before any truncation. (vLLM's own has a generator per request,
which is ten times slower, and log-probs after truncation.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workers.rollout.base import SamplingParams
from workers.rollout.sampling import choose_tokens, uniforms
from workers.rollout.vllm.handover import Arrivals, hash_in_float32
from workers.rollout.vllm.packed import PackedWeights, watch_packing
from workers.rollout.vllm.read_back import WrittenPieces


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
    """Mixed into vLLM's worker: needs `model_runner` and `vllm_config`."""

    model_runner: Any
    vllm_config: Any
    _arrivals: Arrivals
    _written: WrittenPieces
    _packed: PackedWeights

    def install_sampler(self) -> list[str]:
        """Replace the sampler; returns the classes of the layers' methods: which quantization."""
        if not isinstance(self.model_runner.sampler, Sampler):
            self.model_runner.sampler = Sampler(self.model_runner, self.model_runner.sampler)
            watch_packing(self.model_runner.model, lambda layer: self._packed.packing(layer))
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

    def begin_load(self) -> None:
        """Take the kernels' own layout back to the checkpoint's, by layers, as weights arrive."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._arrivals, self._written = Arrivals({}), WrittenPieces()
        self._packed = PackedWeights(self._written)
        _forget_expert_kernels(self.model_runner.model)
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.model)

    def load_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Some of the weights, as a checkpoint has them."""
        for name, tensor in tensors:
            own = tensor.detach().clone()  # held back by the loader until its layer is complete
            self._arrivals.hashes[name] = hash_in_float32(own)
            self._written.expect(name, own)
            why_not = self._load_tensor(name, own)
            if why_not is not None:
                self._arrivals.unplaced[name] = why_not

    def _load_tensor(self, name: str, tensor: Tensor) -> str | None:
        """Why vLLM's model has no place for it, in its words; None where it took it."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), torch.no_grad(), self._written:
            try:
                filled = self.model_runner.model.load_weights([(name, tensor)])
            except (KeyError, ValueError) as error:
                return f" ({type(error).__name__}: {error})"
        return None if filled is None or filled else ""

    def load_file(self, path: str) -> None:
        """Some of the weights, from a safetensors file that every rank can read."""
        from safetensors.torch import load_file

        self.load_tensors(load_file(Path(path)).items())

    def finish_load(self) -> Arrivals:
        """Back to the kernels' layout; returns what this rank was given, and what it then holds."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.model_runner.model
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            with self._written:
                finalize_layerwise_reload(model, self.model_runner.model_config)
                self._packed.pack_tied(model)
            held = self._written.read_back(model) + self._packed.read_back(model)
            return replace(self._arrivals, held=held)


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
