"""Code inside vLLM's worker processes: our sampler, and loading weights layer by layer.

vLLM gets `WorkerExtension` as its `worker_extension_cls`, and the engine calls its methods through
`collective_rpc`. `NoiseSampler` replaces the sampler of the model runner. It samples as the native
engine does: with noise keyed by the sample, for all requests at once, and with log-probs before any
truncation. (vLLM's sampler has one generator per request, which is ten times slower, and log-probs
after truncation.) vLLM has two model runners, V1 and V2 (`VLLM_USE_V2_MODEL_RUNNER`), whose
samplers differ.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from verl_like.errors import ConfigError
from workers.parallel.offload import to_device
from workers.rollout.base import SamplingParams
from workers.rollout.sampling import sample_tokens, uniforms_of
from workers.rollout.vllm.handover import Arrivals, by_layer
from workers.rollout.vllm.setup import ADAPTER, model_identity
from workers.weights.connection import Connections

STEPS_BEHIND = 32
"""Steps whose log-probs stay pending during sampling, so that no step waits for its results."""


class NoiseSampler(nn.Module):
    """Replaces vLLM's sampler: a token's noise depends only on its sample's seed and position.

    The `extra_args` of a request are its row in the tables (`row`), its noise key (`key`), and the
    number of response tokens that it was submitted with (`made`).
    """

    def __init__(self, runner: Any, original: nn.Module) -> None:
        super().__init__()
        self.runner = runner
        self.original = original
        self.sampling: SamplingParams | None = None
        self.version = 0
        """Version of the current weights."""
        self.log_probs, self.versions = torch.zeros(0, 0, 0), torch.zeros(0, 0)
        self._arriving: list[_StepLogProbs] = []
        """Steps whose log-probs are not yet in the tables, oldest first."""
        self._batch_noise = _BatchNoise.of([], [], torch.device("cpu"))
        self._params: dict[int, Any] = {}
        """V2: vLLM's parameters of the requests, by their place in its state."""
        self.choices: ExpertChoices | None = None
        self.choice_dtype = torch.uint8

    def install(self) -> None:
        """Replace V1's sampler, or the draws of V2's sampler."""
        if hasattr(self.runner, "input_batch"):
            self.runner.sampler = self
            return
        sampler: Any = self.original
        self._add_request, self._sample = sampler.add_request, sampler.sample
        sampler.add_request, sampler.sample = self.add_request, self.sample

    def begin(self, sampling: SamplingParams, num_rows: int) -> None:
        """Prepare tables for `num_rows` requests; existing contents stay.

        An additional last column receives tokens that are sampled before vLLM knows that a request
        has ended.
        """
        self.write_pending()
        shape, before = (num_rows, sampling.max_tokens + 1), (self.log_probs, self.versions)
        self.log_probs = torch.zeros(*shape, sampling.num_log_probs)
        self.versions = torch.zeros(shape, dtype=torch.int32)
        for old, new in zip(before, (self.log_probs, self.versions), strict=True):
            if self.sampling is not None:
                new[: len(old)] = old
        self.sampling = sampling

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """V1: sample the next token of every row of the runner's batch.

        Outside our generations, use vLLM's sampler.
        """
        if self.sampling is None:
            return self.original(logits, sampling_metadata, *args, **kwargs)
        from vllm.v1.outputs import SamplerOutput

        batch, count = self.runner.input_batch, len(logits)
        names = batch.req_ids[:count]
        params = (self.runner.requests[name].sampling_params for name in names)
        num_sampled = batch.num_tokens_no_spec[:count] - batch.num_prompt_tokens[:count]
        tokens = self._draw(logits, names, params, num_sampled)
        return SamplerOutput(
            sampled_token_ids=tokens.to(torch.int32).unsqueeze(-1), logprobs_tensors=None
        )

    def add_request(self, index: int, params: Any) -> None:
        """V2: note the parameters of a new request, and pass them on."""
        self._params[index] = params
        self._add_request(index, params)

    def sample(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """V2: sample the next token of every request; return the logits, too.

        vLLM ignores the token of a request of which it has not read all tokens; so do the tables.
        """
        if self.sampling is None:
            sampled: tuple[Tensor, Tensor] = self._sample(logits, *args, **kwargs)
            return sampled
        _, _, indices, _, _, _, lengths, *_ = args
        states = self.runner.req_states
        names = [states.index_to_req_id[index] for index in indices.tolist()]
        params = (self._params[index] for index in indices.tolist())
        num_sampled = lengths[: len(names)] - states.prompt_len.np[indices]
        num_sampled[lengths[: len(names)] < states.prefill_len.np[indices]] = (
            self.sampling.max_tokens
        )
        return self._draw(logits, names, params, num_sampled), logits

    def _draw(
        self,
        logits: Tensor,
        names: list[str],
        params: Iterable[Any],
        num_sampled: NDArray[np.integer[Any]],
    ) -> Tensor:
        """Sample a token for every request, which has `num_sampled` tokens since its submission.

        Only the recording of expert choices waits for the results of this step; the device may be
        one step behind.
        """
        assert self.sampling is not None
        if names != self._batch_noise.names:
            self._batch_noise = _BatchNoise.of(names, params, logits.device)
        batch_noise = self._batch_noise
        steps = batch_noise.made_before + num_sampled
        positions = to_device(torch.from_numpy(steps), logits.device)
        noise = uniforms_of(batch_noise.keys, positions)
        compiles = logits.is_cuda and not self.runner.model_config.enforce_eager
        tokens, log_probs = sample_tokens(logits, noise, self.sampling, positions, fused=compiles)

        last = self.sampling.max_tokens
        self._arriving.append(
            _StepLogProbs(batch_noise.rows, steps.clip(0, last), self.version, *arriving(log_probs))
        )
        if len(self._arriving) == 2 * STEPS_BEHIND:
            self.write_pending(STEPS_BEHIND)
        if self.choices is not None:
            self.choices.end_pass(batch_noise.rows.tolist(), self.choice_dtype)
        return tokens

    def write_pending(self, num_steps: int | None = None) -> None:
        """Write pending steps into the tables: the first `num_steps`, or all."""
        settled = self._arriving[:num_steps]
        self._arriving = self._arriving[len(settled) :]
        if settled and settled[-1].has_come is not None:
            settled[-1].has_come.synchronize()
        for step in settled:
            self.log_probs[step.rows, step.steps] = step.log_probs
            self.versions[step.rows, step.steps] = step.version


@dataclass(frozen=True)
class _BatchNoise:
    """The table rows and noise keys of a pass's requests.

    They are reused as long as the next pass has the same requests.
    """

    names: list[str]
    rows: NDArray[np.int64]
    """The requests' rows in the tables."""
    made_before: NDArray[np.int64]
    keys: Tensor
    """The requests' noise keys on the device, as int64 with the same bits."""

    @classmethod
    def of(cls, names: list[str], params: Iterable[Any], device: torch.device) -> _BatchNoise:
        extra_args = [settings.extra_args for settings in params]
        rows = np.array([arguments["row"] for arguments in extra_args], dtype=np.int64)
        before = np.array([arguments["made"] for arguments in extra_args], dtype=np.int64)
        keys = np.array([arguments["key"] for arguments in extra_args], dtype=np.uint64).view(
            np.int64
        )
        return cls(names, rows, before, to_device(torch.from_numpy(keys), device))


@dataclass(frozen=True)
class _StepLogProbs:
    """One step's log-probs, their places in the tables, and the version of the weights."""

    rows: NDArray[np.int64]
    steps: NDArray[np.int64]
    version: int
    log_probs: Tensor
    has_come: torch.cuda.Event | None
    """The event after which the log-probs are in host memory; None on a CPU."""


def arriving(tensor: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Start a copy to host memory; it is complete once the returned event has occurred."""
    copy = tensor.to("cpu", non_blocking=True)
    if not tensor.is_cuda:
        return copy, None
    has_come = torch.cuda.Event()
    has_come.record()
    return copy, has_come


class WorkerExtension:
    """Mixin of vLLM's worker that receives weights, and samples tokens with `NoiseSampler`.

    Example:

        LLM("models/policy", worker_extension_cls="verl_like.extend.WorkerExtension")
    """

    model_runner: Any
    vllm_config: Any
    rank: int
    device: torch.device
    sampler: Any = None
    """Our `NoiseSampler`, once it is installed."""
    _links: Connections | None = None
    _loose: dict[str, Tensor]
    _arrivals: Arrivals
    _placed: frozenset[str] = frozenset()
    """Names of tensors for which vLLM's model is known to have a place."""
    _processed: set[nn.Module]
    """Layers whose weights this load has already processed for their kernels."""

    def over_http(self, method: str, arguments: str) -> str:
        """Call one of these methods for a client of the vLLM server.

        Arguments and result are JSON.
        """
        return json.dumps(getattr(self, method)(*json.loads(arguments)), default=_plain)

    def model_identity(self) -> dict[str, Any]:
        """Return values that a client of the vLLM server compares with its own configuration."""
        model = self.vllm_config.model_config
        return model_identity(model.hf_text_config) | {
            "dtype": str(model.dtype).removeprefix("torch."),
            "quantization": model.quantization,
            "async_scheduling": self.vllm_config.scheduler_config.async_scheduling,
            "max_model_len": model.max_model_len,
        }

    def install_sampler(self) -> list[str]:
        """Replace vLLM's sampler; return the class names of the layers' quantization methods."""
        if self.sampler is None:
            self.sampler = NoiseSampler(self.model_runner, self.model_runner.sampler)
            self.sampler.install()
            watch_processing(self.model_runner.model, self._process)
            restore_classes(self.model_runner.model)
        layers = self.model_runner.model.modules()
        methods = [getattr(layer, "quant_method", None) for layer in layers]
        return sorted({type(method).__name__ for method in methods if method is not None})

    def note_choices(self, dtype: str) -> None:
        """Record expert choices from now on, in this dtype."""
        sampler = self.sampler
        sampler.choices = ExpertChoices(self.model_runner)
        sampler.choice_dtype = getattr(torch, dtype)

    def choices_for(self, rows: list[int]) -> list[Tensor | None]:
        """Return the expert choices of these requests, which have ended."""
        return [self.sampler.choices.pop_row(row) for row in rows]

    def use_version(self, version: int) -> None:
        """Label tokens that are sampled from now on with this version."""
        self.sampler.version = version

    def begin_requests(self, sampling: dict[str, Any], num_rows: int) -> None:
        """Prepare the sampler for requests, with `num_rows` rows in the tables."""
        self.sampler.begin(SamplingParams(**sampling), num_rows)

    def sampled_for(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        """Return log-probs [rows, max tokens + 1, kinds] and versions [rows, max tokens + 1].

        The last column has no meaning (see `NoiseSampler.begin`).
        """
        sampler = self.sampler
        sampler.write_pending()
        return sampler.log_probs[rows], sampler.versions[rows]

    def end_requests(self) -> None:
        """Go back to vLLM's sampler after the last request."""
        self.sampler.sampling = None

    def save_loose_tensors(self) -> None:
        """Save tensors that loads may not restore, before a sleep of level 2 drops them."""
        loose = loose_tensors(self.model_runner.model)
        self._loose = {place: tensor.to("cpu", copy=True) for place, tensor in loose}

    def restore_loose_tensors(self) -> None:
        """Copy the saved tensors back after the sleep."""
        with torch.inference_mode():  # some buffers were created in inference mode
            for place, tensor in loose_tensors(self.model_runner.model):
                saved = self._loose.get(place)
                if saved is not None and saved.shape == tensor.shape:
                    tensor.copy_(saved)
        self._loose = {}

    def begin_load(self) -> None:
        """Start vLLM's reload, which undoes a layer's kernel layout once its weights arrive."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._arrivals, self._processed = Arrivals(), set()
        _forget_expert_kernels(self.model_runner.model)
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.model)

    def load_tensors(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Load some of the weights, with names as in a checkpoint; do not change them afterwards.

        The first time, tensors are loaded one by one, to find those without a place. Later they are
        loaded together, because vLLM searches all its parameters in each call.
        """
        are_placed = len(tensors) > 1 and self._placed.issuperset(name for name, _ in tensors)
        if are_placed and self._why_not_placed(tensors) is None:
            return
        for name, tensor in tensors:
            why_not = self._why_not_placed([(name, tensor)])
            if why_not is None:
                self._placed |= {name}
            else:
                self._arrivals.unplaced[name] = why_not

    def load_adapter(self, folder: str) -> None:
        """Load the LoRA adapter in this folder, which replaces the previous one."""
        from vllm.lora.request import LoRARequest

        worker: Any = self  # vLLM mixes this class into its worker
        worker.add_lora(LoRARequest(ADAPTER, 1, folder, load_inplace=True))

    def receive_load(self, address: str, num_ranks: int) -> None:
        """Load the weights that a client of the vLLM server sends to all its `num_ranks` ranks."""
        self._links = self._links or Connections()
        place = self.rank + 1
        with self._links.receiving(address, place, num_ranks, self.device, "vllm") as channel:
            for layer in by_layer(channel.receive()):
                self.load_tensors(layer)
        self._arrivals.changed += channel.corrupt

    def _why_not_placed(self, tensors: Sequence[tuple[str, Tensor]]) -> str | None:
        """Load tensors; return None, or vLLM's message if its model has no place for them."""
        with self._loading():
            try:
                filled = self.model_runner.model.load_weights(tensors)
            except (KeyError, ValueError) as error:
                return f" ({type(error).__name__}: {error})"
        return None if filled is None or filled else ""

    def finish_load(self) -> Arrivals:
        """Restore the kernels' layout; return the tensors without a place and the damaged ones."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.model_runner.model
        with self._loading():
            finalize_layerwise_reload(model, self.model_runner.model_config)
            self._process_tied(model)
        return self._arrivals

    @contextmanager
    def _loading(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            yield

    def _process(self, process: Callable[[nn.Module], None], layer: nn.Module) -> None:
        """Process a layer's weights for its kernel, and record the layer."""
        process(layer)
        self._processed.add(layer)

    def _process_tied(self, model: nn.Module) -> None:
        """Pack the weight of a head that is tied to the embedding again, on CPUs.

        The tensor arrives only under the embedding's name. vLLM takes the head for a layer without
        new weights, which would continue to use its previous packed weight.
        """
        for layer in model.modules():
            packed: Any = layer
            packs = hasattr(layer, "cpu_linear") and layer not in self._processed
            if packs and packed.weight.dim() == 2:
                method: Any = packed.quant_method
                method.process_weights_after_loading(layer)


def loose_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield buffers, and tensors that are plain attributes of layers.

    Loads may not restore them, and during a sleep vLLM preserves only buffers
    (vllm-project/vllm#29341).
    """
    for path, layer in model.named_modules():
        tensors = {**dict(layer.named_buffers(recurse=False)), **vars(layer)}
        for name, value in tensors.items():
            if isinstance(value, Tensor) and name != "kv_cache":
                yield f"{path}.{name}", value.detach()


def restore_classes(model: nn.Module) -> None:
    """Undo vLLM's changes of a class of transformers, and give its own model a changed subclass.

    vLLM runs classes that it does not have by the code of transformers, and makes the class itself
    compile its calls. The trainer's model in the same process has this class, too.
    """
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper as Compiled

    for part in model.modules():
        cls: Any = type(part)
        if cls.__module__.startswith("transformers.") and Compiled in cls.__bases__:
            changes = {"__call__": cls.__call__, "__module__": cls.__module__}
            cls.__init__ = inspect.getclosurevars(cls.__init__).nonlocals["old_init"]
            del cls.__call__
            cls.__bases__ = tuple(base for base in cls.__bases__ if base is not Compiled)
            part.__class__ = type(cls.__name__, (cls, Compiled), changes)


def _plain(value: Any) -> Any:
    """Convert a tensor or a report for JSON."""
    return value.tolist() if isinstance(value, Tensor) else asdict(value)


def watch_processing(
    model: nn.Module, process: Callable[[Callable[[nn.Module], None], nn.Module], None]
) -> None:
    """Make a model's layers process loaded weights by `process(original method, layer)`."""
    methods: list[Any] = [getattr(layer, "quant_method", None) for layer in model.modules()]
    for method in {id(method): method for method in methods}.values():
        if hasattr(method, "process_weights_after_loading"):
            original = method.process_weights_after_loading
            method.process_weights_after_loading = partial(process, original)


def _forget_expert_kernels(model: nn.Module) -> None:
    """Drop the experts' CPU kernels, so that they are built again from the new weights.

    On CPUs, vLLM packs the experts' weights when it builds their kernel. It would keep the kernel
    through a reload, and the new weights would stay unpacked. On CUDA, nothing is packed, and CUDA
    graphs refer to the kernel, so it stays.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        weight = next(module.parameters(recurse=False), None)
        if weight is not None and weight.device.type == "cpu" and hasattr(method, "moe_kernel"):
            method.moe_kernel = None


class ExpertChoices:
    """Records the experts that routers choose for every token of the running requests.

    During a pass they are recorded by layer, and at its end by the request's row in the tables.
    vLLM's own feature (`enable_return_routed_experts`) needs V2, this one V1.
    """

    def __init__(self, runner: Any) -> None:
        """Set the callback of all routers; raise a `ConfigError` if a layer does not support it."""
        from vllm.model_executor.layers.fused_moe.layer import MoERunner
        from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

        if not hasattr(runner, "input_batch"):
            raise ConfigError(
                "rollout: the choices of experts are recorded only with vLLM's first model runner. "
                "Leave out VLLM_USE_V2_MODEL_RUNNER or actor_rollout_ref.actor.router_replay."
            )
        self.runner = runner
        self._pass: dict[int, Tensor] = {}
        self._experts_of_row: dict[int, Tensor] = {}
        layers = [part for part in runner.model.modules() if isinstance(part, MoERunner)]
        for number, layer in enumerate(layers):
            if layer._quant_method.is_monolithic or not isinstance(layer.router, BaseRouter):
                raise ConfigError(
                    "rollout: vLLM's choices of experts cannot be recorded with "
                    f"{type(layer._quant_method).__name__} and {type(layer.router).__name__}. "
                    "Leave out actor_rollout_ref.actor.router_replay, or set "
                    "actor_rollout_ref.rollout.name=native."
                )
            layer.router.set_capture_fn(partial(self._note, number))

    def _note(self, layer: int, chosen: Tensor) -> None:
        self._pass[layer] = chosen

    def end_pass(self, rows: Sequence[int], dtype: torch.dtype) -> None:
        """Store the choices of a pass by request; `rows` has the requests in the runner's order."""
        batch, width = self.runner.input_batch, self.runner.max_model_len
        chosen = torch.stack([self._pass[layer] for layer in sorted(self._pass)], dim=1)
        chosen = chosen.to(dtype).cpu()
        bounds = self.runner.query_start_loc.np[: len(rows) + 1].tolist()
        for place, row in enumerate(rows):
            begin, end = bounds[place : place + 2]
            first = int(batch.num_computed_tokens_cpu[place])
            if row not in self._experts_of_row:
                self._experts_of_row[row] = chosen.new_zeros(width, *chosen.shape[1:])
            self._experts_of_row[row][first : first + end - begin] = chosen[begin:end]

    def pop_row(self, row: int) -> Tensor | None:
        """Remove and return the choices [max model length, layers, choices] of an ended request.

        They are zero for tokens that the model did not read. Return None if it read no token.
        """
        return self._experts_of_row.pop(row, None)
