"""Number types: what weights are kept in, what a pass computes in, what a rollout's copy is in.

People train with float32 master weights and moments and compute in bfloat16, so that is the default
on CUDA; on a CPU, where few processors have bfloat16 products, all is float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module

from verl_like.errors import ConfigError

if TYPE_CHECKING:
    from workers.config import ActorRolloutRefConfig, ModelConfig


@dataclass(frozen=True)
class Precision:
    """The type of a model's trained weights, and the type that its passes compute in."""

    weights: torch.dtype
    compute: torch.dtype

    @property
    def cast(self) -> torch.dtype | None:
        """What weights are cast to for a pass; None where they are computed with as they are."""
        return None if self.compute == self.weights else self.compute


def dtype_of(name: str) -> torch.dtype:
    """The type of that name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def name_of(dtype: torch.dtype) -> str:
    """float32, bfloat16: as the configuration writes it."""
    return str(dtype).removeprefix("torch.")


def precision_of(config: ModelConfig, device_type: str) -> Precision:
    """`model.dtype` and `model.compute_dtype`, whose null is bfloat16 on CUDA."""
    weights = dtype_of(config.dtype)
    if config.compute_dtype is not None:
        compute = dtype_of(config.compute_dtype)
    else:
        compute = torch.bfloat16 if device_type == "cuda" else weights
    if compute.itemsize > weights.itemsize:
        raise ConfigError(
            f"model.compute_dtype={config.compute_dtype} is wider than the weights "
            f"(model.dtype={config.dtype}), whose bits are lost already; set model.dtype=float32, "
            "or leave model.compute_dtype out."
        )
    return Precision(weights, compute)


def frozen(config: ModelConfig, device_type: str) -> ModelConfig:
    """For a model that gets no steps: weights of the type that passes compute in."""
    narrow = name_of(precision_of(config, device_type).compute)
    return replace(config, dtype=narrow, compute_dtype=narrow)


def rollout_dtype(policy: ActorRolloutRefConfig, device_type: str) -> torch.dtype:
    """`rollout.dtype`, whose null is the type that the trainer computes in."""
    if policy.rollout.dtype is not None:
        return dtype_of(policy.rollout.dtype)
    return precision_of(policy.model, device_type).compute


@contextmanager
def computing_in(module: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Within, a module that is whole computes with its weights cast to `dtype`; None casts nothing.

    The casts are part of the graph, so gradients arrive at the weights in their own type and are
    added up in it; a backward pass belongs inside, as gradient checkpointing runs layers again.

    This is what FSDP's mixed precision does to the weights that it gathers, so the numbers are the
    same on one rank and on many. Autocast's are others: it leaves norms, residuals and activations
    in float32, which takes twice the memory and more time, and FSDP has no such mode.
    """
    if dtype is None:
        yield
        return

    own = module.named_parameters()
    casts = {name: weight.to(dtype) for name, weight in own if weight.is_floating_point()}
    with _reparametrize_module(module, casts, tie_weights=True):
        yield
