"""`tensordict`, imported without torch's compiler, which saves 1.8 s per start of a worker process.

On import, tensordict tells torch.compile to skip a few functions, which loads all of
`torch._dynamo`. This module skips those calls: compiled code gives the same numbers without them.
The modules of `verl_like` and `workers` import tensordict from here.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.compiler as compiler


def _import_without_compiler() -> None:
    names = "allow_in_graph", "assume_constant_result"  # they return their argument
    originals = {name: getattr(compiler, name) for name in names}

    def unchanged(function: Any) -> Any:
        return function

    for name in names:
        setattr(compiler, name, unchanged)
    try:
        import tensordict  # noqa: F401
    finally:
        for name, original in originals.items():
            setattr(compiler, name, original)


if "torch._dynamo" not in sys.modules:
    _import_without_compiler()

from tensordict import NonTensorData, NonTensorStack, TensorDict  # noqa: E402

__all__ = ["NonTensorData", "NonTensorStack", "TensorDict"]
