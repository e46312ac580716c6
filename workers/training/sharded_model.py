"""A model on its ranks: computes on shards, and yields whole weights on request.

    build_model(model, worker)          # `workers.training.build_model`
    with model.running():               # run passes inside
        ...
    for name, tensor in model.named_full_tensors(): ...

Strategies are applied in `workers.parallel.fsdp`. On one rank, and under strategy ddp without
tensor and pipeline parallelism, the module has every weight as a plain tensor, so a rollout engine
in the same process can read it by reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from verl_like.batch.ragged import RaggedTensor
from verl_like.errors import ConfigError
from workers.models.causal_lm import Head
from workers.models.precision import Precision
from workers.models.state import named_state, persistent_buffers
from workers.models.support import Support
from workers.parallel.fsdp import GradientWatch, full_tensor, reshard, tensor_on_first
from workers.parallel.groups import RankGroups
from workers.parallel.offload import HostBlocks, resident
from workers.parallel.sharding import ParallelDims
from workers.training.microbatch import MicroBatches, RowColumns
from workers.training.passes.attention import VarlenKernel, packed_rows
from workers.training.passes.packing import Feed, RowPasses
from workers.training.role_model_spec import RoleModelSpec

if TYPE_CHECKING:
    from workers.models.images import ImageInput
    from workers.training.loss import Loss

PartT = TypeVar("PartT", bound="ModelPart")
Named = Iterator[tuple[str, Tensor]]
Arrange = Callable[[Iterable[tuple[str, Tensor]]], Named]
"""Whole tensors by the module's names -> tensors under their exported names."""


class ModelPart:
    """An optional feature that changes the module itself; each method does nothing by default.

    Example:

        for part in parts: part.check(model)        # before there is a module
        for part in parts: part.change(model)       # the empty module, in the order of `load_parts`
        ...                                         # the module is sharded and gets its weights
        for part in parts: part.finish(model)
        with part.computing(): part.fed(feed)       # around passes, and before each
    """

    def check(self, model: Model) -> None:
        """Reject unsupported settings, before there is a module."""

    def change(self, model: Model) -> None:
        """Change the module while it has no weights."""

    def finish(self, model: Model) -> None:
        """Finish the setup; the module has its weights."""

    def computing(self) -> AbstractContextManager[None]:
        """Context in which passes run."""
        return nullcontext()

    def fed(self, feed: Feed) -> None:
        """Called with the arguments of each forward pass before it runs."""

    def check_rows(self, columns: RowColumns) -> None:
        """Reject rows that the part does not support, when a batch arrives."""

    def extend_loss(
        self, model: Model, reading: Any, micro_batches: MicroBatches, loss: Loss
    ) -> Loss:
        """Return the loss of a mini-batch with the terms of the part."""
        return loss

    def metrics(self, model: Model) -> dict[str, Tensor]:
        """Return the part's metrics of a mini-batch, on the device; every rank calls this."""
        return {}

    def sum_gradients(self) -> None:
        """Sum gradients over the ranks with partial gradients; called before an optimizer step."""


class Model:
    """One model of one role on this rank; `build_model` sets the remaining attributes."""

    device: torch.device
    dims: ParallelDims
    groups: RankGroups
    precision: Precision
    module: Any
    whole_module: Any
    """The module with all layers: `module`, or with pipeline stages a copy on the meta device."""
    support: Support
    """How models of its class may run."""
    is_sharded: bool
    is_one_unit = False
    """True if FSDP2 gathers the whole module together."""
    gradient_watch: GradientWatch | None = None
    """Drops the gradients of weights that no pass reached, if FSDP2 makes them."""
    cast: torch.dtype | None = None
    """Dtype to which a pass casts the weights; None if FSDP casts them or no cast is needed."""
    kernel: VarlenKernel | None = None
    """The FlashAttention kernel for packed rows; None if none runs here."""

    def __init__(self, spec: RoleModelSpec) -> None:
        self.spec = spec
        self.model_config, self.sharding = spec.model, spec.sharding
        self.head: Head = spec.head
        self.host_blocks = HostBlocks()
        self.row_passes = RowPasses()
        self.parts: list[ModelPart] = []
        self.layers: Any = None
        """Runs passes through the layers of this rank (`passes/forward_backward.py`)."""
        self.vocab: Any = None
        """The tokens of this rank's head, if it is split over ranks."""
        self.is_compiled = False

    def part(self, kind: type[PartT]) -> PartT | None:
        """Return the part of this class, or None."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    @property
    def is_whole(self) -> bool:
        """True if this rank holds every weight as a plain tensor."""
        return self.groups.tp is None and not self.is_sharded and self.groups.pp is None

    @property
    def is_alone(self) -> bool:
        """True if no other rank takes part in a pass, and nothing gathers weights."""
        return self.dims.world == 1 and not self.is_sharded

    @cached_property
    def image_input(self) -> ImageInput:
        """The images in the rows of passes; an error if the model reads none."""
        from workers.models.folder import model_folder
        from workers.models.images import ImageInput, image_reader

        folder = model_folder(self.model_config.path, weights=False)
        images = ImageInput(self.module, image_reader(str(folder)))
        if self.row_passes.ranks is not None:
            raise ConfigError(
                "rows with images cannot be split over ranks. Set parallel.sp=1, or leave the "
                "images out."
            )
        if images.looks_ahead:
            self.row_passes = replace(self.row_passes, kind="padded", shares=False)
        return images

    @property
    def packs(self) -> bool:
        """True if rows are concatenated without padding."""
        return self.row_passes.kind == "packed"

    @contextmanager
    def running(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Context in which the module (and the optimizer's state) is ready to compute on the
        device.

        Each packed row attends only to itself. On a CPU, large float32 linear layers use oneDNN,
        unless the model is compiled or MKL is faster. A sharded module is resharded at the end.
        """
        with ExitStack() as stack:
            stack.enter_context(self.resident(optimizer))
            if self.is_sharded:
                stack.callback(reshard, self.module)
            for part in self.parts:
                stack.enter_context(part.computing())
            if self.device.type == "cpu" and not self.is_compiled:
                from workers.cpu import onednn

                if not onednn.mkl_is_faster():
                    stack.enter_context(onednn.onednn_linears(self.module))
            if self.packs:
                stack.enter_context(packed_rows(self.module, self.kernel, self.is_compiled))
            yield

    def resident(
        self, optimizer: torch.optim.Optimizer | None = None
    ) -> AbstractContextManager[None]:
        """Context in which offloaded weights and moments are on the device."""
        return resident(self.module, optimizer, self.sharding, self.device, self.host_blocks)

    def feed(self, columns: RowColumns, reads: RaggedTensor) -> Feed:
        """Return the arguments of one forward pass, after showing them to the model's parts."""
        feed = self.row_passes.feed(columns, reads, self.device)
        if feed.images is not None:
            images = self.image_input.arguments(feed.inputs, feed.images, self.device)
            feed.inputs.update(images)
        for part in self.parts:
            part.fed(feed)
        return feed

    def parameters(self) -> list[nn.Parameter]:
        """Return this rank's shards of the trained parameters, as the optimizer sees them."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def named_full_tensors(
        self, on_all_ranks: bool = True, dtype: torch.dtype | None = None, merged: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight as a full tensor, by its Hugging Face name, on the device.

        Collective: every rank must exhaust the iterator. Unless `on_all_ranks`, it is empty on all
        ranks except rank 0. Parameters come first, in `dtype` or their own dtype. Persistent
        buffers follow, always in their own dtype, because passes read them in that dtype. If
        `merged`, LoRA is merged into the base weights; otherwise base and factors come separately,
        in their own dtypes. A tensor that is not gathered, merged or converted is the live weight:
        do not modify it.
        """
        fixed_dtype = {name for name, _ in persistent_buffers(self.module)}
        arranged: Arrange = iter
        if self.model_config.lora_rank > 0:
            from workers.models.lora import adapter_parts, merged_tensors, split_tensors

            arranged = partial(merged_tensors if merged else split_tensors, self.module)
            fixed_dtype |= set() if merged else adapter_parts(self.module)

        def arrange(named: Iterable[tuple[str, Tensor]]) -> Named:
            for name, tensor in arranged(named):
                keeps = dtype is None or name in fixed_dtype or not tensor.is_floating_point()
                yield name, tensor if keeps else tensor.to(dtype)

        return whole_tensors(self, named_state(self.module), arrange, on_all_ranks)

    def full_trained_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the trained weights as full tensors, by this module's names.

        Collective: every rank must exhaust the iterator.
        """
        named = self.module.named_parameters()
        return whole_tensors(self, ((n, weight) for n, weight in named if weight.requires_grad))

    def without_copies(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Drop the duplicates of weights that another pipeline stage owns."""
        copies = tuple(f".{name}" for name in self.layers.copies)
        return {name: tensor for name, tensor in tensors.items() if not f".{name}".endswith(copies)}

    def weights_checksum(self, dtype: torch.dtype | None = None) -> str:
        """Return a hash of the full weights in `dtype`, which is equal for every sharding.

        Collective: every rank must call this.
        """
        from workers.weights.full_weights import checksum_of

        return checksum_of(self.named_full_tensors(dtype=dtype))


def whole_tensors(
    model: Model,
    named: Iterable[tuple[str, Tensor]],
    arrange: Arrange = iter,
    on_all_ranks: bool = True,
) -> Named:
    """Yield these weights of all stages as full tensors, converted by `arrange`.

    Collective: every rank must exhaust the iterator.
    """
    copies, stage = model.layers.copies, model.groups.stage
    mine = [(name, weight) for name, weight in named if name not in copies]
    with model.resident():
        gathered = (
            (n, full_tensor(w) if on_all_ranks else tensor_on_first(w, stage)) for n, w in mine
        )
        full = arrange((name, tensor) for name, tensor in gathered if tensor is not None)
        shapes = ((n, torch.empty(w.shape, dtype=w.dtype, device="meta")) for n, w in mine)
        yield from model.layers.gather_stages(full, arrange(shapes), on_all_ranks)
