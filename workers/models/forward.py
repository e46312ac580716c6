"""Temporarily replace how a module computes, inside its hooks.

with replaced_forward(layer, compute):
    module(**inputs)                # the layer runs compute(...) instead of its class's forward
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Context in which the module computes by `forward`."""
    attributes = vars(module)
    before = attributes.get("forward")
    attributes["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del attributes["forward"]
        else:
            attributes["forward"] = before
