"""`tensordict`, imported without the compiler: that takes a second off the start of every process.

When it is imported, tensordict tells torch.compile about a few functions, which loads the whole of
`torch._dynamo`. Here these messages are kept back until somebody loads `torch._dynamo`. The modules
of `verl_like` import tensordict from here.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.compiler

COMPILER = "torch._dynamo"
MARKS = ("allow_in_graph", "assume_constant_result")
"""The functions of `torch.compiler` that tensordict calls on its own ones; each gives back what it
is given.
"""
Message = tuple[str, Callable[..., Any]]


class _WhenCompilerLoads(MetaPathFinder):
    """Delivers the messages kept back, once, right after the compiler has been imported."""

    def __init__(self, messages: list[Message]):
        self.messages = messages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != COMPILER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None, "torch has its compiler"
        assert spec.loader is not None, "torch's compiler is an ordinary package"
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            for mark, function in self.messages:
                getattr(torch.compiler, mark)(function)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _import_without_compiler() -> None:
    if COMPILER in sys.modules or "tensordict" in sys.modules:
        return
    kept: list[Message] = []
    real = {mark: getattr(torch.compiler, mark) for mark in MARKS}

    def keep(mark: str, function: Callable[..., Any]) -> Callable[..., Any]:
        kept.append((mark, function))
        return function

    for mark in MARKS:
        setattr(torch.compiler, mark, functools.partial(keep, mark))
    try:
        import tensordict  # noqa: F401
    finally:
        for mark in MARKS:
            setattr(torch.compiler, mark, real[mark])
    sys.meta_path.insert(0, _WhenCompilerLoads(kept))


_import_without_compiler()

from tensordict import NonTensorData, NonTensorStack, TensorDict  # noqa: E402

__all__ = ["NonTensorData", "NonTensorStack", "TensorDict"]
