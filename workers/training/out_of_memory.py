"""Let all ranks of a model reach the end of a mini-batch if one of them runs out of memory.

A rank that fails in a pass leaves the others waiting in the next collective. So it runs the passes
of the mini-batch again, over rows without tokens and without the collectives that it has started.
At the end all ranks learn of the failure, and can repeat the mini-batch
(`workers.training.update`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from workers.training.microbatch import MicroBatches, dummy_micro_batch

if TYPE_CHECKING:
    from workers.training.sharded_model import Model

Totals = dict[str, Tensor]


def can_repeat(model: Model, has_gradients: bool) -> bool:
    """True if a mini-batch can be repeated after a pass has run out of memory.

    `has_gradients` tells whether earlier gradients would be lost. Several ranks can if the
    collectives of a pass do not depend on its rows: without sp, tp, pp and ep. FSDP2 needs
    `reset_iter_state`, which torch 2.13 has.
    """
    if has_gradients or model.is_alone:
        return not has_gradients
    is_split_by_rows = model.groups.data is not None and model.groups.model is None
    has_reset = not model.is_sharded or hasattr(model.module, "reset_iter_state")
    return is_split_by_rows and model.dims.ep == 1 and has_reset


def run_to_the_end(
    model: Model,
    batches: MicroBatches,
    run: Callable[[MicroBatches], Totals],
    has_gradients: bool,
) -> tuple[Totals, str]:
    """Return `run(batches)` and "", or any numbers and the error if memory ran out.

    The error is raised if the mini-batch cannot be repeated, or no other rank has rows of it.
    """
    before = _num_collectives(model)
    try:
        return run(batches), ""
    except torch.OutOfMemoryError as error:
        if model.groups.data is None or not can_repeat(model, has_gradients):
            raise
        message = str(error)
    num_done = _num_collectives(model) - before
    model.module.zero_grad()
    if model.is_sharded:
        model.module.reset_iter_state()
    torch.cuda.empty_cache()
    with _WithoutCollectives(num_done):
        return run([dummy_micro_batch(columns) for columns, _ in batches]), message


def _num_collectives(model: Model) -> int:
    """Return how many collectives this rank has started in the groups of a pass."""
    groups: set[Any] = {model.groups.data, model.groups.loss} - {None}
    if model.is_sharded:
        groups |= {*model.groups.fsdp_mesh.get_all_groups()}
    backends = [group._get_backend(model.device) for group in groups]
    return sum(backend._get_sequence_number_for_group() for backend in backends)


class _WithoutCollectives(TorchDispatchMode):
    """Context in which the first `count` collectives do nothing, and leave any numbers."""

    def __init__(self, count: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_left = count

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        from torch._C._distributed_c10d import FakeWork, Work

        if func.namespace != "c10d" or self.num_left == 0:
            return func(*args, **(kwargs or {}))
        self.num_left -= 1
        return args[0], Work.boxed(FakeWork())
