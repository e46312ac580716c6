"""`tensordict`, imported without torch's compiler: 1.8 s less for the start of a worker process.

When it is imported, tensordict registers a few of its functions with torch.compile, which loads the
whole of `torch._dynamo`. Here these registrations are kept back until somebody loads
`torch._dynamo`. The modules of `verl_like` and `workers` import tensordict from here.
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
REGISTERING = ("allow_in_graph", "assume_constant_result")
"""The functions of `torch.compiler` that tensordict calls; each returns its argument."""

Registration = tuple[str, Callable[..., Any]]
"""Name of a function of `torch.compiler`, and what it was called with."""


class _RegisterOnceLoaded(MetaPathFinder):
    """Makes the registrations kept back, once, right after the compiler has been imported."""

    def __init__(self, kept_back: list[Registration]):
        self.kept_back = kept_back

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != COMPILER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None, "torch has its compiler"
        assert spec.loader is not None, "torch's compiler is an ordinary package"

        load = functools.partial(self._load_and_register, spec.loader.exec_module)
        spec.loader.exec_module = load  # type: ignore[method-assign]
        return spec

    def _load_and_register(self, load: Callable[[ModuleType], None], module: ModuleType) -> None:
        load(module)
        for name, function in self.kept_back:
            getattr(torch.compiler, name)(function)


def _import_without_compiler() -> None:
    if COMPILER in sys.modules or "tensordict" in sys.modules:
        return

    kept_back: list[Registration] = []
    originals = {name: getattr(torch.compiler, name) for name in REGISTERING}

    def keep_back(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        kept_back.append((name, function))
        return function

    for name in REGISTERING:
        setattr(torch.compiler, name, functools.partial(keep_back, name))
    try:
        import tensordict  # noqa: F401
    finally:
        for name, original in originals.items():
            setattr(torch.compiler, name, original)
    sys.meta_path.insert(0, _RegisterOnceLoaded(kept_back))


_import_without_compiler()

from tensordict import NonTensorData, NonTensorStack, TensorDict  # noqa: E402

__all__ = ["NonTensorData", "NonTensorStack", "TensorDict"]
