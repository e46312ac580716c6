"""The one training engine: a Hugging Face causal LM, sharded by FSDP2, that scores rows and takes optimizer steps.

Every role that has a model (actor, critic, reference) owns one `TrainEngine` and adds what is its own: a loss.

    engine = TrainEngine(model_config, fsdp_config, head="token", optim_config=optim, grad_clip=1.0)
    engine.build(worker, total_steps)                               # opens the process group, loads, shards
    columns = engine.forward_rows(data, micro_batch_size=8)         # {"log_probs": [rows, R]}
    metrics = engine.update(data, names, mini_batch_size=64, micro_batch_size=8, epochs=1, loss_fn=loss_fn)

The loss function gets what the model says about a micro-batch, its columns, and the counts of the whole mini-batch. It
returns its share of the loss and of every metric: shares are added over micro-batches and ranks. So neither the cut
nor the number of ranks changes a result beyond float rounding.

The device mesh has named axes: "replicate" and "shard". On a mesh of one rank the module stays a plain one (sharding
over one rank changes no bit), so that an engine in the same process can read its weights by reference.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from verl_like.errors import ConfigError
from verl_like.tensor_ops import logprobs_and_entropy_from_logits, logprobs_from_logits
from workers.engines.lora import add_adapter, merged_tensors
from workers.engines.model import Head, load_model, model_inputs
from workers.engines.optim import Schedule, build_optimizer, guarded_step
from workers.engines.skips import SkippedSteps
from workers.microbatch import (
    Columns,
    MiniBatch,
    Rows,
    all_reduce,
    common_passes,
    count_mini_batches,
    micro_batches,
    mini_batch,
)
from workers.weights import checksum_of

if TYPE_CHECKING:
    from verl_like.protocol import DataProto
    from verl_like.worker import Worker
    from workers.config import FSDPConfig, ModelConfig, OptimConfig

LossFn = Callable[[Columns, Columns, MiniBatch], tuple[Tensor, dict[str, Tensor]]]
"""(model outputs, columns, mini-batch counts) -> (share of the loss, shares of the metrics)."""

INPUTS = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")
"""Columns that every forward pass reads."""


class TrainEngine:
    """One model of one role on this rank; without an optimizer config it is frozen."""

    def __init__(
        self,
        model_config: ModelConfig,
        fsdp_config: FSDPConfig,
        *,
        head: Head = "token",
        optim_config: OptimConfig | None = None,
        grad_clip: float = 1.0,
    ) -> None:
        self.model_config = model_config
        self.fsdp_config = fsdp_config
        self.optim_config = optim_config
        self.head: Head = head
        self.grad_clip = grad_clip

    def build(self, worker: Worker, total_steps: int = 0) -> None:
        """Load and shard the model on the worker's device; `total_steps` update calls make the schedule."""
        worker.open_process_group()
        self.device = worker.device
        refuse_offload(self.device, self.fsdp_config)
        self.mesh = build_mesh(self.device, worker.world_size, self.fsdp_config.fsdp_size)
        self.group = dist.group.WORLD if worker.world_size > 1 else None
        self.world_size = worker.world_size
        self.module: Any = load_model(self.model_config, self.head).to(self.device)
        self.module.requires_grad_(self.optim_config is not None)
        if self.optim_config is not None and self.model_config.lora_rank > 0:
            add_adapter(self.module, self.model_config)
        if self.world_size > 1:
            shard(self.module, self.mesh)
        if self.optim_config is not None:
            self.optimizer = build_optimizer(self.parameters(), self.optim_config)
            self.skips = SkippedSteps(self.optim_config.max_skipped_steps, self.group)
            self.scheduler = Schedule(self.optimizer, self.optim_config, total_steps)

    @torch.no_grad()
    def forward_rows(
        self, data: DataProto, micro_batch_size: int, *, temperature: float = 1.0, want_entropy: bool = False
    ) -> Columns:
        """For every row `log_probs` (and `entropys`), or `values`: [rows, R], zero outside the response mask."""
        rows = Rows.take(data, INPUTS, self.device, self.world_size)
        passes = common_passes(len(rows), micro_batch_size, self.device, self.group)
        self.module.eval()
        pieces: dict[str, list[Tensor]] = {}
        for columns, real in micro_batches(rows.columns, micro_batch_size, passes):
            for name, column in self.outputs(columns, temperature, want_entropy).items():
                pieces.setdefault(name, []).append(column[:real].float().cpu())
        return {name: rows.restore(torch.cat(columns)) for name, columns in pieces.items()}

    def update(
        self,
        data: DataProto,
        names: Sequence[str],
        *,
        mini_batch_size: int,
        micro_batch_size: int,
        epochs: int,
        loss_fn: LossFn,
        temperature: float = 1.0,
        want_entropy: bool = False,
    ) -> dict[str, float]:
        """One optimizer step per mini-batch and epoch; the metrics are means over those that were not skipped."""
        rows = Rows.take(data, (*INPUTS, *names), self.device, self.world_size)
        count = count_mini_batches(rows.total, mini_batch_size)
        self.module.train(self.model_config.enable_gradient_checkpointing)
        steps: list[dict[str, float]] = []
        for _ in range(epochs):
            for index in range(count):
                batch = mini_batch(rows, index, count, micro_batch_size, self.group)
                metrics = self.accumulate(batch, micro_batch_size, loss_fn, temperature, want_entropy)
                metrics["grad_norm"] = guarded_step(self.optimizer, self.parameters(), self.grad_clip)
                self.skips.note(metrics["grad_norm"], batch.names)
                steps.append(metrics)
        self.module.eval()
        taken = [step for step in steps if math.isfinite(step["grad_norm"])]
        result = {name: sum(step[name] for step in taken or steps) / len(taken or steps) for name in steps[0]}
        result["lr"] = self.scheduler.lr
        result["skipped_steps"] = float(len(steps) - len(taken))
        self.scheduler.step()
        return result

    def accumulate(
        self, batch: MiniBatch, micro_batch_size: int, loss_fn: LossFn, temperature: float, want_entropy: bool
    ) -> dict[str, float]:
        """Add the gradients of one mini-batch; its metrics, added over micro-batches and ranks."""
        totals: dict[str, Tensor] = {}
        for columns, real in micro_batches(batch.columns, micro_batch_size, batch.num_micro_batches):
            loss, shares = loss_fn(self.outputs(columns, temperature, want_entropy), columns, batch)
            loss.backward()
            for name, share in shares.items():
                share = share.detach().float() if real else torch.zeros((), device=self.device)  # a dummy adds nothing
                totals[name] = totals[name] + share if name in totals else share
        summed = all_reduce(torch.stack(list(totals.values())), self.group)
        return dict(zip(totals, summed.tolist(), strict=True))

    def outputs(self, columns: Columns, temperature: float = 1.0, want_entropy: bool = False) -> Columns:
        """One forward pass: [rows, R] columns for the response positions, zero where the response mask is.

        What position t - 1 says is about token t: the last token is not fed, and only the last R positions get a head.
        """
        width = columns["responses"].size(1)
        sequence = (columns[name][:, :-1] for name in ("input_ids", "attention_mask", "position_ids"))
        inputs = model_inputs(self.module, *sequence)
        hidden = columns["response_mask"] == 0
        if self.head == "scalar":
            return {"values": self.module(**inputs)[:, -width:, 0].float().masked_fill(hidden, 0.0)}
        if "logits_to_keep" in inspect.signature(self.module.forward).parameters:
            inputs["logits_to_keep"] = width
        logits, labels = self.module(**inputs).logits[:, -width:], columns["responses"]
        if want_entropy:
            both = logprobs_and_entropy_from_logits(logits, labels, temperature=temperature, inplace_backward=True)
            found: tuple[Tensor, ...] = both
        else:
            found = (logprobs_from_logits(logits, labels, temperature=temperature, inplace_backward=True),)
        names = ("log_probs", "entropys")
        return {name: column.masked_fill(hidden, 0.0) for name, column in zip(names, found, strict=False)}

    def parameters(self) -> list[nn.Parameter]:
        """The parameters as the optimizer sees them: this rank's shards of what is trained."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def named_full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name as a full float32 CPU tensor, gathered one at a time; collective.

        LoRA adapters are merged into the weights they stand beside. Every rank must run the iterator to its end. On one
        CPU rank the tensors are the live weights: do not write.
        """
        named = self.module.named_parameters()
        yield from merged_tensors(self.module, ((name, full_tensor(parameter)) for name, parameter in named))

    def weights_checksum(self) -> str:
        """A hash of the full weights, equal at every sharding; collective."""
        return checksum_of(self.named_full_tensors())


def full_tensor(parameter: Tensor) -> Tensor:
    """A weight as one float32 CPU tensor; collective where it is sharded."""
    tensor = parameter.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.float().cpu()


def refuse_offload(device: torch.device, config: FSDPConfig) -> None:
    """On the CPU everything is in host memory, which is what offloading asks for; elsewhere it is not built yet."""
    wanted = [name for name in ("param_offload", "optimizer_offload") if getattr(config, name)]
    if wanted and device.type != "cpu":
        keys = " and ".join(f"fsdp_config.{name}" for name in wanted)
        raise ConfigError(f"{keys}: this engine keeps its state on {device}; set {keys} to False.")


def build_mesh(device: torch.device, world_size: int, fsdp_size: int) -> DeviceMesh:
    """The mesh of one role: axis "shard", under an axis "replicate" when `fsdp_size` is a part of the ranks."""
    size = world_size if fsdp_size == -1 else fsdp_size
    if size < 1 or world_size % size:
        valid = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise ConfigError(
            f"fsdp_config.fsdp_size={fsdp_size} does not divide the {world_size} ranks; valid: -1 (all), {valid}."
        )
    if size == world_size:
        return init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (world_size // size, size), mesh_dim_names=("replicate", "shard"))


def shard(module: Any, mesh: DeviceMesh) -> None:
    """FSDP2, one unit per decoder layer and one for the rest; gradients are added over ranks, not averaged."""
    layers = set(module._no_split_modules or ())
    for child in module.modules():
        if type(child).__name__ in layers:
            fully_shard(child, mesh=mesh, reshard_after_forward=True)
    fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.set_gradient_divide_factor(1.0)
            child.set_force_sum_reduction_for_comms(True)
