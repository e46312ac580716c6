"""The model that a role holds, and the memory that it takes on a device, from shapes.

    class TeacherWorker(Worker):
        @classmethod
        def held_model(cls, config, role) -> HeldModel: ...     # also what its engine is built from

    memory = memory_of(held, role, pool, ranks, device_type, LargestPass(tokens, reads))

Roles of one pool share its devices. What they keep is added up; of what a call takes on top (whole
layers, activations, logits, what is offloaded or asleep between calls) the largest counts, since
they take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from verl_like.tensor_ops.logprobs import slice_bytes
from workers.config.model import FrozenFSDPConfig, ModelConfig, ParallelConfig
from workers.models.causal_lm import Head, recomputes
from workers.models.folder import model_folder
from workers.models.hf_config import shared_hf_config
from workers.models.memory_shapes import (
    ModelShapes,
    Moments,
    StageOf,
    described_by,
    meta_model,
    model_shapes,
)
from workers.models.precision import name_of, precision_of, rollout_dtype
from workers.parallel.sharding import Sharding, axes_key, dims_of, is_one_unit, settle
from workers.training.file_copies import LEAST_BYTES
from workers.training.lm_head import positions_at_once

if TYPE_CHECKING:
    from workers.config import ActorRolloutRefConfig

GIB = 2**30
_meta_modules: dict[str, Any] = {}
"""Model, head and whether it trains -> its module without memory."""
EngineT = TypeVar("EngineT")


@dataclass(frozen=True)
class HeldModel:
    """A model that a role has an engine for."""

    key: str
    """The key that names its folder."""
    model: ModelConfig
    fsdp: FrozenFSDPConfig = field(default_factory=FrozenFSDPConfig)
    strategy: str = "fsdp"
    head: Head = "token"
    parallel: ParallelConfig | None = None
    trains: bool = False
    quantization: str | None = None
    has_average: bool = False
    """Whether a moving average in float32 stands beside the weights."""
    saved: Sequence[str] = ()
    """What a checkpoint has of it."""
    section: str = ""
    """The section of `fsdp_config`, for messages."""
    rows: int | None = None
    """Samples of a pass that only reads, where passes are cut by samples."""
    tokens: int | None = None
    """Tokens of its passes, where it has a number of its own."""

    @property
    def sharding(self) -> Sharding:
        """How it is laid over its ranks."""
        key = self._fsdp_key
        return settle(self.strategy, self.fsdp, self.parallel, key, self.quantization)

    @property
    def axes_key(self) -> str:
        """The name of its `parallel`."""
        return axes_key(self._fsdp_key)

    @property
    def _fsdp_key(self) -> str:
        return f"{self.section}.fsdp_config".lstrip(".")

    def check_axes(self, num_ranks: int) -> None:
        """Refuse axes that the model cannot have on so many ranks; nothing is loaded."""
        dims = dims_of(num_ranks, self.sharding)
        if max(dims.sp, dims.tp, dims.pp, dims.ep) > 1:
            from workers.training.axes import check_axes  # with the engine: a second

            schedule = self.sharding.pp_schedule
            check_axes(self.meta_module, self.model, dims, self.axes_key, schedule)

    @property
    def meta_module(self) -> Any:
        """The module without memory, one for all that ask; not to be changed."""
        model = self.model
        key = repr((model, self.head, self.trains, described_by(model)))
        if key not in _meta_modules:
            module = meta_model(model, self.head)
            _meta_modules[key] = module if self.trains else module.requires_grad_(False)
        return _meta_modules[key]

    def engine(self, engine_class: Callable[..., EngineT], **settings: Any) -> EngineT:
        """A training engine of it."""
        return engine_class(
            self.model,
            self.fsdp,
            strategy=self.strategy,
            head=self.head,
            quantization=self.quantization,
            parallel=self.parallel,
            **settings,
        )


@dataclass(frozen=True)
class RoleMemory:
    """Bytes of one role on one device; `host` are those that it keeps in the machine's memory.

    So are `copies`, beside all others: what a checkpoint is written from. Of `sync` bytes, an
    engine's pool holds those of others while it gets weights, before it has a cache.
    """

    role: str
    pool: str
    types: str
    weights: float = 0
    gradients: float = 0
    moments: float = 0
    whole: float = 0
    activations: float | None = 0
    kv_cache: float = 0
    host: float = 0
    copies: float = 0
    sync: float = 0
    sleeps: bool = False
    """Whether an engine gives back all that it has while others compute."""
    takes_a_share: bool = False
    """Whether an engine takes a fixed share of the device, its own workspaces included."""
    beside_engine: bool = False
    """Whether it computes while an engine that sleeps otherwise is awake."""

    def offloaded(self, sharding: Sharding, device_type: str) -> RoleMemory:
        """With weights and moments where `sharding` has them between calls."""
        if device_type != "cuda":
            return self
        weights = sharding.param_offload * self.weights
        return replace(self, host=weights + sharding.optimizer_offload * self.moments)

    @property
    def kept(self) -> float:
        """What stays on the device between calls, or is taken beside an engine's."""
        return sum(self.kept_parts.values())

    @property
    def call(self) -> float:
        """What a call takes on top of it, offloaded parts included."""
        return sum(self.call_parts.values())

    @property
    def kept_parts(self) -> dict[str, float]:
        """`kept` by kind."""
        if self.sleeps:
            return {}
        offloaded = max(self.host - self.moments, 0.0)  # of the weights; moments go first
        kept = {
            "weights": self.weights - offloaded,
            "moments": self.moments - (self.host - offloaded),
            "KV cache": self.kv_cache,
        }
        return kept | (self._of_call if self.beside_engine else {})

    @property
    def call_parts(self) -> dict[str, float]:
        """`call` by kind."""
        return {} if self.beside_engine else self._of_call

    @property
    def _of_call(self) -> dict[str, float]:
        if self.sleeps:
            has_cache = self.kv_cache >= self.sync
            rest = {"KV cache": self.kv_cache} if has_cache else {"whole layers": self.sync}
            return {"weights": self.weights, **rest}
        return {
            "gradients": self.gradients,
            "whole layers": self.whole + self.sync,
            "activations": self.activations or 0.0,
            "back from the host": self.host,
        }


def pool_bytes(roles: Sequence[RoleMemory]) -> dict[str, float]:
    """Bytes on a device of each pool: what its roles keep, and the largest call."""
    pools: dict[str, float] = {}
    for pool in dict.fromkeys(role.pool for role in roles):
        own = [role for role in roles if role.pool == pool]
        pools[pool] = sum(role.kept for role in own) + max(role.call for role in own)
    return pools


LEAST_RESERVE, RESERVED_SHARE = 4 * GIB, 0.08


def usable_bytes(roles: Sequence[RoleMemory], device_type: str, device_bytes: int) -> float:
    """Bytes of a device that the plan of a pool with these roles may fill.

    CUDA contexts, buffers of communicators, workspaces of kernels and gaps between tensors are not
    counted, so a GPU keeps a reserve for them. A pool of vLLM engines needs none: their share of a
    GPU includes their own workspaces.
    """
    if device_type != "cuda" or all(role.takes_a_share for role in roles):
        return device_bytes
    return device_bytes - max(LEAST_RESERVE, RESERVED_SHARE * device_bytes)


@dataclass(frozen=True)
class LargestPass:
    """Tokens of a role's largest pass, all rows of full length, and those that get a head."""

    tokens: int
    reads: int
    alone: LargestPass | None = None
    """The largest of a trained role's passes that only read."""


def memory_of(
    held: HeldModel,
    role: str,
    pool: str,
    ranks: int,
    device_type: str,
    largest: LargestPass,
    copies: bool = False,
) -> RoleMemory:
    """A training engine; a frozen one keeps its weights in the type that it computes in, or int8.

    `copies` says that a checkpoint is written from copies while the run goes on. Of ranks that
    share the layers it is the one that takes the most.
    """
    sharding = held.sharding
    dims, stages = dims_of(ranks, sharding), list[StageOf | None]([None])
    if dims.pp > 1:
        how = dims.pp, sharding.pp_schedule, dims.ep
        stages = [StageOf(rank, *how) for rank in range(dims.pp)]
    found = [_of_rank(held, role, pool, ranks, device_type, largest, copies, at) for at in stages]
    return max(found, key=lambda memory: memory.kept + memory.call)


def _of_rank(
    held: HeldModel,
    role: str,
    pool: str,
    ranks: int,
    device_type: str,
    largest: LargestPass,
    copies: bool,
    stage: StageOf | None,
) -> RoleMemory:
    precision = precision_of(held.model, device_type)
    kept = precision.weights if held.trains else precision.compute
    sharding = held.sharding
    shapes = model_shapes(held.model, held.head, precision.compute, sharding.tp, stage)
    dims = dims_of(ranks, sharding)
    shards = 1 if sharding.strategy in ("ddp", "single") else dims.shard * dims.sp

    trained = held.trains * shapes.num_trained * kept.itemsize
    averages = _averages(held, shapes, kept)
    weights = (shapes.held(kept, held.quantization) + averages) / shards
    moments = 2 * trained / shards
    copied = 0.0
    if copies:
        saved = {"optimizer": 2 * trained, "model": averages + (trained or shapes.held(kept))}
        writers = dims.per_stage if shards == sharding.tp == 1 else shards
        copied = sum(saved.get(name, 0) for name in held.saved) / writers
        if "hf_model" in held.saved:  # the first rank's, in the type of the model's folder
            stored = getattr(hf_config_of(held.model), "dtype", None) or precision.compute
            whole = model_shapes(held.model, held.head, precision.compute)
            copied += whole.num_weights * stored.itemsize
    casts = kept != precision.compute
    whole, activations = _largest_moment(held, shapes, largest, shards, casts, dims.ep, device_type)
    names = [held.quantization or name_of(kept), name_of(precision.compute)]
    memory = RoleMemory(
        role=role,
        pool=pool,
        types=" / ".join(dict.fromkeys(names)),
        weights=weights,
        gradients=trained / shards,
        moments=moments,
        whole=whole,
        activations=activations,
        copies=copied if copied >= LEAST_BYTES else 0,
    )
    return memory.offloaded(sharding, device_type)


def _averages(held: HeldModel, shapes: ModelShapes, kept: torch.dtype) -> int:
    """Bytes of a moving average in float32: of what is trained, or of what is kept narrower."""
    if held.has_average and held.trains:
        return shapes.num_trained * torch.float32.itemsize
    if held.has_average and kept != torch.float32:
        return shapes.num_weights * torch.float32.itemsize
    return 0


def _largest_moment(
    held: HeldModel,
    shapes: ModelShapes,
    largest: LargestPass,
    shards: int,
    casts: bool,
    ep: int,
    device_type: str,
) -> tuple[float, float | None]:
    """Of whole weights, and of activations, when both together take the most."""
    gathers, strategy = shards > 1, held.sharding.strategy
    passes = [(largest, held.trains)]
    if held.trains and largest.alone is not None:
        passes.append((largest.alone, False))

    found: list[tuple[float, float | None]] = []
    for each, trains in passes:
        whole = _whole(shapes, strategy, ep, trains) if gathers else _copied(shapes, casts)
        head = _head(held, shapes, each, trains, gathers, device_type)
        taken = shapes.reading_pass(each.tokens, head)
        if trains:
            again = recomputes(held.model, device_type, shapes.can_recompute)
            taken = shapes.trained_pass(each.tokens, head, again)
        found += zip(whole, taken or (None, None), strict=True)
    return max(found, key=lambda moment: moment[0] + (moment[1] or 0))


def _copied(shapes: ModelShapes, casts: bool) -> Moments:
    """Weights of a rank that holds them whole: a copy in the type of computation."""
    num_bytes = casts * shapes.num_weights * shapes.compute_bytes
    return Moments(num_bytes, num_bytes)


def _whole(shapes: ModelShapes, strategy: str, ep: int, trains: bool) -> Moments:
    """Weights that FSDP has gathered, and what of their gradients is not yet a shard.

    What is outside the layers is whole throughout. In a layer two of them are, of which one is on
    its way, with a gradient of each; at the head the buffer of the last one is. Under
    shard_grad_op, or in a small model, all are. The gradient of embeddings comes when the
    activations have gone. Of experts those of the rank are gathered.
    """
    gathered = shapes.num_weights - shapes.num_in_experts * (1 - 1 / ep)
    outside = shapes.num_outside_layers
    layer = (gathered - outside) / shapes.num_layers
    of_head = trains * shapes.trains_head * (outside - shapes.num_embeddings)
    of_layers = trains * min(2 * layer, shapes.num_trained)
    if is_one_unit(shapes.num_weights):
        of_all = trains * min(gathered, shapes.num_trained)
        numbers = [gathered + of_all] * 2
    elif strategy == "shard_grad_op":
        numbers = [gathered + of_head, gathered + of_head + of_layers]
    else:
        numbers = [outside + layer + of_head, outside + 2 * layer + of_head + of_layers]
    at_head, in_layer = (number * shapes.compute_bytes for number in numbers)
    return Moments(at_head, in_layer)


def _head(
    held: HeldModel,
    shapes: ModelShapes,
    largest: LargestPass,
    trains: bool,
    gathers: bool,
    device_type: str,
) -> int:
    """Bytes of a head at its peak: the states that it reads, logits, and gradients of both.

    The gradient of logits is written over them. That of the head's weight stands beside the one
    that it is added to, unless the rank `gathers` weights: then it is of those.
    """
    if shapes.outputs_per_read == 0:  # another stage's
        return 0
    if shapes.outputs_per_read == 1:  # it reads every token, in float32
        return largest.tokens * (4 + (shapes.compute_bytes < 4) * 4 * shapes.hidden_size)
    at_once = _positions_at_once(
        model_folder(held.model.path, weights=False),
        described_by(held.model),
        largest.reads,
        held.model.use_fused_kernels,
        shapes.outputs_per_read,
        device_type,
    )
    states = largest.reads * shapes.hidden_size * shapes.compute_bytes
    logits = at_once * shapes.outputs_per_read
    # of the log-softmax, in float32: one more for entropies, which trained policies are asked for,
    # one for the gradient, and one where logits are narrower
    num_buffers = 1 + held.trains + trains + (shapes.compute_bytes < 4)
    softmax = num_buffers * min(slice_bytes(device_type), 4 * logits)
    of_logits = logits * shapes.compute_bytes
    if not trains:
        of_all = largest.tokens * shapes.hidden_size * shapes.compute_bytes
        return of_logits + max(of_all + states, states * (at_once < largest.reads) + softmax)

    weight = trains * shapes.trains_head * shapes.hidden_size * shapes.outputs_per_read
    if at_once < largest.reads:  # `workers.training.lm_head`: the weight's gradient in float32
        return 2 * states + 4 * weight + of_logits + softmax
    gradient = 0 if gathers else weight * shapes.compute_bytes
    return states + of_logits + max(softmax, states + gradient)


@lru_cache(maxsize=256)
def _positions_at_once(
    folder: Path, _text: str, reads: int, may_chunk: bool, num_words: int, device_type: str
) -> int:
    # the text is a parameter so that a changed file is looked at again
    return positions_at_once(shared_hf_config(folder), reads, may_chunk, num_words, device_type)


def hf_config_of(model: ModelConfig) -> Any:
    """The configuration of transformers in the model's folder, to be read alone."""
    return shared_hf_config(model_folder(model.path, weights=False))


def sync_bytes(held: HeldModel, memory: RoleMemory, device_type: str) -> float:
    """Bytes on a device while a trained model's weights go to an engine beside it: those that are
    in host memory else, and the largest one whole, in the type that is kept and as it is sent."""
    precision = precision_of(held.model, device_type)
    shapes = model_shapes(held.model, held.head, precision.compute)
    largest = shapes.outputs_per_read * shapes.hidden_size
    back = held.sharding.param_offload * memory.weights if memory.host else 0
    return back + largest * (precision.weights.itemsize + precision.compute.itemsize)


def rollout_memory(
    policy: ActorRolloutRefConfig,
    width: int,
    role: str,
    pool: str,
    device_type: str,
    device_bytes: int | None,
    ranks_of_actor: int | None,
) -> RoleMemory:
    """An engine of rows of `width` tokens: its own weights, if it has any, and its cache.

    vLLM takes a share of a GPU whole. `ranks_of_actor` are those of an actor on the same pool.
    """
    rollout = policy.rollout
    dtype = rollout_dtype(policy, device_type)
    shapes = model_shapes(replace(policy.model, lora_rank=0), "token", dtype)
    weights: float = shapes.held(dtype, rollout.quantization)
    per_sample = shapes.key_value_numbers * dtype.itemsize * width
    cache: float = min(rollout.kv_cache_gb * GIB, rollout.max_num_seqs * per_sample)

    takes_a_share = rollout.name == "vllm" and device_type == "cuda"
    if rollout.name == "vllm":
        weights /= rollout.tensor_model_parallel_size
        if takes_a_share and device_bytes is not None:
            cache = max(0, rollout.gpu_memory_utilization * device_bytes - weights)
    if rollout.server_urls:
        weights = cache = 0  # on the servers' devices
    axes = policy.actor.parallel
    is_copied = policy.actor.strategy == "ddp" and axes.tp == axes.pp == 1
    is_whole = ranks_of_actor == 1 or (ranks_of_actor and is_copied)
    may_share = rollout.name == "native" and not rollout.quantization
    if may_share and is_whole and dtype == precision_of(policy.model, device_type).weights:
        weights = 0  # the actor's own module
    types = " / ".join(filter(None, [rollout.quantization, name_of(dtype)]))
    return RoleMemory(
        role, pool, types, weights=weights, kv_cache=cache, takes_a_share=takes_a_share
    )
