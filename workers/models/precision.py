"""Dtypes of the trained weights, of forward and backward passes, and of a rollout's weights.

The common practice is float32 master weights and moments with bfloat16 passes, so that is the
default on CUDA. On a CPU, everything is float32 by default, since few processors have bfloat16
matrix products.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module

from verl_like.errors import ConfigError
from workers.config import ActorRolloutRefConfig, ModelConfig


@dataclass(frozen=True)
class Precision:
    """The dtype of a model's trained weights, and the compute dtype of its passes."""

    weights: torch.dtype
    compute: torch.dtype

    @property
    def cast(self) -> torch.dtype | None:
        """Dtype to which a pass casts the weights; None if no cast is needed."""
        return None if self.compute == self.weights else self.compute


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype with this name, such as float32 or torch.float32."""
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name in the configuration, such as float32 or bfloat16."""
    return str(dtype).removeprefix("torch.")


def precision_of(config: ModelConfig, device_type: str) -> Precision:
    """Return the dtypes of weights and passes; passes use bfloat16 on CUDA by default."""
    weights = dtype_of(config.dtype)
    if config.compute_dtype is not None:
        compute = dtype_of(config.compute_dtype)
    else:
        compute = torch.bfloat16 if device_type == "cuda" else weights
    if compute.itemsize > weights.itemsize:
        raise ConfigError(
            f"{config.SECTION}.compute_dtype={config.compute_dtype} is wider than the weights "
            f"({config.SECTION}.dtype={config.dtype}), whose bits are already lost. Set "
            f"{config.SECTION}.dtype=float32, or leave out {config.SECTION}.compute_dtype."
        )
    return Precision(weights, compute)


def frozen(config: ModelConfig, device_type: str) -> ModelConfig:
    """Return the config of a model that is not trained: its weights have the compute dtype."""
    narrow = name_of(precision_of(config, device_type).compute)
    return replace(config, dtype=narrow, compute_dtype=narrow)


def rollout_dtype(policy: ActorRolloutRefConfig, device_type: str) -> torch.dtype:
    """Return `rollout.dtype`, by default the dtype in which the trainer computes."""
    if policy.rollout.dtype is not None:
        return dtype_of(policy.rollout.dtype)
    return precision_of(policy.model, device_type).compute


@contextmanager
def computing_in(module: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Context in which the module computes with its weights cast to `dtype`; None means no cast.

    The casts are part of the graph, so gradients reach the weights in the weights' own dtype and
    are accumulated in it. Run the backward pass inside, too, because gradient checkpointing runs
    layers again. FSDP's mixed precision does the same to the weights that it gathers, so the
    numbers are equal on one rank and on many. Autocast differs: it leaves norms, residuals and
    activations in float32, which takes twice the memory and more time, and FSDP has no such mode.
    """
    if dtype is None:
        yield
        return

    named = module.named_parameters()
    casts = {name: weight.to(dtype) for name, weight in named if weight.is_floating_point()}
    with _reparametrize_module(module, casts, tie_weights=True):
        yield
