"""Record the operations of a program on the meta device, and what they would cost on a GPU.

    with on_meta(num_ranks=8):
        engine.build(...)                      # the model is on the meta device
        with Recorder() as recorder:
            engine.forward_rows(...)
    print(recorder.seconds(H100))

A meta tensor has a shape and no numbers, so nothing is computed. The recorder answers questions
that would wait for the device (`item`, a copy to the host) and counts them by place. An operation
takes as long as the slowest of its bytes, its floating-point operations, and its launch. Several
ranks are one process of a group that sends nothing; what the program would send is counted.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.flop_counter import flop_registry

from workers.models.pass_trace import tensors_in

META = torch.device("meta")
ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("verl_like", "workers", "trainer")
aten = torch.ops.aten


@dataclass(frozen=True)
class GpuSpeeds:
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

    @classmethod
    def from_peak(cls, peak: float, memory: float) -> GpuSpeeds:
        """Return the rates of a GPU, from the operations and bytes per second of its data sheet.

        It reaches the fractions that an H100 reaches, where products and copies take 1.09 and 1.25
        times as long as bare ones (762 TFLOP/s, 2.99 TB/s). The time of the host and the rate of
        sorts come from measured decoding and sampling.
        """
        compute, bandwidth = peak / 989e12, memory / 3.35e12
        rates = 700e12 * compute, 350e12 * compute, 300e12 * compute
        return cls(*rates, 2.4e12 * bandwidth, 6.8e9 * bandwidth, 3e-6, 8.5e-6)


H100 = GpuSpeeds.from_peak(989e12, 3.35e12)
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

    def seconds(self, gpu: GpuSpeeds) -> float:
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
    "fsdp",
    "split_with_sizes_copy",
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


class OperationRecorder(TorchDispatchMode):
    """Records what runs inside `with Recorder() as recorder`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.waits: Counter[tuple[str, str]] = Counter()
        """(operation, place) -> how often the host waits there for the device."""
        self.copies: Counter[str] = Counter()
        """Place -> copies from the host to the device."""
        self.sent: Counter[str] = Counter()
        """Collective -> bytes of the whole tensors that it gathers or reduces."""
        self.num_started = 0
        """Operations that the host starts, with views."""
        self.storages: list[Any] = []  # kept alive, so that each has its own address

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and record its bytes, floating-point operations and waits."""
        kwargs = kwargs or {}
        if any(cls.__name__ == "DTensor" for cls in types):
            return NotImplemented  # it runs the operations of this rank
        if torch.is_inference_mode_enabled():  # operations that consist of others arrive whole
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        self.num_started += 1
        inputs = tensors_in((*args, *kwargs.values()))
        if func.namespace == "c10d":
            self.sent[func._opname] += max(tensor.nbytes for tensor in inputs)
            return func(*args, **kwargs)
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
        outputs = tensors_in(result)
        written = [
            tensor
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tensors_in(value)
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
        elif func._opname == "_grouped_mm":  # of experts
            flops = 2.0 * args[0].numel() * args[1].shape[-1]
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

    def device_and_host(self, gpu: GpuSpeeds, compiled: bool) -> tuple[float, float]:
        """Return the seconds of the device, and those in which the host starts operations."""
        kernels = self.kernels(compiled)
        on_device = sum(kernel.seconds(gpu) for kernel in kernels)
        return on_device, gpu.host * (len(kernels) if compiled else self.num_started)

    def seconds(self, gpu: GpuSpeeds, compiled: bool = False) -> float:
        """Return the time on a GPU: of the device, or of the host if that is longer."""
        return max(self.device_and_host(gpu, compiled))


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
            if path.startswith(ROOMS) and file != __file__:
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


# ---------------------------------------------------------------------------------------------
# Programs on the meta device
# ---------------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """Attention whose operations are recorded and not computed."""

    @staticmethod
    def forward(ctx: Any, pairs: float, *states: Any) -> Any:
        query = states[0]
        ctx.save_for_backward(*states)
        ctx.flops = pairs * query.shape[1] * query.shape[2]
        output = torch.empty_like(query)
        _note("attention", states, [output], 4 * ctx.flops)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        states = ctx.saved_tensors  # checkpointing allows to read it once
        grads = [torch.empty_like(part) for part in states]
        _note("attention_backward", [*states, grad], grads, 10 * ctx.flops)
        return None, *grads


def _note(name: str, reads: Iterable[Any], writes: Iterable[Any], flops: float) -> None:
    recorder = _get_current_dispatch_mode()
    if isinstance(recorder, OperationRecorder):
        recorder.add(name, reads, writes, flops)


def attend(*states: Any, left: int = -1, **_: Any) -> Any:
    """Record attention of packed rows (`workers.training.passes.attention.Attend`)."""
    query, key, value, bounds, key_bounds, *_longest = states
    pairs = 0.0
    for count, keys in zip(bounds.lengths, key_bounds.lengths, strict=True):
        pairs += count * (keys - count) + count * (count + 1) / 2
        if left >= 0:
            outside = max(0, keys - left - 1), max(0, keys - count - left - 1)
            pairs -= outside[0] * (outside[0] + 1) / 2 - outside[1] * (outside[1] + 1) / 2
    return _Attention.apply(pairs, query, key, value)  # type: ignore[no-untyped-call]


@contextmanager
def on_meta(num_ranks: int = 1) -> Iterator[None]:
    """Context in which models are built on the meta device, as rank 0 of several GPUs would."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from workers.training import build_model
    from workers.training.passes import attention, lm_head
    from workers.training.passes.attention import VarlenKernel

    def with_lengths(lengths: Any, device: Any) -> Any:
        tensor: Any = bounds(lengths, device)
        tensor.lengths = list(lengths)
        return tensor

    def empty(*args: Any) -> Any:
        return move_buffers(empty_model(*args))

    kernel = VarlenKernel("flash attention", attend, torch.bfloat16, has_softcap=True)
    bounds, rows_per_chunk = attention._bounds, lm_head.rows_per_chunk
    empty_model, fsdp = build_model.empty_model, "torch.distributed.fsdp._fully_shard"
    stand_ins: dict[str, Any] = {
        "sys.excepthook": sys.excepthook,  # a process group replaces it
        "torch.compile": lambda function, **_: function,
        "verl_like.tensor_ops._compiled": lambda function: function,
        "torch.optim.optimizer._get_fused_kernels_supported_devices": lambda: ["meta"],
        "workers.training.build_model.prepare_gpu_process": lambda: None,
        "workers.training.build_model.kernel_blocker": lambda *_: "",
        "workers.training.passes.varlen.find_kernel": lambda *_: (kernel, ""),
        "workers.training.build_model.empty_model": empty,
        "workers.training.build_model.load_weights": lambda *_: None,
        "workers.training.passes.attention._bounds": with_lengths,
        "workers.training.model_parts.compile.all_reduce": lambda *_: False,
        "workers.parallel.fsdp._anywhere": lambda here, *_: here,
        "workers.training.out_of_memory._num_collectives": lambda _: 0,
        f"{fsdp}._fully_shard._get_device_from_mesh": lambda _: META,
        f"{fsdp}._fsdp_param_group.FSDPParamGroup._validate_no_meta_params": lambda _: None,
        "workers.training.passes.lm_head.rows_per_chunk": lambda config, words=None, _="": (
            rows_per_chunk(config, words, "cuda")
        ),
    }
    # an open group of this process keeps its entries; copies, because names must not occur twice
    group = dist.distributed_c10d
    tables = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_pg_to_tag")
    stand_ins |= {f"{group.__name__}.{table}": dict(getattr(group, table)) for table in tables}
    tags = {tag: [*groups] for tag, groups in group._tags_to_pg.items()}
    stand_ins |= {f"{group.__name__}._tags_to_pg": tags, f"{group.__name__}._world": group._World()}
    known = {*group._pg_names.values()}
    with patched(stand_ins), patch("torch.meta", torch.cpu, create=True):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
        try:
            yield
        finally:
            for name in {*group._pg_names.values()} - known:
                torch._C._distributed_c10d._unregister_process_group(name)
    group._update_default_pg(group._world.default_pg)


@contextmanager
def patched(stand_ins: Mapping[str, Any]) -> Iterator[None]:
    """Context in which these names are bound to stand-ins."""
    with ExitStack() as stack:
        for target, stand_in in stand_ins.items():
            stack.enter_context(patch(target, stand_in))
        yield


def move_buffers(module: Any) -> Any:
    """Move the buffers of a module to the meta device, where its weights are; return it."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(META)
    return module
