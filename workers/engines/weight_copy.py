"""Freeing and allocating the weights of an engine that has a module for itself; `native_rollout`, `hf_rollout`."""

from __future__ import annotations

from typing import Any

import torch


def free_weights(module: Any) -> list[torch.Size]:
    """Drop every parameter's memory; returns the shapes, for `allocate_weights`."""
    shapes = [parameter.shape for parameter in module.parameters()]
    for parameter in module.parameters():
        parameter.data = parameter.data.new_empty(0)
    return shapes


def allocate_weights(module: Any, shapes: list[torch.Size]) -> None:
    """Memory for every parameter again; what it holds is undefined."""
    for parameter, shape in zip(module.parameters(), shapes, strict=True):
        parameter.data = parameter.data.new_empty(shape)
