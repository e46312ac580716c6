"""Build a model on its ranks, in this order:

    empty module -> change by parts -> shard -> load weights -> row layout -> finish parts

Strategies are interpreted in `workers.parallel.sharding`; the mesh is in `workers.parallel.groups`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from verl_like.process.info import OWN_PROCESS
from workers.models.attention import head_size, kernel_blocker, log_once, soft_cap
from workers.models.causal_lm import empty_model, language_half
from workers.models.load import load_weights
from workers.models.precision import frozen, precision_of
from workers.models.support import Support
from workers.parallel.fsdp import GradientWatch, shard
from workers.parallel.groups import RankGroups
from workers.parallel.sharding import dims_of
from workers.training.model_parts import load_parts
from workers.training.passes.attention import describe
from workers.training.passes.forward_backward import AllLayers
from workers.training.passes.row_layout import choose_layout
from workers.training.sharded_model import Model

if TYPE_CHECKING:
    from verl_like.process.worker import Worker


def build_model(model: Model, worker: Worker) -> None:
    """Build the model on the worker's device, step by step."""
    # the process group, and the parallel axes over its ranks
    worker.open_process_group()
    model.device = worker.device
    if model.device.type == "cpu":
        prepare_cpu_process()
    else:
        prepare_gpu_process()
    model.dims = dims_of(worker.world_size, model.sharding)
    model.groups = RankGroups(model.dims, model.device)
    model.layers = AllLayers()
    model.is_sharded = model.groups.loss is not None and model.sharding.strategy != "ddp"

    # the module, without memory for its parameters
    if not model.spec.trains:
        model.model_config = frozen(model.model_config, model.device.type)
    model.precision = precision_of(model.model_config, model.device.type)
    model.parts = load_parts(model)
    for part in model.parts:
        part.check(model)
    model.module = empty_model(model.model_config, model.head, model.device)
    if not model.spec.trains:
        # in training, weights that the model class freezes stay frozen
        model.module.requires_grad_(False)
    model.whole_module = model.module
    model.support = Support.of(model.module.config)
    for part in model.parts:
        part.change(model)

    model.cast = None if model.is_sharded else model.precision.cast  # FSDP casts the weights itself
    if model.is_sharded:
        mesh, strategy = model.groups.fsdp_mesh, model.sharding.strategy
        efsdp_mesh = model.groups.efsdp_mesh if model.dims.ep > 1 else None
        cast = model.precision.cast
        model.is_one_unit = shard(
            model.module, mesh, cast, strategy, efsdp_mesh, language_half(model.module)
        )
    load_weights(model.module, model.model_config, model.head, model.device, model.whole_module)
    if model.is_sharded and model.spec.trains:
        model.gradient_watch = GradientWatch(model.module)

    # the row layout of passes, and the attention kernel
    config, hf_config = model.model_config, model.module.config
    dtype, setting = model.precision.compute, config.attn_implementation
    why_not = kernel_blocker(model.device, dtype)
    if not why_not or setting != "auto":
        from workers.training.passes.varlen import find_kernel

        size, has_cap = head_size(hf_config), soft_cap(hf_config) is not None
        model.kernel, why_not = find_kernel(setting, model.device, dtype, size, has_cap)
    routers_count_tokens = bool(model.spec.router_aux_loss_coef)
    model.row_passes = choose_layout(
        model.module,
        model.support,
        may_pack=config.use_remove_padding,
        may_share=config.share_prefixes and model.dims.pp == 1 and not routers_count_tokens,
        group=model.groups.sp,
    )
    log_once(describe(model.module, model.packs, model.kernel, why_not))
    for part in model.parts:
        part.finish(model)


def prepare_cpu_process() -> None:
    """Prepare a process with a model on the CPU, before it computes anything.

    The allocator is changed only in processes that verl-like starts, not in a notebook.
    """
    from workers.cpu.allocator import keep_freed_memory
    from workers.cpu.onednn import limit_kernel_caches

    if OWN_PROCESS in os.environ:
        keep_freed_memory()
    limit_kernel_caches()


USER_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with which users configure torch's allocator."""


def prepare_gpu_process() -> None:
    """Let torch's allocator grow its segments, unless the user has configured the allocator.

    Passes of unequal length leave holes in fixed-size segments: on an H100, 7.1 of 79 GiB were
    reserved and unusable when an update of a 1.5B model ran out of memory.
    """
    if any(name in os.environ for name in USER_SETTINGS):
        return
    by_accelerator = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    set_allocator = by_accelerator or torch.cuda.memory._set_allocator_settings
    set_allocator("expandable_segments:True")
