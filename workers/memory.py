"""The memory model: estimates the device memory of a role from the shapes of its model.

    class TeacherWorker(Worker):
        @classmethod
        def role_model(cls, config, role) -> RoleModelSpec: ...  # also builds the engine

    memory = engine_memory(model, role, pool, ranks, device_type, LargestPass(tokens, reads))

Roles of a pool share its devices. The memory that they use between calls is added up. Their calls
run one at a time, so only the largest call is added to that sum. The memory of a call includes
gathered layers, activations, logits, and weights that are offloaded or asleep between calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from verl_like.tensor_ops import slice_bytes
from workers.config import ActorRolloutRefConfig
from workers.config.model import ModelConfig, ParallelConfig
from workers.models.causal_lm import recomputed_layers
from workers.models.folder import model_folder, shared_hf_config
from workers.models.memory_shapes import Moments, StageOf, described_by, model_shapes
from workers.models.precision import name_of, precision_of, rollout_dtype
from workers.models.tensor_files import LEAST_BYTES
from workers.parallel.sharding import ParallelDims, dims_of, is_one_unit
from workers.training.passes.lm_head import positions_per_chunk
from workers.training.role_model_spec import RoleModelSpec

GIB = 2**30


@dataclass(frozen=True)
class RoleMemory:
    """Memory of one role on one device, in bytes."""

    role: str
    pool: str
    types: str
    weights: float = 0
    gradients: float = 0
    moments: float = 0
    gathered: float = 0
    """Weights that are gathered (unsharded) during a call, and their unsharded gradients."""
    activations: float | None = 0
    """None if they cannot be estimated."""
    kv_cache: float = 0
    host: float = 0
    """Bytes of weights and moments in host memory between calls."""
    copies: float = 0
    """Host memory for copies of the state, from which a checkpoint is written."""
    sync: float = 0
    """Extra device memory while an engine receives weights."""
    sleeps: bool = False
    """True for an engine that frees all its memory while other roles compute."""
    takes_a_share: bool = False
    """True for an engine that takes a fixed fraction of the device, including its workspaces."""
    beside_engine: bool = False
    """True if the role also computes while an engine that otherwise sleeps is awake."""

    @property
    def resident(self) -> float:
        """Bytes on the device between calls; if `beside_engine`, also the bytes of a call."""
        if self.sleeps:
            return 0.0
        between_calls = self.weights + self.moments - self.host + self.kv_cache
        return between_calls + self._call_bytes * self.beside_engine

    @property
    def call(self) -> float:
        """Additional bytes during a call, including those that are offloaded between calls."""
        return 0.0 if self.beside_engine else self._call_bytes

    @property
    def _call_bytes(self) -> float:
        if self.sleeps:
            return self.weights + max(self.kv_cache, self.sync)
        of_pass = self.gradients + self.gathered + (self.activations or 0.0)
        return of_pass + self.sync + self.host


def pool_bytes(roles: Sequence[RoleMemory]) -> dict[str, float]:
    """Return each pool's bytes per device: of all roles between calls, plus the largest call."""
    pools: dict[str, float] = {}
    for pool in dict.fromkeys(role.pool for role in roles):
        roles_here = [role for role in roles if role.pool == pool]
        pools[pool] = sum(role.resident for role in roles_here) + max(
            role.call for role in roles_here
        )
    return pools


LEAST_RESERVE, RESERVED_SHARE = 4 * GIB, 0.08


def usable_bytes(roles: Sequence[RoleMemory], device_type: str, device_bytes: int) -> float:
    """Return how many bytes of a device the estimates of a pool with these roles may fill.

    The estimates omit CUDA contexts, communication buffers, kernel workspaces and fragmentation, so
    a GPU needs a reserve for them. A pool of vLLM engines needs no reserve, because their fraction
    of a GPU includes their workspaces.
    """
    if device_type != "cuda" or all(role.takes_a_share for role in roles):
        return device_bytes
    return device_bytes - max(LEAST_RESERVE, RESERVED_SHARE * device_bytes)


@dataclass(frozen=True)
class LargestPass:
    """The size of a role's largest pass: its tokens, and the positions at which the head runs.

    All rows have the maximum length.
    """

    tokens: int
    reads: int
    without_gradients: LargestPass | None = None
    """For a trained role, the size of its largest pass without gradients."""


def engine_memory(
    model: RoleModelSpec,
    role: str,
    pool: str,
    ranks: int,
    device_type: str,
    largest: LargestPass,
    copies: bool = False,
) -> RoleMemory:
    """Return the memory of this model's training engine, on the rank that needs the most.

    With `copies`, a checkpoint is written from copies while the run continues. A frozen model
    stores its weights in the dtype of its passes, or in int8.
    """
    dims, schedule = dims_of(ranks, model.sharding), model.sharding.pp_schedule
    stages: list[StageOf | None] = [None]
    if dims.pp > 1:
        stages = [StageOf(rank, dims.pp, schedule, dims.ep) for rank in range(dims.pp)]
    ranks_of_stages = [_Rank(model, dims, device_type, stage) for stage in stages]
    memories = [rank.memory(role, pool, largest, copies) for rank in ranks_of_stages]
    return max(memories, key=lambda memory: memory.resident + memory.call)


class _Rank:
    """Estimates the memory of one rank of a training engine, from the shapes of its model."""

    def __init__(
        self, spec: RoleModelSpec, dims: ParallelDims, device_type: str, stage: StageOf | None
    ) -> None:
        self.spec, self.dims, self.device_type = spec, dims, device_type
        precision = precision_of(spec.model, device_type)
        self.compute = precision.compute
        self.weight_dtype = precision.weights if spec.trains else precision.compute
        self.shapes = model_shapes(spec.model, spec.head, self.compute, dims.tp, stage)
        is_sharded = spec.sharding.strategy not in ("ddp", "single")
        self.shards = dims.shard * dims.sp if is_sharded else 1

    def memory(self, role: str, pool: str, largest: LargestPass, copies: bool) -> RoleMemory:
        """Return the estimate for this rank; with `copies`, checkpoints are written from copies."""
        trained = self.spec.trains * self.shapes.num_trained * self.weight_dtype.itemsize
        stored = self.shapes.weight_bytes(self.weight_dtype, self.spec.quantization)
        stored += self._averages()
        weights, moments = stored / self.shards, 2 * trained / self.shards
        sharding, may_offload = self.spec.sharding, self.device_type == "cuda"
        offloaded = sharding.param_offload * weights + sharding.optimizer_offload * moments
        gathered, activations = self._largest_moment(largest)
        copied = self._copied_for_checkpoints(trained) if copies else 0.0
        names = [self.spec.quantization or name_of(self.weight_dtype), name_of(self.compute)]
        return RoleMemory(
            role=role,
            pool=pool,
            types=" / ".join(dict.fromkeys(names)),
            weights=weights,
            gradients=trained / self.shards,
            moments=moments,
            gathered=gathered,
            activations=activations,
            host=may_offload * offloaded,
            copies=copied if copied >= LEAST_BYTES else 0,
        )

    def _averages(self) -> int:
        """Return the bytes of the role's float32 moving average of weights, if it has one.

        A frozen role has one only if its weights are not float32 themselves.
        """
        if self.spec.has_average and self.spec.trains:
            return self.shapes.num_trained * torch.float32.itemsize
        if self.spec.has_average and self.weight_dtype != torch.float32:
            return self.shapes.num_weights * torch.float32.itemsize
        return 0

    def _copied_for_checkpoints(self, trained: float) -> float:
        """Return the bytes of the copies from which a checkpoint is written."""
        model = self._averages() + (trained or self.shapes.weight_bytes(self.weight_dtype))
        saved = {"optimizer": 2 * trained, "model": model}
        writers = self.dims.per_stage if self.shards == self.dims.tp == 1 else self.shards
        copied = sum(saved.get(name, 0) for name in self.spec.saved) / writers
        if "hf_model" in self.spec.saved:  # on the first rank, in the folder's dtype
            stored = getattr(hf_config_of(self.spec.model), "dtype", None) or self.compute
            full_model = model_shapes(self.spec.model, self.spec.head, self.compute)
            copied += full_model.num_weights * stored.itemsize
        return copied

    def _largest_moment(self, largest: LargestPass) -> tuple[float, float | None]:
        """Return the bytes of gathered weights and of activations when their sum is largest."""
        passes = [(largest, self.spec.trains)]
        if self.spec.trains and largest.without_gradients is not None:
            passes.append((largest.without_gradients, False))
        moments: list[tuple[float, float | None]] = []
        for size, trains in passes:
            head = self._head(size, trains)
            activations = self.shapes.reading_pass(size.tokens, head)
            if trains:
                can_recompute = self.shapes.can_recompute
                recomputed = recomputed_layers(self.spec.model, self.device_type, can_recompute)
                activations = self.shapes.trained_pass(size.tokens, head, recomputed)
            moments += zip(self._gathered(trains), activations or (None, None), strict=True)
        return max(moments, key=lambda moment: moment[0] + (moment[1] or 0))

    def _gathered(self, trains: bool) -> Moments:
        """Return the bytes of gathered weights and their unsharded gradients, for head and layer.

        Without sharding, a rank has a copy of all weights in the dtype of passes, if it differs
        from their own. With FSDP, the weights outside the layers stay gathered. While a layer runs,
        two layers are gathered (one is prefetched), each with a gradient. While the head runs, only
        the buffer of the last layer remains. Under shard_grad_op, or in a small model, all layers
        stay gathered. The gradient of embeddings does not count, because it is computed after the
        activations are freed. A rank gathers only its own experts.
        """
        shapes = self.shapes
        if self.shards == 1:
            cast = shapes.num_weights - shapes.num_int8 * (self.spec.quantization == "nf4")
            copied = (self.weight_dtype != self.compute) * cast * shapes.compute_bytes
            return Moments(copied, copied)
        gathered = shapes.num_weights - shapes.num_in_experts * (1 - 1 / self.dims.ep)
        outside = shapes.num_outside_layers
        layer = (gathered - outside) / shapes.num_layers
        of_head = trains * shapes.trains_head * (outside - shapes.num_embeddings)
        of_layers = trains * min(2 * layer, shapes.num_trained)
        if is_one_unit(shapes.num_weights):
            numbers = [gathered + trains * min(gathered, shapes.num_trained)] * 2
        elif self.spec.sharding.strategy == "shard_grad_op":
            numbers = [gathered + of_head, gathered + of_head + of_layers]
        else:
            numbers = [outside + layer + of_head, outside + 2 * layer + of_head + of_layers]
        at_head, in_layer = (number * shapes.compute_bytes for number in numbers)
        return Moments(at_head, in_layer)

    def _head(self, largest: LargestPass, trains: bool) -> int:
        """Return the peak bytes of a head: its input states, its logits, and their gradients.

        The gradient of the logits overwrites the logits. The gradient of the head's weight is
        separate from the accumulated gradient. If the rank gathers weights, `_gathered` counts it.
        """
        shapes, model = self.shapes, self.spec.model
        if shapes.outputs_per_read == 0:  # the head is on another stage
            return 0
        if shapes.outputs_per_read == 1:  # the head reads every token, in float32
            return largest.tokens * (4 + (shapes.compute_bytes < 4) * 4 * shapes.hidden_size)
        at_once = _positions_at_once(
            model_folder(model.path, weights=False),
            described_by(model),
            largest.reads,
            model.use_fused_kernels,
            shapes.outputs_per_read,
            self.device_type,
        )
        states = largest.reads * shapes.hidden_size * shapes.compute_bytes
        logits = at_once * shapes.outputs_per_read
        # float32 buffers of the log-softmax: one for its output, one for the entropies of a trained
        # policy, one for the gradient, and one for the cast if logits are narrower
        num_buffers = 1 + self.spec.trains + trains + (shapes.compute_bytes < 4)
        softmax = num_buffers * min(slice_bytes(self.device_type), 4 * logits)
        of_logits = logits * shapes.compute_bytes
        if not trains:
            of_all = largest.tokens * shapes.hidden_size * shapes.compute_bytes
            return of_logits + max(of_all + states, states * (at_once < largest.reads) + softmax)

        weight = shapes.trains_head * shapes.hidden_size * shapes.outputs_per_read
        if at_once < largest.reads:  # in chunks (`passes/lm_head.py`), float32 gradient
            return 2 * states + 4 * weight + of_logits + softmax
        gradient = weight * shapes.compute_bytes * (self.shards == 1)
        return states + of_logits + max(softmax, states + gradient)


@lru_cache(maxsize=256)
def _positions_at_once(
    folder: Path, _text: str, reads: int, may_chunk: bool, num_words: int, device_type: str
) -> int:
    # `_text`, the text of config.json, is in the cache's key, so a changed file is read again
    return positions_per_chunk(shared_hf_config(folder), reads, may_chunk, num_words, device_type)


def hf_config_of(model: ModelConfig) -> Any:
    """Return the transformers config of the model's folder, which is shared: do not change it."""
    return shared_hf_config(model_folder(model.path, weights=False))


def sync_bytes(model: RoleModelSpec, memory: RoleMemory, device_type: str) -> float:
    """Return the peak of extra device bytes while weights are copied to a colocated engine.

    It consists of the actor's offloaded weights, which are loaded back, and of the largest weight
    (the head), gathered in both its stored and its sent dtype.
    """
    precision = precision_of(model.model, device_type)
    shapes = model_shapes(model.model, model.head, precision.compute)
    largest = shapes.outputs_per_read * shapes.hidden_size
    loaded_back = model.sharding.param_offload * memory.weights if memory.host else 0
    return loaded_back + largest * (precision.weights.itemsize + precision.compute.itemsize)


def rollout_memory(
    policy: ActorRolloutRefConfig,
    width: int,
    role: str,
    pool: str,
    device_type: str,
    device_bytes: int | None,
    ranks_of_actor: int | None,
    actor_axes: ParallelConfig | None = None,
) -> RoleMemory:
    """Return the memory of a rollout engine for rows of `width` tokens: its weights and its cache.

    vLLM takes a fixed fraction of a GPU. `ranks_of_actor` is the number of ranks of an actor on the
    same pool (None without one), and `actor_axes` are its parallel axes.
    """
    rollout = policy.rollout
    dtype = rollout_dtype(policy, device_type)
    shapes = model_shapes(replace(policy.model, lora_rank=0), "token", dtype)
    weights: float = shapes.weight_bytes(dtype, rollout.quantization)
    per_sample = shapes.key_value_numbers * dtype.itemsize * width
    cache: float = min(rollout.kv_cache_gib * GIB, rollout.max_num_seqs * per_sample)

    takes_a_share = rollout.name == "vllm" and device_type == "cuda"
    if rollout.name == "vllm":
        weights /= rollout.tensor_model_parallel_size
        if takes_a_share and device_bytes is not None:
            cache = max(0, rollout.gpu_memory_utilization * device_bytes - weights)
    if rollout.server_urls:
        weights = cache = 0  # the weights are on the servers' devices
    axes = actor_axes or ParallelConfig()
    is_copied = policy.actor.strategy == "ddp" and axes.tp == axes.pp == 1
    is_whole = ranks_of_actor == 1 or (ranks_of_actor and is_copied)
    may_share = rollout.name == "native" and not rollout.quantization
    if may_share and is_whole and dtype == precision_of(policy.model, device_type).weights:
        weights = 0  # the engine uses the actor's module
    types = " / ".join(filter(None, [rollout.quantization, name_of(dtype)]))
    return RoleMemory(
        role, pool, types, weights=weights, kv_cache=cache, takes_a_share=takes_a_share
    )
