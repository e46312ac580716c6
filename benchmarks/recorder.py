"""Record the operations of a program on the meta device, and what they would cost on a GPU.

    with Recorder() as recorder:
        worker.update_actor(rows)      # every tensor of the model is on the meta device
    print(recorder.seconds(H100))

A meta tensor has a shape and no numbers, so nothing is computed. The recorder answers questions
that would wait for the device (`item`, a copy to the host) and counts them by place. An operation
takes as long as the slowest of its bytes, its floating-point operations, and its launch.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("verl_like", "workers", "trainer")
aten = torch.ops.aten


@dataclass(frozen=True)
class Gpu:
    """Rates that operations reach on a GPU, per second, and overheads in seconds."""

    products: float
    """Floating-point operations of products in bfloat16."""
    attention: float
    """Floating-point operations of the forward pass of attention."""
    attention_backward: float
    memory: float
    """Bytes of memory."""
    sorts: float
    """Numbers that are sorted."""
    kernel: float
    """Shortest time of an operation on the device."""
    host: float
    """Time in which the host starts one operation of a model, views included."""
    peak: float
    """Floating-point operations in the data sheet, for the MFU."""


H100 = Gpu(700e12, 350e12, 300e12, 2.4e12, 6.8e9, 3e-6, 8.5e-6, 989e12)
"""Products and copies reach 92 and 81 % of what the bare ones did (762 TFLOP/s, 2.99 TB/s). The
time of the host and the rate of sorts come from measured decoding and sampling.
"""
LONGEST_IN_ONE_READ = 16384
"""A compiled reduction over more numbers than this reads its input again for the next use."""


@dataclass
class Operation:
    """One operation: what it reads and writes, as (storage, bytes)."""

    name: str
    place: str
    reads: list[tuple[int, int]]
    writes: list[tuple[int, int]]
    flops: float = 0.0

    @property
    def bytes(self) -> int:
        """Bytes that it moves."""
        return sum(size for _, size in (*self.reads, *self.writes))

    @property
    def kind(self) -> str:
        """Return the limit of its time: attention, products, sorts, or memory."""
        if self.name.startswith("attention"):
            return "attention"
        if self.flops:
            return "products"
        return "sorts" if self.name.startswith(SORTS) else "memory"

    @property
    def is_fused(self) -> bool:
        """True if a compiler fuses it with its neighbors."""
        return self.kind == "memory" and not self.name.startswith(ALONE)

    @property
    def ends_kernel(self) -> bool:
        """True if it reduces rows that are too long to stay on the chip."""
        most = max((size for _, size in self.reads), default=0)
        return most > LONGEST_IN_ONE_READ * sum(size for _, size in self.writes)

    def seconds(self, gpu: Gpu) -> float:
        """Return its time on a GPU."""
        if self.kind == "sorts":
            return self.reads[0][1] / 4 / gpu.sorts
        rates = {"attention": gpu.attention, "attention_backward": gpu.attention_backward}
        rate = rates.get(self.name, gpu.products)
        return max(self.bytes / gpu.memory, self.flops / rate, gpu.kernel)


SORTS = ("sort", "argsort", "index_put", "_index_put")
"""Operations that sort. A gradient of indexing sorts the indices, so that sums have an order."""
ALONE = (
    "attention",
    "index",
    "_index",
    "embedding",
    "_foreach",
    "_fused",
    "topk",
    "cumsum",
    "cat",
    "nonzero",
    "searchsorted",
)
"""Beginnings of names of operations that no compiler fuses."""
GATHERS = ("index_select", "index.", "embedding.", "gather", "take")
"""Operations that read only as many numbers of their first argument as they return."""
EMPTY = ("empty", "new_empty", "empty_like", "_unsafe_view", "lift_fresh", "resize_", "set_")
"""Operations that move nothing, besides views."""
WAITS: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: lambda tensor: torch.ones((), dtype=tensor.dtype).item(),
    aten.equal.default: lambda *_: True,
    aten.nonzero.default: lambda tensor: torch.zeros(
        (tensor.numel() // 2 or 1, tensor.dim()), dtype=torch.long, device="meta"
    ),
}
"""Operations whose result the host waits for, and the answer that a program gets here."""


class Recorder(TorchDispatchMode):
    """Records what runs inside `with Recorder() as recorder`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.waits: Counter[tuple[str, str]] = Counter()
        """(operation, place) -> how often the host waits there for the device."""
        self.copies: Counter[str] = Counter()
        """Place -> copies from the host to the device."""
        self.num_started = 0
        """Operations that the host starts, with views."""
        self.storages: list[Any] = []  # kept alive, so that each has its own address

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # operations that consist of others arrive whole
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        self.num_started += 1
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_device = any(tensor.is_meta for tensor in inputs)
        if on_device and func in WAITS:
            self.waits[func._opname, place()] += 1
            return WAITS[func](*args)
        if func in (aten._to_copy.default, aten.copy_.default):
            target = torch.device(kwargs.get("device") or args[0].device)
            if on_device and target.type == "cpu":
                self.waits["copy to the host", place()] += 1
                if func is aten.copy_.default:
                    return args[0].zero_()
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
            if not inputs[-1].is_meta and target.type == "meta":
                self.copies[place()] += 1
        result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        written = [
            tensor
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(value)
            if isinstance(tensor, torch.Tensor)
        ]
        if not (on_device or any(tensor.is_meta for tensor in outputs)) or is_free(func):
            return result
        name = str(func).removeprefix("aten.")
        reads = [tensor for tensor in inputs if tensor.is_meta]
        if name.startswith(GATHERS):
            reads = [*reads[1:], *outputs]
        flops = 0.0
        if func._overloadpacket in flop_registry:
            flops = float(flop_registry[func._overloadpacket](*args, **kwargs, out_val=result))
        self.add(name, reads, [*outputs, *written], flops)
        return result

    def add(
        self, name: str, reads: Iterable[Any], writes: Iterable[Any], flops: float = 0.0
    ) -> None:
        """Record an operation."""
        self.operations.append(
            Operation(name, place(), self._sizes(reads), self._sizes(writes), flops)
        )

    def _sizes(self, tensors: Iterable[Any]) -> list[tuple[int, int]]:
        sizes: dict[int, int] = {}
        for tensor in tensors:
            if tensor.is_meta:
                storage = tensor.untyped_storage()
                self.storages.append(storage)
                here = min(tensor.numel() * tensor.element_size(), storage.nbytes())
                sizes[storage._cdata] = max(sizes.get(storage._cdata, 0), here)
        return list(sizes.items())

    def kernels(self, compiled: bool) -> list[Operation]:
        """Return the operations as the device runs them; compiled ones are fused."""
        return fused(self.operations) if compiled else self.operations

    def seconds(self, gpu: Gpu, compiled: bool = False) -> float:
        """Return the time on a GPU: of the device, or of the host if that is longer."""
        kernels = self.kernels(compiled)
        on_device = sum(kernel.seconds(gpu) for kernel in kernels)
        return max(on_device, gpu.host * (len(kernels) if compiled else self.num_started))


def is_free(func: Any) -> bool:
    """True for views, and for operations that only allocate."""
    returns = func._schema.returns
    is_view = bool(returns) and all(
        value.alias_info is not None and not value.alias_info.is_write for value in returns
    )
    return is_view or func._opname in EMPTY


def place() -> str:
    """Return the innermost line of this project that runs, and its function."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(f"{ROOT}/"):
            path = file.removeprefix(f"{ROOT}/")
            if path.startswith(ROOMS):
                return f"{path}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


def fused(operations: Sequence[Operation], eager: str = "nowhere") -> list[Operation]:
    """Return operations as a compiler runs them: neighbors without a product are one kernel.

    Operations in files whose path begins with `eager` are not fused. A kernel reads the tensors
    that existed before it, and writes those that are read after it. A compiler never fuses across
    the borders of compiled layers; this function does.
    """
    last_read = {key: at for at, op in enumerate(operations) for key, _ in op.reads}
    existed: set[int] = set()
    result: list[Operation] = []
    run: list[Operation] = []

    def end_run(end: int) -> None:
        if not run:
            return
        reads: dict[int, int] = {}
        writes: dict[int, int] = {}
        for operation in run:
            for key, size in operation.reads:
                if key not in writes:
                    reads[key] = max(size, reads.get(key, 0))
            for key, size in operation.writes:
                writes[key] = max(size, writes.get(key, 0))
        used = [(k, s) for k, s in writes.items() if k in existed or last_read.get(k, -1) >= end]
        existed.update(writes)
        result.append(replace(run[0], name="fused", reads=list(reads.items()), writes=used))
        run.clear()

    for at, operation in enumerate(operations):
        if operation.is_fused and not operation.place.startswith(eager):
            run.append(operation)
            if operation.ends_kernel:
                end_run(at + 1)
            continue
        end_run(at)
        existed.update(key for key, _ in operation.writes)
        result.append(operation)
    end_run(len(operations))
    return result
